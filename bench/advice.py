"""Follows the advice that paceline gives, and compares what was promised with what it gained.

    python3 bench/advice.py                  # all cases: a quarter of an hour; the same with --busy

A case is a run of 2 pinned ranks, on an emulated link or with another program on rank 1's core. `paceline train`, or `paceline analyze` from its traces, names a
change and how much shorter a step would be. The script makes the change and runs again, in turn. The promise is the median of the rounds, the gain the difference of
the medians of the mean step. A round with other advice, because something disturbed it, is recorded and left out. A case that keeps fewer than half of its rounds has
no result, and the exit code is 1.
"""
import argparse
import os
import re
import statistics
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from common import RUN_SECONDS, Record, aligned, arguments_for, each, parsed, provenance, run, spinning, train, write

CNN = "--model cnn --data synthetic --samples 8192 --batch-size 64"
MLP = "--model mlp --num-layers 4 --input-dim 512 --hidden-dim 512 --output-dim 10 --batch-size 128"
WIDE = "--model mlp --num-layers 4 --input-dim 512 --hidden-dim 1024 --output-dim 10 --batch-size 64"
PIPELINE = "--model llama --layers 4 --width 256 --heads 4 --vocab 8192 --optimizer adamw --mesh pp=2 --accumulate 8 --global-batch-size 2"
MS = r"(?P<ms>[0-9]+\.[0-9]+)"
HALF = rf"half the time .* less \({MS} ms per step\)"
BUCKETS = r"`(--bucket-cap-mb [0-9.]+ --first-bucket-mb [0-9.]+)`.* ms less"
KEPT = ["wall_ms", "step_ms_median", "comm_exposed_ms", "comm_exposed_wait_ms", "comm_wait_ms", "comm_move_ms", "sync_ms", "advice", "advised"]


class Case(NamedTuple):
    # The command that gives the advice.
    by: str
    # The flags of both runs, of the first one, and of the one that follows the advice, whose first group is \1.
    flags: str
    before: str
    after: str
    # Matches the advice. The promise is its group `ms`, or the gain in the record of `paceline train`.
    advice: str
    # Whether another program disturbs rank 1 in the first run.
    disturbed: bool = False


CASES = {
    "halve transfer": Case("analyze", f"{CNN} --strategy ddp", "--link 500mbit,50us", "--link 1gbit,25us", HALF),
    "halve latency": Case("analyze", f"{MLP} --strategy simple_ddp", "--link 10gbit,3ms", "--link 20gbit,1500us", HALF),
    "slow rank, by analyze": Case("analyze", f"{CNN} --strategy ddp", "", "", rf"Rank 1 holds .* less \({MS} ms per step\)", True),
    "slow rank, by train": Case("train", f"{CNN} --strategy simple_ddp --link 10gbit,50us", "", "", rf"waiting is for rank 1: .* about {MS} ms less", True),
    "smaller buckets": Case("train", f"{CNN} --strategy ddp --link 500mbit,50us", "--bucket-cap-mb 100 --first-bucket-mb 100", r"\1", BUCKETS),
    "larger buckets": Case("train", f"{MLP} --strategy ddp --link 10gbit,2ms", "--bucket-cap-mb 0.01 --first-bucket-mb 0.01", r"\1", BUCKETS),
    "buckets at all": Case("train", f"{CNN} --link 500mbit,50us", "--strategy simple_ddp", r"\1", r"`(--strategy ddp)`.* ms less"),
    "half the bytes": Case("train", f"{CNN} --bucket-cap-mb 1 --link 100mbit,50us", "--strategy ddp", r"\1", r"`(--strategy bf16)`.* ms less"),
    "no compression": Case("train", f"{WIDE} --link 25gbit,20us", "--strategy top_k", r"\1", r"`(--strategy ddp)`.* ms less"),
    "no synchronized batch norm": Case("train", f"{CNN} --strategy ddp --batch-norm --link 1gbit,1ms", "--sync-batch-norm", "", r"leaving out `--sync-batch-norm`.* ms less"),
    "rarer averages": Case("train", f"{CNN} --strategy local_sgd --link 200mbit,50us", "--sync-every 2", r"\1", r"`(--sync-every [0-9]+)`.* ms less"),
    "gather ahead": Case("train", f"{MLP} --strategy sharded3 --link 1gbit,50us", "--prefetch 0", r"\1", r"`(--prefetch [0-9]+)`.* ms less"),
    "another schedule": Case("train", PIPELINE, "--schedule gpipe", r"\1", r"With `([^`]+)` the step.* ms less"),
    "another cut": Case("train", PIPELINE, "--stages model.layers.1", r"\1", r"With `([^`]+)` the step.* ms less"),
}


