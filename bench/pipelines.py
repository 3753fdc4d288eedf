"""Pipelines: beside PyTorch's, and what ledger, choice of schedule and advice are worth.

    cargo build --release && cargo build --release -p paceline-strategies --example sleeping_stages
    python3 bench/pipelines.py
    python3 bench/pipelines.py --parts peer --out results/pipelines_peer.json

`peer`: the Llama of 7.4 million parameters on 2 ranks of 1 thread, batches of 32 as 8 micro-batches of 4, and of 8 as 8 of 1. In
each round every one of our schedules runs with its best cut, and then each counterpart in PyTorch with the cuts of `PEER`. The
ratio is the samples per second of ours over the fastest of theirs, and over its namesake. PyTorch is set up as bench/README.md says.

`two`: our schedules on two ranks by the wall clock: is the one that `auto` chooses within 2 % of the fastest, are the schedules with
halves as fast as 1F1B, does the ledger close?

`sleeping`: four and eight ranks whose layers sleep (`sleeping_stages`), since two cores cannot compute four stages at once; lists,
executor, messages and waiting are real. Is what is executed the plan, does the ledger close to 1 %, is the schedule that the
rehearsal calls best within 2 % of the fastest?

`faults`: a slow stage, a late pass, a slow link and a clipping barrier are planted. Each must be the cause that grows most, and by
what is expected, within 10 %: what the clock says that idle time grows by, or what follows from the durations.

`advice`: runs that begin badly; the advice is followed, five times each. The gain must be within 20 % of its promise.

`kills`: a random rank of a pipeline is killed at a random moment, `--kills` times (200). All ranks must be down within a second, and
the right one named.

Prints a table for each part and writes raw values with date, machine and commit. Only the standard library is needed. Exits with 1 if
something could not be run, and with 2 on a wrong argument. A bar that is missed is reported, and is no error.
"""
import argparse
import json
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, Record, RunFailed, aligned, program, provenance, run

PARTS = ("peer", "two", "sleeping", "faults", "advice", "kills")
SCHEDULES = ("gpipe", "1f1b", "zb_h1", "zb_h2", "interleaved_1f1b", "interleaved_zb", "zbv", "dualpipev")
TIMEOUT_SECONDS = 300
WARMUP_STEPS = 3
LLAMA = (
    "--model llama --layers 4 --width 256 --heads 4 --kv-heads 4 --intermediate 688 --vocab 8192 --seq-len 128"
    " --optimizer adamw --threads 1 --pin-cores --nproc 2 --mesh pp=2 --quiet"
)
PEER = {  # cuts that come first or second for PyTorch
    "1f1b": ["2", "3"],
    "gpipe": ["3"],
    "interleaved_1f1b": ["1 2 3", "2 3 4"],
    "interleaved_zb": ["1 2 3"],
    "zbv": ["1 2 4", "1 3 4"],
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure pipelines.")
    parser.add_argument("--paceline", type=Path, default=Path("target/release/paceline"), metavar="PATH")
    parser.add_argument(
        "--sleeping", type=Path, default=Path("target/release/examples/sleeping_stages"), metavar="PATH"
    )
    parser.add_argument("--peer-python", type=Path, default=Path(".peer/bin/python"), metavar="PATH")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24, help="of each of our runs (default: 24)")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("results/pipelines.json"), metavar="FILE")
    arguments = parser.parse_args()
    arguments.paceline = program(parser, "--paceline", arguments.paceline)
    if {"sleeping", "faults"} & set(arguments.parts):
        arguments.sleeping = program(parser, "--sleeping", arguments.sleeping)
    if "peer" in arguments.parts and not arguments.peer_python.is_file():
        parser.error(f"--peer-python {arguments.peer_python}: no such file; bench/README.md says how to set it up")
    return arguments


def train(arguments: argparse.Namespace, flags: str) -> Record:
    """The summary of a run."""
    with tempfile.TemporaryDirectory(prefix="pipelines_") as folder:
        command = [arguments.paceline, "train", *shlex.split(f"{flags} --json run.json")]
        run(command, Path(folder), TIMEOUT_SECONDS)
        return json.loads(Path(folder, "run.json").read_text())


