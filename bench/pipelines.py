"""Pipelines: beside PyTorch's, and whether the ledger of idle time closes and names planted faults.

    cargo build --release && cargo build --release -p paceline-strategies --example sleeping_stages
    python3 bench/pipelines.py
    python3 bench/pipelines.py --parts peer --out results/pipelines_peer.json

`peer`: the Llama of 7.4 million parameters on 2 ranks of 1 thread, batches of 32 as 8 micro-batches of 4, and of 8 as 8 of 1. In
each round every one of our schedules runs with its best cut, and then each counterpart in PyTorch with the cuts of `PEER`. The
ratio is the step of the fastest of theirs over ours, and of its namesake over ours. `unexplained` is the idle time that no cause has.

`sleeping`: four and eight ranks whose layers sleep (`sleeping_stages`), since two cores cannot compute four stages at once; lists,
executor, messages and waiting are real. Is what is executed the plan, does the ledger close, is the schedule that the
rehearsal calls best the fastest?

`faults`: a slow stage, a late pass, a slow link and a clipping barrier are planted. Which cause grows most, and by what is expected: what
the clock says that idle time grows by, or what follows from the durations?

Prints a table for each part and writes raw values with date, machine and commit. Exits with 1 if something could not be run.
"""
import argparse
import json
import shlex
import statistics
import sys
from pathlib import Path

from common import ROOT, RUN_SECONDS, Record, RunFailed, aligned, arguments_for, parsed, peer_step, program, provenance, ranged, run, train, write

SCHEDULES = ("gpipe", "1f1b", "zb_h1", "zb_h2", "interleaved_1f1b", "interleaved_zb", "zbv", "dualpipev", "auto")
LLAMA = (
    "--model llama --layers 4 --width 256 --heads 4 --kv-heads 4 --intermediate 688 --vocab 8192 --seq-len 128"
    " --optimizer adamw --threads 1 --pin-cores --nproc 2 --mesh pp=2 --accumulate 8 --epochs 1 --warmup-steps 3"
)
PEER = {  # cuts that come first or second for PyTorch
    "1f1b": ["2", "3"],
    "gpipe": ["3"],
    "interleaved_1f1b": ["1 2 3", "2 3 4"],
    "interleaved_zb": ["1 2 3"],
    "zbv": ["1 2 4", "1 3 4"],
}
CAUSES = ("fill", "drain", "imbalance", "transfer", "head of line", "late peer", "barrier")


def ours(arguments: argparse.Namespace, schedule: str, micro_batch: int) -> Record:
    cut = "" if schedule == "auto" else "--stages measured"
    samples = 8 * micro_batch * arguments.steps
    flags = f"{LLAMA} --schedule {schedule} --global-batch-size {micro_batch} --samples {samples} {cut}"
    summary = train(arguments.paceline, flags)
    return {name: value for name, value in summary.items() if name in ("step_ms_median", "weights_sha256") or name.startswith("bubble_")}


def theirs(arguments: argparse.Namespace, schedule: str, cut: str, batch: int) -> float:
    """The median step of PyTorch, in milliseconds."""
    flags = f"--schedule {schedule} --cut {cut} --batch-size {batch} --micro-batches 8"
    return peer_step(arguments.peer_python, flags, "pipeline.py")["step_ms"]


