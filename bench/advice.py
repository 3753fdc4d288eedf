"""Follows the advice that paceline gives, and compares what was promised with what it gained.

    cargo build --release
    python3 bench/advice.py                         # all cases: about ten minutes
    python3 bench/advice.py --cases "slow rank"

Each case is a run of 2 ranks of 1 thread, each pinned to its own core, on an emulated link or beside a program that takes
time from rank 1's core. The run is told something, by `paceline train` itself or by `paceline analyze` from its traces,
with a time that a step would gain. The script reads the promise, does what the advice says, and runs again. The two
runs alternate. The promise is the median over the rounds. The gain is the difference of the medians of the mean step.

A round in which a run is told something else, because the machine was disturbed, is recorded and left out; a case of
which fewer than half of the rounds are left has no result.

Prints one table and writes all runs with date, machine and commit to `results/advice.json`. Exits with 0 if every case was measured, whatever
the gains, and with 1 otherwise.
"""
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common import RUN_SECONDS, Record, RunFailed, aligned, arguments_for, parsed, provenance, run, train, write

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


KEPT = ["wall_ms", "step_ms_median", "comm_exposed_ms", "comm_exposed_wait_ms", "comm_wait_ms", "comm_move_ms", "sync_ms", "advice", "advised"]


@contextmanager
def spinning(nice: int | None, core: int) -> Iterator[None]:
    """A program takes its turns on a core, if there is a nice value."""
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

    def train(self, flags: str, disturbed: int | None, by: str) -> tuple[Record, str]:
        """A run, and what it was told."""
        flags = f"{flags} --nproc 2 --threads 1 --pin-cores --lr 0.001 --steps {self.steps} --warmup-steps 5"
        if by == "analyze":
            flags += f" --profile --profile-wait 5 --profile-active {self.steps - 8} --profile-dir profile"
        with spinning(disturbed, 1):
            summary = train(self.binary, flags, self.folder)
        record = {"flags": flags, **{key: summary.get(key) for key in KEPT}}
        told = record["advice"] or ""
        if by == "analyze":
            told = run([self.binary, "analyze", "profile", "--output", "reports"], self.folder, RUN_SECONDS)
            for name in ("profile", "reports"):
                shutil.rmtree(self.folder / name)
        return record, " ".join(told.split())

    def case(self, case: Case, rounds: int) -> Record:
        """Runs a case, and returns its result with the records of all runs."""
        all_rounds: list[Record] = []
        for _ in range(rounds):
            before, text = self.train(case.flags, case.disturbed, case.by)
            told = re.search(case.told, text)
            if told is None:
                all_rounds.append({"before": before, "left_out": f"told: {text[:2000]}"})
                continue
            after, _ = self.train(case.follow(told), None, case.by)
            all_rounds.append({"before": before, "after": after, "promise_ms": case.promise(told, before)})
        kept = [entry for entry in all_rounds if "after" in entry]
        result: Record = {"case": case.name, "by": case.by, "flags": case.flags, "disturbed": case.disturbed}
        if 2 * len(kept) >= rounds and kept:
            before, after = (statistics.median(of[side]["wall_ms"] for of in kept) for side in ("before", "after"))
            promise = statistics.median(of["promise_ms"] for of in kept)
            result |= {"step_ms": before, "followed_ms": after, "promise_ms": promise, "gain_ms": before - after}
            result["gain_of_promise"] = (before - after) / promise
        return result | {"rounds": all_rounds}


def row(result: Record) -> list[str]:
    if "promise_ms" not in result:
        return [result["case"], result["by"], *["-"] * 5]
    numbers = [f"{result[key]:.2f}" for key in ["step_ms", "followed_ms", "promise_ms", "gain_ms", "gain_of_promise"]]
    return [result["case"], result["by"], *numbers]


def main() -> int:
    parser = arguments_for(__doc__, "advice.json", rounds=3)
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="beginnings of names (default: all)")
    parser.add_argument("--steps", type=int, default=40, help="steps of a run (default: 40)")
    arguments = parsed(parser)
    if arguments.steps < 20 or len(os.sched_getaffinity(0)) < 2:
        parser.error("this needs two cores, and --steps of at least 20")
    wanted = [case for case in CASES if not arguments.cases or case.name.startswith(tuple(arguments.cases))]
    if not wanted:
        parser.error("no such case: pass " + ", ".join(case.name for case in CASES))
    results: list[Record] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments.paceline, Path(folder), arguments.steps)
        for case in wanted:
            try:
                results.append(bench.case(case, arguments.rounds))
                print("  ".join(row(results[-1])), file=sys.stderr, flush=True)
            except RunFailed as error:
                failures.append(f"{case.name}: {error}")
    failures += [f"{result['case']}: the runs were told something else" for result in results if "gain_ms" not in result]
    heads = ["advice", "by", "step ms", "followed ms", "promise ms", "gain ms", "gain/promise"]
    print(aligned([heads, *map(row, results)], left={0, 1}))
    print("\n".join(failures))
    write(arguments.out, provenance() | {"steps": arguments.steps, "cases": results, "failures": failures})
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