def llama(arguments: argparse.Namespace, schedule: str, micro_batch: int, extra: str = "") -> Record:
    samples = 8 * micro_batch * arguments.steps
    return train(
        arguments,
        f"{LLAMA} --schedule {schedule} --accumulate 8 --global-batch-size {micro_batch} --samples {samples} --epochs 1"
        f" --warmup-steps {WARMUP_STEPS} {extra}",
    )


def kept(record: Record) -> Record:
    names = ("step_ms_median", "samples_per_s", "weights_sha256", "bubble_pct", "peak_bytes", "advice", "advised")
    bubbles = {name: value for name, value in record.items() if name.startswith("bubble_")}
    return {name: record[name] for name in names if name in record} | bubbles


def peer_step(arguments: argparse.Namespace, schedule: str, cut: str, batch: int) -> float:
    """The median step of PyTorch, in milliseconds."""
    script = Path(__file__).resolve().with_name("peer") / "pipeline.py"
    flags = f"--schedule {schedule} --cut {cut} --batch-size {batch} --micro-batches 8"
    command = [Path(os.path.abspath(arguments.peer_python)), script, *shlex.split(flags)]
    return json.loads(run(command, ROOT, TIMEOUT_SECONDS).strip().splitlines()[-1])["step_ms"]


def part_peer(arguments: argparse.Namespace) -> Record:
    found: Record = {}
    for micro_batch in (4, 1):
        rounds = []
        for number in range(arguments.rounds):
            ours = {name: kept(llama(arguments, name, micro_batch, best_cut(name))) for name in (*SCHEDULES, "auto")}
            theirs = {
                f"{name} {cut}": peer_step(arguments, name, cut, 8 * micro_batch)
                for name, cuts in PEER.items()
                for cut in cuts
            }
            rounds.append({"ours": ours, "theirs": theirs})
            print(f"batch {8 * micro_batch}: round {number + 1} of {arguments.rounds}", file=sys.stderr)
        rows = [["ours", "step ms", "over the fastest", "over its namesake"]]
        ratios: Record = {}
        for name in (*SCHEDULES, "auto"):
            steps = [of["ours"][name]["step_ms_median"] for of in rounds]
            fastest = [min(of["theirs"].values()) / step for of, step in zip(rounds, steps)]
            same = [
                [ms for of_name, ms in of["theirs"].items() if of_name.split()[0] == name] for of in rounds
            ]
            namesake = [min(of) / step for of, step in zip(same, steps) if of]
            ratios[name] = {"fastest": spread(fastest), "namesake": spread(namesake) if namesake else None}
            rows.append([name, f"{statistics.median(steps):.1f}", text(fastest), text(namesake)])
        print(f"\nbatch {8 * micro_batch} in 8 micro-batches, 2 ranks; PyTorch's fastest step: "
              f"{statistics.median(min(of['theirs'].values()) for of in rounds):.1f} ms")
        print(aligned(rows, {0}))
        found[f"batch_{8 * micro_batch}"] = {"ratios": ratios, "rounds": rounds}
    return found


def best_cut(schedule: str) -> str:
    return "" if schedule == "auto" else "--stages measured"


def spread(values: list[float]) -> Record:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def text(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}-{max(values):.2f}]" if values else "-"


def part_two(arguments: argparse.Namespace) -> Record:
    names = (*SCHEDULES, "auto")
    rounds = [
        {name: kept(llama(arguments, name, 4, best_cut(name))) for name in names} for _ in range(arguments.rounds)
    ]
    steps = {name: statistics.median(of[name]["step_ms_median"] for of in rounds) for name in names}
    rows = [["schedule", "step ms", "bubble %", "unexplained, % of the step", "at most, of a rank's step"]]
    for name in names:
        rest = max(abs(of[name]["bubble_rest_ms"]) / of[name]["step_ms_median"] for of in rounds)
        most = max(of[name]["bubble_rest_most_pct"] for of in rounds)
        bubble = statistics.median(of[name]["bubble_pct"] for of in rounds)
        rows.append([name, f"{steps[name]:.1f}", f"{bubble:.1f}", f"{100 * rest:.2f}", f"{most:.2f}"])
    print("\ntwo ranks by the wall clock\n" + aligned(rows, {0}))
    best = min(steps, key=lambda name: steps[name])
    print(f"auto is {100 * (steps['auto'] / steps[best] - 1):+.1f} % of the fastest ({best})")
    digests = {of[name]["weights_sha256"] for of in rounds for name in names}
    print(f"{len(digests)} different weights")
    return {"rounds": rounds, "steps_ms": steps, "digests": len(digests)}


