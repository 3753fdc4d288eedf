"""Kills ranks of elastic runs at random moments, again and again: every run must end with the digest of the undisturbed one.

    cargo build --release
    python3 bench/elastic.py --deaths 1000
    python3 bench/elastic.py --price --rounds 16 [--before OTHER]    # runs that nobody disturbs

Two hosts are network namespaces of this machine, as root (`hosts.py`). A launcher replaces each rank that dies. The next one is killed a random time after the others have made a step, so also while the
replacement joins; with `ddp` sometimes another one while they meet. A stage of a pipeline first has two ranks again, since nobody else has its weights. Each step must be in metrics.jsonl exactly once: no sample was lost or taken twice. results/elastic.json has, for each case, the
deaths and how long the others took to go on, from the end of the last step. Exits with 1 if a run has failed or differs.
"""
import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import Record, aligned, arguments_for, interval, parsed, provenance, ranks_of, train, write
from hosts import Network, Route

RUN = "train --model cnn --global-batch-size 64 --micro-batch-size 8 --samples 6400 --quiet --optimizer adamw"
CASES = {
    "ddp shm": "--elastic 2:4 --nproc 4 --transport shm",
    "ddp tcp": "--elastic 2:4 --nproc 4 --transport tcp",
    "sharded3 shm": "--elastic 2:4 --nproc 4 --strategy sharded3 --replicate-shards 2",
    "sharded3 tcp": "--elastic 2:4 --nproc 4 --strategy sharded3 --replicate-shards 2 --transport tcp",
    "pipeline": "--elastic 2:4 --nproc 4 --mesh pp=2,dp=2 --schedule 1f1b",
    "two hosts": "--elastic 2:4 --nproc 2",
}
LIMIT_S = 300


class Run:
    """A run of all hosts, each with its launcher, in a folder of its own."""

    def __init__(self, program: str, case: str, steps: int, folder: Path, is_elastic: bool) -> None:
        text = CASES[case]
        if not is_elastic:
            for flags, others in (("--elastic 2:4", ""), ("--replicate-shards 2", ""), ("--nproc 2", "--nproc 4")):
                text = text.replace(flags, others)
        words = text.split()
        restarts = ["--max-restarts", "100000", "--evict-after", "5"] if is_elastic else []
        self.case, self.folder = case, folder
        self.network = Network(2) if case == "two hosts" and is_elastic else None
        if self.network:
            self.network.everywhere(Route())
        self.launchers = []
        for host in range(2 if self.network else 1):
            command = [program, *RUN.split(), *words, *restarts, "--steps", str(steps), "--run-dir", str(folder), "--name", "run"]
            log = open(folder / f"launcher{host}.log", "w", encoding="utf-8")
            variables = {"PACELINE_SECRET": "a secret of this test"}
            streams = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": folder}
            if self.network:
                hosts = self.network.hosts
                command += ["--nnodes", "2", "--node-rank", str(host), "--master-addr", hosts[0].address, "--master-port", "29500"]
                self.launchers.append(hosts[host].start(command, variables, **streams))
            else:
                self.launchers.append(subprocess.Popen(command, env=os.environ | variables, **streams))

    def text(self) -> str:
        file = self.folder / "run" / "metrics.jsonl"
        return file.read_text() if file.exists() else ""

    def regroups(self) -> list[Record]:
        """The changes after which the ranks have made a step."""
        lines = self.text().splitlines()
        last = max((at for at, line in enumerate(lines) if '"loss"' in line), default=0)
        return [json.loads(line) for line in lines[:last] if '"regroup_s"' in line]

    def losses(self) -> int:
        return sum(len(line["lost"]) for line in self.regroups())

    def ranks(self) -> list[int]:
        return [pid for launcher in self.launchers for pid in ranks_of(launcher.pid).values()]

    def is_whole(self) -> bool:
        """Whether all ranks have made a step together since one was lost."""
        regroups = self.regroups()
        return bool(self.text()) and (not regroups or regroups[-1]["members"] == 4)

    def kill(self, rank: int) -> int:
        try:
            os.kill(rank, signal.SIGKILL)
        except ProcessLookupError:
            # It has just been left out, or the run is over.
            return 0
        return 1

    def is_running(self) -> bool:
        return all(launcher.poll() is None for launcher in self.launchers)

    def end(self) -> list[int]:
        try:
            return [launcher.wait(LIMIT_S) for launcher in self.launchers]
        finally:
            for launcher in self.launchers:
                launcher.kill()
            if self.network:
                self.network.close()

    def digest(self) -> str:
        return json.loads((self.folder / "run" / "summary.json").read_text())["weights_sha256"]

    def said(self) -> str:
        logs = [f"--- {file.name}\n{file.read_text()[-3000:]}" for file in sorted(self.folder.glob("launcher*.log"))]
        return "".join([*logs, *(f"{line}\n" for line in self.regroups()[-5:])])


