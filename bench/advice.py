"""Follows the advice that paceline gives, and compares what was promised with what it gained.

    cargo build --release
    python3 bench/advice.py                         # all cases and the README's commands: about twenty minutes
    python3 bench/advice.py --busy                  # the same beside a program that takes time from one core
    python3 bench/advice.py --cases "slow rank" readme

Each case is a run of 2 ranks of 1 thread, each pinned to its own core, on an emulated link or beside a program that takes
time from rank 1's core. The run is told something, by `paceline train` itself or by `paceline analyze` from its traces,
with a time that a step would gain. The script reads the promise, does what the advice says, and runs again. The two
runs alternate. The promise is the median over the rounds. The gain is the difference of the medians of the mean step.

A round in which a run is told something else, because the machine was disturbed, is recorded and left out; a case of
which fewer than half of the rounds are left has no result.

The cases `readme` are the README's `paceline train` commands that print one run, as they stand there. Each is run ten times,
and whatever it is told is followed. So their rounds also show whether runs that differ by noise only are told the same.

Prints one table and writes all runs with date, machine and commit to `results/advice.json`, or `results/advice_busy.json`. Only
the standard library is needed. Exits with 0 if every case was measured, whatever the gains, and with 1 otherwise.
"""
import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, Record, RunFailed, aligned, program, provenance, run, shown

RUN_SECONDS = 120
CNN = "--model cnn --data synthetic --samples 8192 --batch-size 64"
MLP = "--model mlp --num-layers 4 --input-dim 512 --hidden-dim 512 --output-dim 10 --batch-size 128"
WIDE = "--model mlp --num-layers 4 --input-dim 512 --hidden-dim 1024 --output-dim 10 --batch-size 64"
NUMBER = r"([0-9]+\.[0-9]+)"
# Takes turns with whatever else wants its core. Nice values decide the shares.
SPIN = "while True: pass"


@dataclass(frozen=True)
class Case:
    """A run, what it is told, and the run that follows the advice."""

    name: str
    flags: str
    # Matches the advice.
    told: str
    # From the match and the first run's record: milliseconds per step that are promised.
    promise: Callable[[re.Match[str], Record], float]
    # From the match: the flags of the second run.
    follow: Callable[[re.Match[str]], str]
    # Who gives the advice.
    by: str = "train"
    # The nice value of a program on rank 1's core in the first run.
    disturbed: int | None = None


def gain(_: re.Match[str], record: Record) -> float:
    """What `paceline train` promises."""
    return record["advised"]["gain"]["ms"]


def first_number(told: re.Match[str], _: Record) -> float:
    return float(told[1])