def measured(arguments: argparse.Namespace, by: str, flags: str, disturbed: bool) -> tuple[Record, str]:
    """The record of a run, and the advice that it gets."""
    flags = f"{flags} --nproc 2 --threads 1 --pin-cores --lr 0.001 --steps {arguments.steps} --warmup-steps 5"
    if by == "analyze":
        flags += f" --profile --profile-wait 5 --profile-active {arguments.steps - 8} --profile-dir profile"
    with tempfile.TemporaryDirectory(prefix="advice_") as folder:
        with spinning(1, 3) if disturbed else nullcontext():
            summary = train(arguments.paceline, flags, Path(folder))
        text = run([arguments.paceline, "analyze", "profile"], Path(folder), RUN_SECONDS) if by == "analyze" else summary["advice"] or ""
    return {"flags": flags, **{key: summary.get(key) for key in KEPT}}, " ".join(text.split())


def result_of(arguments: argparse.Namespace, name: str, case: Case) -> Record:
    rounds: list[Record] = []
    for _ in range(arguments.rounds):
        before, text = measured(arguments, case.by, f"{case.flags} {case.before}", case.disturbed)
        advice = re.search(case.advice, text)
        if advice is None:
            rounds.append({"before": before, "left_out": f"other advice: {text[:2000]}"})
            continue
        after, _ = measured(arguments, case.by, f"{case.flags} {advice.expand(case.after)}", False)
        promise = float(advice["ms"]) if "ms" in advice.groupdict() else before["advised"]["gain"]["ms"]
        rounds.append({"before": before, "after": after, "promise_ms": promise})
    kept = [one for one in rounds if "after" in one]
    result: Record = {"case": name, "by": case.by, "disturbed": case.disturbed, "rounds": rounds}
    if 2 * len(kept) < arguments.rounds:
        return result
    before, after = (statistics.median(one[side]["wall_ms"] for one in kept) for side in ("before", "after"))
    promise = statistics.median(one["promise_ms"] for one in kept)
    result |= {"step_ms": before, "followed_ms": after, "promise_ms": promise, "gain_ms": before - after}
    return result | {"gain_of_promise": (before - after) / promise}


def row(result: Record) -> list[str]:
    numbers = [f"{result[key]:.2f}" if key in result else "-" for key in ("step_ms", "followed_ms", "promise_ms", "gain_ms", "gain_of_promise")]
    return [result["case"], result["by"], *numbers]


def main() -> int:
    parser = arguments_for(__doc__, "advice.json", rounds=3, has_busy=True)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, metavar="NAME", help="(default: all)")
    parser.add_argument("--steps", type=int, default=40, help="steps of a run (default: 40)")
    arguments = parsed(parser)
    if arguments.steps < 20 or len(os.sched_getaffinity(0)) < 2:
        parser.error("this needs two cores, and --steps of at least 20")
    results, failures = each(arguments.cases, lambda name: result_of(arguments, name, CASES[name]))
    failures += [f"{result['case']}: the runs got other advice" for result in results if "gain_ms" not in result]
    print(aligned([["advice", "by", "step ms", "followed ms", "promise ms", "gain ms", "gain/promise"], *map(row, results)], left={0, 1}), *failures, sep="\n")
    write(arguments.out, provenance() | {"steps": arguments.steps, "busy": arguments.busy, "cases": results, "failures": failures})
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