def disturb(run: Run, chance: random.Random, most: int) -> int:
    """Kills ranks one after the other until the run ends. Returns how many."""
    deaths = 0
    while run.is_running() and deaths < most:
        before = run.losses()
        ranks = run.ranks()
        if len(ranks) > 2 and (run.is_whole() if run.case == "pipeline" else run.text()):
            victims = chance.sample(ranks, 2 if "ddp" in run.case and run.is_whole() and chance.random() < 0.3 else 1)
            for victim in victims:
                deaths += run.kill(victim)
                time.sleep(chance.uniform(0.0, 0.15) if len(victims) > 1 else 0.0)
            begin = time.monotonic()
            # A process that had not become a member is not missed.
            while run.is_running() and run.losses() == before and time.monotonic() < begin + 5:
                time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.8))
    return deaths


def undisturbed(program: str, case: str, steps: int) -> str:
    with tempfile.TemporaryDirectory(prefix="elastic_") as folder:
        run = Run(program, case, steps, Path(folder), is_elastic=False)
        if any(run.end()):
            sys.exit(run.said())
        return run.digest()


def one(arguments: argparse.Namespace, case: str, seed: int, expected: str, most: int) -> Record:
    with tempfile.TemporaryDirectory(prefix="elastic_") as folder:
        run = Run(arguments.paceline, case, arguments.steps, Path(folder), is_elastic=True)
        deaths = disturb(run, random.Random(seed), most)
        codes = run.end()
        steps = sorted(json.loads(line)["step"] for line in run.text().splitlines() if '"loss"' in line)
        problem = f"exit codes {codes}" if any(codes) else ""
        if not problem and run.digest() != expected:
            problem = f"digest {run.digest()} instead of {expected}"
        if not problem and steps != list(range(1, arguments.steps + 1)):
            missing, twice = sorted(set(range(1, arguments.steps + 1)) - set(steps)), [step for step in set(steps) if steps.count(step) > 1]
            problem = f"steps {missing} are missing, and {twice} were made twice"
        lost = [line["regroup_s"] for line in run.regroups() if line["lost"]]
        record = {"seed": seed, "deaths": deaths, "regroup_s": lost, "problem": problem}
        return record | ({"said": run.said()} if problem else {})