CASES = [
    Case(
        "halve transfer",
        f"{CNN} --strategy ddp --link 500mbit,50us",
        rf"half the time .* less \({NUMBER} ms per step\)",
        first_number,
        lambda _: f"{CNN} --strategy ddp --link 1gbit,25us",
        by="analyze",
    ),
    Case(
        "halve latency",
        f"{MLP} --strategy simple_ddp --link 10gbit,3ms",
        rf"half the time .* less \({NUMBER} ms per step\)",
        first_number,
        lambda _: f"{MLP} --strategy simple_ddp --link 20gbit,1500us",
        by="analyze",
    ),
    Case(
        "slow rank, by analyze",
        f"{CNN} --strategy ddp",
        rf"Rank 1 holds .* less \({NUMBER} ms per step\)",
        first_number,
        lambda _: f"{CNN} --strategy ddp",
        by="analyze",
        disturbed=3,
    ),
    Case(
        "slow rank, by train",
        f"{CNN} --strategy simple_ddp --link 10gbit,50us",
        rf"waiting is for rank 1: .* about {NUMBER} ms less",
        first_number,
        lambda _: f"{CNN} --strategy simple_ddp --link 10gbit,50us",
        disturbed=3,
    ),
    Case(
        "smaller buckets",
        f"{CNN} --strategy ddp --bucket-cap-mb 100 --first-bucket-mb 100 --link 500mbit,50us",
        r"`(--bucket-cap-mb [0-9.]+ --first-bucket-mb [0-9.]+)`.* ms less",
        gain,
        lambda told: f"{CNN} --strategy ddp --link 500mbit,50us {told[1]}",
    ),
    Case(
        "larger buckets",
        f"{MLP} --strategy ddp --bucket-cap-mb 0.01 --first-bucket-mb 0.01 --link 10gbit,2ms",
        r"`(--bucket-cap-mb [0-9.]+ --first-bucket-mb [0-9.]+)`.* ms less",
        gain,
        lambda told: f"{MLP} --strategy ddp --link 10gbit,2ms {told[1]}",
    ),
    Case(
        "buckets at all",
        f"{CNN} --strategy simple_ddp --link 500mbit,50us",
        r"`--strategy ddp`.* ms less",
        gain,
        lambda _: f"{CNN} --strategy ddp --link 500mbit,50us",
    ),
    Case(
        "half the bytes",
        f"{CNN} --strategy ddp --bucket-cap-mb 1 --link 100mbit,50us",
        r"`--strategy bf16`.* ms less",
        gain,
        lambda _: f"{CNN} --strategy bf16 --bucket-cap-mb 1 --link 100mbit,50us",
    ),
    Case(
        "no compression",
        f"{WIDE} --strategy top_k --link 25gbit,20us",
        r"`--strategy ddp`.* ms less",
        gain,
        lambda _: f"{WIDE} --strategy ddp --link 25gbit,20us",
    ),
    Case(
        "no synchronized batch norm",
        f"{CNN} --strategy ddp --batch-norm --sync-batch-norm --link 1gbit,1ms",
        r"leaving out `--sync-batch-norm`.* ms less",
        gain,
        lambda _: f"{CNN} --strategy ddp --batch-norm --link 1gbit,1ms",
    ),
    Case(
        "rarer averages",
        f"{CNN} --strategy local_sgd --sync-every 2 --link 200mbit,50us",
        r"`--sync-every ([0-9]+)`.* ms less",
        gain,
        lambda told: f"{CNN} --strategy local_sgd --sync-every {told[1]} --link 200mbit,50us",
    ),
    Case(
        "gather ahead",
        f"{MLP} --strategy sharded3 --prefetch 0 --link 1gbit,50us",
        r"`--prefetch ([0-9]+)`.* ms less",
        gain,
        lambda told: f"{MLP} --strategy sharded3 --prefetch {told[1]} --link 1gbit,50us",
    ),
]


# Commands that print no single run, or need what another one leaves or a user has.
NOT_ONE_RUN = ("--ddp-choice", "--shard-choice", "--resume", "--download", "--data-dir")
KEPT = ["wall_ms", "step_ms_median", "comm_exposed_ms", "comm_exposed_wait_ms", "comm_wait_ms", "comm_move_ms", "sync_ms", "advice", "advised"]


def readme_commands() -> list[str]:
    """The flags of the README's `paceline train` commands that print one run."""
    lines = (ROOT / "README.md").read_text().splitlines()
    commands = [line.split("#")[0].strip() for line in lines if line.startswith("paceline train ")]
    return [
        command.removeprefix("paceline train ")
        for command in commands
        if not any(flag in command for flag in NOT_ONE_RUN)
    ]


def followed(flags: str, remedy: str) -> str:
    """The flags of a run that follows the advice: those in the remedy's backticks replace their like."""
    change = re.search(r"`(.*)`", remedy)
    if change is None:
        raise RunFailed(f"cannot follow {remedy!r}")
    pairs = re.findall(r"--[a-z-]+(?: [^-\s]\S*)?", change[1])
    for pair in pairs:
        flags = re.sub(rf"{pair.split()[0]}(?: [^-\s]\S*)*", "", flags)
    return " ".join(flags.split()) if remedy.startswith("leaving out") else " ".join([*flags.split(), *pairs])