def sleep(arguments: argparse.Namespace, flags: str) -> list[Record]:
    lines = run([arguments.sleeping, *shlex.split(flags)], ROOT, TIMEOUT_SECONDS).strip().splitlines()
    return [json.loads(line) for line in lines]


def part_sleeping(arguments: argparse.Namespace) -> Record:
    found = []
    rows = [["ranks", "micro-batches", "costs", "best by rehearsal", "fastest", "apart %", "unexplained at most %", "as planned"]]
    for ranks, micro_batches, costs in [
        (4, 8, "6,6,6"), (4, 16, "5,8,4"), (4, 12, "8,6,4"), (8, 16, "6,6,6"), (8, 24, "5,8,4"),
    ]:
        rounds = [
            sleep(arguments, f"--ranks {ranks} --micro-batches {micro_batches} --costs {costs}")
            for _ in range(max(1, arguments.rounds - 2))
        ]
        step = {
            of[0]["schedule"]: statistics.median(one["step_ms"] for one in of) for of in zip(*rounds)
        }
        # The program prints its own choice first.
        chosen = rounds[0][0]["schedule"]
        fastest = min(step, key=lambda name: step[name])
        rest = max(one["rest_most_pct"] for of in rounds for one in of)
        planned = all(one["as_planned"] for of in rounds for one in of)
        apart = 100 * (step[chosen] / step[fastest] - 1)
        rows.append([
            str(ranks), str(micro_batches), costs, chosen, fastest, f"{apart:.1f}", f"{rest:.2f}", str(planned),
        ])
        found.append({"ranks": ranks, "micro_batches": micro_batches, "costs": costs, "rounds": rounds})
    print("\nlayers that sleep\n" + aligned(rows, {3, 4}))
    return {"cases": found}


def part_faults(arguments: argparse.Namespace) -> Record:
    base = "--ranks 4 --micro-batches 8 --schedule 1f1b --steps 18"
    causes = ("fill", "drain", "imbalance", "transfer", "head of line", "late peer", "barrier")
    rows = [["fault", "grows most", "grows by, ms", "expected, ms", "off %"]]
    found: Record = {}
    for name, cause, without, fault, expected in (
        # Beside stages that are all alike, with as much to do together.
        ("a stage twice as slow", "imbalance", "--costs 10,10,10", "--costs 8,8,8 --slow 2,2", None),
        # One pass in four steps is 60 ms late, and three of four ranks wait for it.
        ("a pass 60 ms late, in every fourth step", "late peer", "--costs 8,8,8", "--costs 8,8,8 --late 1,60", 60 / 4 * 3 / 4),
        ("messages of 5 ms", "transfer", "--costs 8,8,8", "--costs 8,8,8 --link 5", None),
        # The ranks are done one after the other: the first one 8 ms after the second, the others each 16 ms after the next.
        ("clipping", "barrier", "--costs 8,8,8", "--costs 8,8,8 --clip 1", (8 + 24 + 40) / 4),
    ):
        before, after = sleep(arguments, f"{base} {without}")[0], sleep(arguments, f"{base} {fault}")[0]
        grown = {of: after[of] - before[of] for of in causes}
        most = max(grown, key=lambda of: grown[of])
        if expected is None:
            # The idle time as the clock has it, without a ledger.
            idle = [of["step_ms"] - of["busy"] for of in (before, after)]
            expected = idle[1] - idle[0]
        off = 100 * (grown[cause] / expected - 1)
        rows.append([name, most, f"{grown[cause]:.2f}", f"{expected:.2f}", f"{off:+.1f}"])
        found[name] = {"without": before, "with": after, "cause": cause, "grown": grown, "expected_ms": expected}
    print("\nplanted faults, ms of idle time, means over ranks\n" + aligned(rows, {0, 1}))
    return found