def price(arguments: argparse.Namespace) -> None:
    """Undisturbed runs with `--elastic` over runs without, and those over themselves; and all-reduces of 4 KB of two programs."""
    binary, other = arguments.paceline, arguments.before or arguments.paceline
    step = lambda flags: lambda: train(binary, f"--nproc 2 --global-batch-size 64 --micro-batch-size 8 --samples 6400 {flags}")["step_ms_median"]  # noqa: E731
    records = []
    for transport in ("shm", "tcp"):
        small, whole = f"--channels 4 --hidden 8 --steps 1000 --transport {transport}", f"--steps 60 --transport {transport}"
        pairs = {f"{transport}, {name}": (step(f"{flags} --elastic 2:2"), step(flags)) for name, flags in (("a small model", small), ("cnn", whole))}
        pairs[f"{transport}, 4 KB all-reduce"] = (lambda by=transport: all_reduce(binary, by), lambda by=transport: all_reduce(other, by))
        for name, (now, before) in pairs.items():
            rounds = [[of() for of in ((now, before, before) if at % 2 else (before, before, now))] for at in range(arguments.rounds)]
            rounds = [of if at % 2 else [of[2], *of[:2]] for at, of in enumerate(rounds)]
            of = {"over": interval([now / before for now, before, _ in rounds]), "itself": interval([again / before for _, before, again in rounds])}
            records.append({"what": name, **of, "all": rounds})
            print(name, {key: f"{value['median']:.3f} [{value['low']:.3f}-{value['high']:.3f}]" for key, value in of.items()}, flush=True)
    write(arguments.out.with_stem(f"{arguments.out.stem}_price"), {**provenance(), "rounds": arguments.rounds, "pairs": records})


def all_reduce(binary: Path, transport: str) -> float:
    with tempfile.TemporaryDirectory(prefix="elastic_") as folder:
        words = f"bench all_reduce -b 4K -e 4K --iters 4000 -w 200 --transport {transport} -J bench.json"
        subprocess.run([binary, *words.split()], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return json.loads((Path(folder) / "bench.json").read_text())["results"][0]["out_of_place"]["time"]


def main() -> None:
    parser = arguments_for(__doc__ or "", "elastic.json", rounds=16)
    parser.add_argument("--deaths", type=int, default=1000, help="of all cases together (default: 1000)")
    parser.add_argument("--steps", type=int, default=600, help="of a run (default: 600)")
    parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--price", action="store_true", help="compare runs that nobody disturbs (FILE: ..._price.json)")
    parser.add_argument("--before", type=Path, metavar="PATH", help="another build, for --price")
    arguments = parsed(parser)
    if arguments.price:
        return price(arguments)
    origin, records = provenance(), list[Record]()
    for case in arguments.cases:
        expected = undisturbed(arguments.paceline, case, arguments.steps)
        runs: list[Record] = []
        while sum(run["deaths"] for run in runs) < arguments.deaths / len(arguments.cases):
            left = arguments.deaths // len(arguments.cases) - sum(run["deaths"] for run in runs)
            runs.append(one(arguments, case, arguments.seed + len(runs), expected, max(left, 1)))
            if runs[-1]["problem"]:
                print(f"{case}, seed {runs[-1]['seed']}: {runs[-1]['problem']}\n{runs[-1]['said']}", flush=True)
        times = sorted(seconds for run in runs for seconds in run["regroup_s"])
        quantile = lambda part: times[min(len(times) - 1, int(part * len(times)))] if times else 0.0  # noqa: E731
        records.append({
            "case": case, "digest": expected, "runs": len(runs), "deaths": sum(run["deaths"] for run in runs),
            "failed": sum(bool(run["problem"]) for run in runs), "median_s": quantile(0.5), "p99_s": quantile(0.99), "most_s": quantile(1.0), "all": runs,
        })
        print(json.dumps({key: value for key, value in records[-1].items() if key != "all"}), flush=True)
        # A run is long: what was measured is kept if it ends early.
        write(arguments.out, {**origin, "steps": arguments.steps, "cases": records})
    table = [["case", "runs", "deaths", "failed", "median s", "p99 s", "most s"]]
    table += [[of["case"], *(str(of[key]) for key in ("runs", "deaths", "failed")), *(f"{of[key]:.2f}" for key in ("median_s", "p99_s", "most_s"))] for of in records]
    print(aligned(table, {0}))
    if any(of["failed"] for of in records):
        sys.exit("some runs have failed")


if __name__ == "__main__":
    main()