@contextmanager
def spinning(nice: int | None, core: int) -> Iterator[None]:
    """A program takes its turns on a core; none without a nice value."""
    if nice is None:
        yield
        return
    spin = ["nice", "-n", str(nice), "taskset", "-c", str(core), sys.executable, "-c", SPIN]
    spinner = subprocess.Popen(spin, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(spinner.pid, signal.SIGKILL)
        spinner.wait()


class Bench:
    """Runs the program in a folder of its own."""

    def __init__(self, binary: Path, folder: Path, steps: int):
        self.binary, self.folder, self.steps = binary, folder, steps

    def train(self, flags: str, disturbed: int | None, by: str) -> Record:
        """A run, with what it was told."""
        common = f"train --nproc 2 --threads 1 --pin-cores --lr 0.001 --quiet \
            --steps {self.steps} --warmup-steps 5"
        traces = self.folder / "profile"
        profile = ["--profile", "--profile-wait", "5", "--profile-active", str(self.steps - 8)]
        profile += ["--profile-dir", str(traces)]
        command = [self.binary, *shlex.split(common), *shlex.split(flags), "--json", "run.json"]
        with spinning(disturbed, 1):
            run(command + profile * (by == "analyze"), self.folder, RUN_SECONDS)
        record = json.loads((self.folder / "run.json").read_text())
        record = {"flags": flags, **{key: record.get(key) for key in KEPT}}
        if by == "analyze":
            output = run([self.binary, "analyze", str(traces), "--output", "reports"], self.folder, RUN_SECONDS)
            record["analyze"] = " ".join(re.sub(r"\s+", " ", line) for line in output.splitlines() if "path" in line)
            record["analyze_output"] = output
            subprocess.run(["rm", "-rf", traces, self.folder / "reports"], check=True)
        return record

    def case(self, case: Case, rounds: int) -> Record:
        """Runs a case, and returns its result with the records of all runs."""
        all_rounds: list[Record] = []
        for _ in range(rounds):
            before = self.train(case.flags, case.disturbed, case.by)
            text = before.pop("analyze_output", None) or before["advice"] or ""
            told = re.search(case.told, " ".join(text.split()))
            if told is None:
                all_rounds.append({"before": before, "left_out": f"told: {text[:2000]}"})
                continue
            after = self.train(case.follow(told), None, case.by)
            after.pop("analyze_output", None)
            all_rounds.append({"before": before, "after": after, "promise_ms": case.promise(told, before)})
        kept = [entry for entry in all_rounds if "after" in entry]
        result: Record = {"case": case.name, "by": case.by, "flags": case.flags, "disturbed": case.disturbed}
        if 2 * len(kept) >= rounds and kept:
            before, after = (statistics.median(of[side]["wall_ms"] for of in kept) for side in ("before", "after"))
            promise = statistics.median(of["promise_ms"] for of in kept)
            result |= {"step_ms": before, "followed_ms": after, "promise_ms": promise, "gain_ms": before - after}
            result["gain_of_promise"] = (before - after) / promise
        return result | {"rounds": all_rounds}

    def readme(self, flags: str, rounds: int) -> Record:
        """Runs a command of the README and follows what each run is told."""

        def measured(flags: str) -> Record:
            command = [self.binary, "train", *shlex.split(flags), "--quiet", "--json", "run.json"]
            run(command, self.folder, RUN_SECONDS)
            record = json.loads((self.folder / "run.json").read_text())
            subprocess.run(["rm", "-rf", self.folder / "runs", self.folder / "profile", self.folder / "ckpt"], check=True)
            return {"flags": flags, **{key: record.get(key) for key in KEPT}}

        all_rounds: list[Record] = []
        for _ in range(rounds):
            before = measured(flags)
            advised = before["advised"] or {}
            entry: Record = {"before": before, "told": advised.get("remedy") or "nothing"}
            if advised.get("gain"):
                entry |= {"after": measured(followed(flags, advised["remedy"])), "promise_ms": advised["gain"]["ms"]}
            all_rounds.append(entry)
        told = Counter(entry["told"] for entry in all_rounds)
        result: Record = {"case": f"readme: {flags}", "by": "train", "flags": flags, "disturbed": None, "told": dict(told)}
        result["accounted"] = all(
            abs(of["waiting_ms"] + of["removed_ms"] + of["remains_ms"] - of["exposed_ms"]) < 1e-6
            for of in (entry["before"]["advised"] for entry in all_rounds)
            if of
        )
        followed_rounds = [entry for entry in all_rounds if "after" in entry]
        steps = [entry["before"]["wall_ms"] for entry in all_rounds]
        result["step_ms"] = statistics.median(steps)
        differences = sorted(abs(a - b) for at, a in enumerate(steps) for b in steps[:at])
        if differences:
            result["measured_apart_ms"] = differences[int(0.8 * len(differences))]
        if followed_rounds:
            # The remedy that was named most often; the others are in the rounds.
            most = Counter(entry["told"] for entry in followed_rounds).most_common(1)[0][0]
            kept = [entry for entry in followed_rounds if entry["told"] == most]
            before, after = ([entry[key]["wall_ms"] for entry in kept] for key in ("before", "after"))
            gains = [a - b for a, b in zip(before, after)]
            promises = [entry["before"]["advised"]["gain"] for entry in kept]
            result |= {
                "followed_ms": statistics.median(after),
                "gain_ms": statistics.median(before) - statistics.median(after),
                "gains_ms": gains,
                "promise_ms": statistics.median(of["ms"] for of in promises),
                "promise_low_ms": statistics.median(of["low_ms"] for of in promises),
                "promise_high_ms": statistics.median(of["high_ms"] for of in promises),
            }
            result["gain_of_promise"] = result["gain_ms"] / result["promise_ms"]
            # By how much two runs differ, as each run estimates it from its steps.
            result["apart_ms"] = statistics.median(entry["before"]["advised"]["apart_ms"] or 0 for entry in kept)
            apart = result["apart_ms"]
            result["is_within_spread"] = result["promise_low_ms"] - apart <= result["gain_ms"] <= result["promise_high_ms"] + apart
        return result | {"rounds": all_rounds}


def row(result: Record) -> list[str]:
    told = ", ".join(f"{remedy} x {count}" for remedy, count in result.get("told", {}).items())
    if "promise_ms" not in result:
        step = f"{result['step_ms']:.2f}" if "step_ms" in result else "-"
        return [result["case"], result["by"], step, *["-"] * 5, told]
    numbers = [f"{result[key]:.2f}" for key in ["step_ms", "followed_ms", "promise_ms"]]
    spread = f"{result['promise_low_ms']:.2f} to {result['promise_high_ms']:.2f}" if "promise_low_ms" in result else "-"
    return [result["case"], result["by"], *numbers, spread, f"{result['gain_ms']:.2f}", f"{result['gain_of_promise']:.2f}", told]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paceline", type=Path, default=ROOT / "target/release/paceline", metavar="PATH")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="beginnings of names (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each case (default: 3)")
    parser.add_argument("--steps", type=int, default=40, help="steps of a run (default: 40)")
    parser.add_argument("--readme-rounds", type=int, default=10, help="rounds of each command of the README (default: 10)")
    parser.add_argument("--busy", action="store_true", help="run all of it beside a program that takes time from core 0")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: results/advice.json, or results/advice_busy.json")
    arguments = parser.parse_args()
    out = arguments.out or ROOT / ("results/advice_busy.json" if arguments.busy else "results/advice.json")
    if arguments.rounds < 1 or arguments.readme_rounds < 1 or arguments.steps < 20:
        parser.error("--rounds and --readme-rounds must be at least 1, --steps at least 20")
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("this needs two cores")
    wanted = [case for case in CASES if not arguments.cases or case.name.startswith(tuple(arguments.cases))]
    commands = readme_commands() if not arguments.cases or "readme" in arguments.cases else []
    if not wanted and not commands:
        parser.error("no such case: pass " + ", ".join([*(case.name for case in CASES), "readme"]))
    begun = time.monotonic()
    results: list[Record] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(program(parser, "--paceline", arguments.paceline), Path(folder), arguments.steps)
        measures = [(case.name, lambda case=case: bench.case(case, arguments.rounds)) for case in wanted]
        measures += [(of, lambda of=of: bench.readme(of, arguments.readme_rounds)) for of in commands]
        with spinning(0 if arguments.busy else None, 0):
            for name, measure in measures:
                try:
                    results.append(measure())
                    print("  ".join(row(results[-1])), file=sys.stderr, flush=True)
                except RunFailed as error:
                    failures.append(f"{name}: {error}")
    heads = ["advice", "by", "step ms", "followed ms", "promise ms", "of the steps", "gain ms", "gain/promise", "told"]
    print(aligned([heads, *map(row, results)], left={0, 1, 8}))
    failures += [
        f"{result['case']}: the runs were told something else"
        for result in results
        if "gain_ms" not in result and "told" not in result
    ]
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    record = provenance() | {"binary": shown(bench.binary), "seconds": round(time.monotonic() - begun), "steps": arguments.steps, "busy": arguments.busy, "cases": results}
    out.write_text(json.dumps(record | {"failures": failures}, indent=1) + "\n")
    print(f"wrote {shown(out)}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