def peer(arguments: argparse.Namespace) -> Record:
    found: Record = {}
    for micro_batch in (4, 1):
        batch, rounds = 8 * micro_batch, []
        for number in range(arguments.rounds):
            of_ours = {name: ours(arguments, name, micro_batch) for name in SCHEDULES}
            of_theirs = {f"{name} {cut}": theirs(arguments, name, cut, batch) for name, cuts in PEER.items() for cut in cuts}
            rounds.append({"ours": of_ours, "theirs": of_theirs})
            print(f"batch {batch}: round {number + 1} of {arguments.rounds}", file=sys.stderr)
        rows = [["ours", "step ms", "over the fastest", "over its namesake", "unexplained, % of the step"]]
        for name in SCHEDULES:
            steps = [of["ours"][name]["step_ms_median"] for of in rounds]
            fastest = [min(of["theirs"].values()) / step for of, step in zip(rounds, steps)]
            same = [[ms for peer_name, ms in of["theirs"].items() if peer_name.split()[0] == name] for of in rounds]
            rest = max(abs(of["ours"][name]["bubble_rest_ms"]) / step for of, step in zip(rounds, steps))
            namesake = ranged([min(of) / step for of, step in zip(same, steps)]) if name in PEER else "-"
            rows.append([name, ranged(steps, 1), ranged(fastest), namesake, f"{100 * rest:.2f}"])
        print(f"\nbatch {batch} in 8 micro-batches, 2 ranks\n{aligned(rows, {0})}")
        found[f"batch_{batch}"] = rounds
    return found


def sleep(arguments: argparse.Namespace, flags: str) -> list[Record]:
    lines = run([arguments.sleeping, *shlex.split(flags)], ROOT, RUN_SECONDS).strip().splitlines()
    return [json.loads(line) for line in lines]


def sleeping(arguments: argparse.Namespace) -> list[Record]:
    found = []
    rows = [["ranks", "micro-batches", "costs", "best by rehearsal", "fastest", "apart %", "unexplained at most %", "as planned"]]
    for ranks, micro_batches, costs in [
        (4, 8, "6,6,6"), (4, 16, "5,8,4"), (4, 12, "8,6,4"), (8, 16, "6,6,6"), (8, 24, "5,8,4"),
    ]:
        flags = f"--ranks {ranks} --micro-batches {micro_batches} --costs {costs}"
        rounds = [sleep(arguments, flags) for _ in range(arguments.rounds)]
        step = {of[0]["schedule"]: statistics.median(one["step_ms"] for one in of) for of in zip(*rounds)}
        # The program prints its own choice first.
        chosen = rounds[0][0]["schedule"]
        fastest = min(step, key=lambda name: step[name])
        rest = max(one["rest_most_pct"] for of in rounds for one in of)
        planned = all(one["as_planned"] for of in rounds for one in of)
        apart = f"{100 * (step[chosen] / step[fastest] - 1):.1f}"
        rows.append([str(ranks), str(micro_batches), costs, chosen, fastest, apart, f"{rest:.2f}", str(planned)])
        found.append({"flags": flags, "rounds": rounds})
    print(f"\nlayers that sleep\n{aligned(rows, {3, 4})}")
    return found


def faults(arguments: argparse.Namespace) -> Record:
    base = "--ranks 4 --micro-batches 8 --schedule 1f1b --steps 18"
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
        grown = {of: after[of] - before[of] for of in CAUSES}
        most = max(grown, key=lambda of: grown[of])
        if expected is None:
            # The idle time as the clock has it, without a ledger.
            idle = [of["step_ms"] - of["busy"] for of in (before, after)]
            expected = idle[1] - idle[0]
        off = 100 * (grown[cause] / expected - 1)
        rows.append([name, most, f"{grown[cause]:.2f}", f"{expected:.2f}", f"{off:+.1f}"])
        found[name] = {"without": before, "with": after, "cause": cause, "grown": grown, "expected_ms": expected}
    print(f"\nplanted faults, ms of idle time, means over ranks\n{aligned(rows, {0, 1})}")
    return found


PARTS = {"peer": peer, "sleeping": sleeping, "faults": faults}


def main() -> int:
    parser = arguments_for(__doc__, "pipelines.json", rounds=3, has_peer=True)
    example = ROOT / "target/release/examples/sleeping_stages"
    parser.add_argument("--sleeping", type=Path, default=example, metavar="PATH", help="the example sleeping_stages")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: all)")
    parser.add_argument("--steps", type=int, default=24, help="of each of our runs (default: 24)")
    arguments = parsed(parser)
    arguments.sleeping = program(parser, "--sleeping", arguments.sleeping)
    try:
        found = {part: PARTS[part](arguments) for part in arguments.parts}
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write(arguments.out, provenance() | found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