def part_advice(arguments: argparse.Namespace) -> Record:
    begins = {
        "gpipe": "--schedule gpipe",
        "1f1b, a bad cut": "--schedule 1f1b --stages model.layers.1",
        "zb_h1, a bad cut": "--schedule zb_h1 --stages model.norm",
    }
    found: Record = {}
    rows = [["begun with", "advice", "promised ms", "gained ms, medians of 5", "off %"]]
    for name, flags in begins.items():
        samples = 32 * arguments.steps
        base = (
            f"{LLAMA} --accumulate 8 --global-batch-size 4 --samples {samples} --epochs 1 --warmup-steps {WARMUP_STEPS}"
        )
        first = train(arguments, f"{base} {flags}")
        remedy = (first.get("advised") or {}).get("remedy")
        if not remedy:
            found[name] = {"advice": first.get("advice"), "followed": []}
            rows.append([name, "none", "-", "-", "-"])
            continue
        changed = re.search("`(.*)`", remedy).group(1)
        followed = merged(f"{base} {flags}", changed)
        pairs = []
        for _ in range(5):
            before, after = train(arguments, f"{base} {flags}"), train(arguments, followed)
            pairs.append([before["step_ms_median"], after["step_ms_median"]])
        gained = statistics.median(before - after for before, after in pairs)
        promised = first["advised"]["gain"]["ms"]
        off = 100 * (gained / promised - 1)
        rows.append([name, changed, f"{promised:.1f}", f"{gained:.1f}", f"{off:+.0f}"])
        found[name] = {"advice": first["advice"], "promised_ms": promised, "pairs_ms": pairs}
    print("\nadvice followed\n" + aligned(rows, {0, 1}))
    return found


def merged(flags: str, changed: str) -> str:
    """The flags with those of the advice in place of their own."""
    words, changes = shlex.split(flags), shlex.split(changed)
    for flag, value in zip(changes[::2], changes[1::2]):
        if flag in words:
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    return shlex.join(words)


def part_kills(arguments: argparse.Namespace) -> Record:
    command = shlex.split(
        "train --nproc 3 --mesh pp=3 --schedule 1f1b --accumulate 4 --batch-size 8 --channels 8 8 --hidden 32 --samples 100000"
        " --epochs 100 --quiet"
    )
    random.seed(26)
    kills = []
    for _ in range(arguments.kills):
        with tempfile.TemporaryDirectory(prefix="kills_") as folder:
            process = subprocess.Popen(
                [arguments.paceline, *command], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,
            )
            ranks = wait_for_ranks(process, 3)
            moment, victim = random.uniform(0.2, 1.2), random.randrange(3)
            time.sleep(moment)
            begin = time.monotonic()
            os.kill(ranks[victim], signal.SIGKILL)
            try:
                _, errors = process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                _, errors = process.communicate()
            took = time.monotonic() - begin
        # Other lines name all ranks. The launcher's names the one that was the cause.
        named = re.search(rf"^paceline: rank {victim} \(.*was killed by SIGKILL", errors, re.MULTILINE)
        kills.append({"victim": victim, "after_s": moment, "down_s": took, "is_named": named is not None})
    times = [kill["down_s"] for kill in kills]
    late, wrong = sum(took > 1.0 for took in times), sum(not kill["is_named"] for kill in kills)
    print(f"\n{arguments.kills} kills: {late} later than a second, {wrong} name another rank; "
          f"median {1e3 * statistics.median(times):.0f} ms, longest {1e3 * max(times):.0f} ms")
    return {"late": late, "wrong": wrong, "kills": kills}


def wait_for_ranks(process: subprocess.Popen, count: int) -> list[int]:
    """The processes of the ranks, in rank order: children of the launcher, which starts them in that order."""
    for _ in range(500):
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if len(listed) >= count:
            by_rank = {environment(int(pid)).get("RANK"): int(pid) for pid in listed}
            if all(str(rank) in by_rank for rank in range(count)):
                return [by_rank[str(rank)] for rank in range(count)]
        time.sleep(0.01)
    raise RunFailed("the ranks did not start")


def environment(pid: int) -> Record:
    try:
        pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def main() -> int:
    arguments = parse_arguments()
    report = provenance()
    try:
        for part in arguments.parts:
            report[part] = globals()[f"part_{part}"](arguments)
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\nwritten to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
