"""Two builds of paceline beside each other: steps, collectives and memory, in rounds of the earlier, the later and again the earlier build.

    git worktree add /tmp/before COMMIT && (cd /tmp/before && cargo build --release)
    cargo build --release
    python3 bench/versions.py --before /tmp/before/target/release/paceline
    python3 bench/versions.py --cases links 'steps: CNN, 1 rank' --before PATH --after PATH --rounds 40

`steps` and `links` train, `operations` exchange data, `traces` reads a profiled run. Steps and operations are medians of times that the program takes itself;
CPU seconds are those of all its processes, with their start; memory by category is counted, not measured.

A round gives two ratios: after over before (B/A), where before is the mean of the runs on both sides, so that a steady drift of the machine cancels; and
before over itself (A/A), the second run over the first. Rounds of a case go on until the 95 % interval of its median B/A is so narrow that
its half width is 1 % (`--half-width`) for times and CPU seconds, or until there are 200 (`--rounds`).

`slower`, `faster`, `larger` and `smaller` mark a B/A whose interval has neither 1 nor any part of the interval of A/A. `unsure` marks any other row whose half width
is above the goal: it does not say that the builds are equal. The exit code is 1 if a run failed, and 2 on a wrong argument.
"""
import argparse
import json
import resource
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import ROOT, Record, aligned, arguments_for, commit, each, interval, program, provenance, run, write

RUN_SECONDS = 600
LEAST_ROUNDS = 6  # with fewer, no two of the values make an interval of 95 %

MLP = "--model mlp --input-dim 1024 --hidden-dim 1024 --output-dim 1024 --num-layers 3 --batch-size 128 --steps 60 --warmup-steps 4"
CNN = "--steps 120 --warmup-steps 10"
LLAMA = "--recipe tiny-llama --steps 400 --warmup-steps 20"
STEPS = {
    f"{name}, {where}": f"{flags} {how}"
    for name, flags in (("CNN", CNN), ("MLP", MLP), ("Llama", LLAMA))
    for where, how in (("2 ranks", "--nproc 2 --pin-cores"), ("1 rank, 2 threads", "--nproc 1 --threads 2"))
} | {
    "CNN, 1 rank": f"{CNN} --nproc 1 --pin-cores",
    "MLP, sharded3, 2 ranks": f"{MLP} --strategy sharded3 --nproc 2 --pin-cores",
    "Llama, pipeline of 2 stages": f"{LLAMA} --mesh pp=2 --accumulate 4 --nproc 2 --pin-cores",
    "MLP of 200 layers of 4, whose launches take the time": "--model mlp --input-dim 4 --hidden-dim 4 --output-dim 4 --num-layers 200 --batch-size 1 "
    "--steps 1000 --warmup-steps 20 --nproc 1 --pin-cores",
} | {
    f"Llama of 7.4 million parameters, {precision}, {size} x 128 tokens": "--model llama --optimizer adamw --nproc 1 --pin-cores "
    f"--precision {precision} --batch-size {size} --steps {steps} --warmup-steps 4"
    for precision in ("f32", "bf16")
    for size, steps in ((4, 24), (1, 60))
}
LINKS = {
    f"CNN, {strategy}, 1.5 Gbit/s": f"--nproc 2 --pin-cores --epochs 1 --strategy {strategy} --link 1.5gbit,50us"
    for strategy in ("ddp", "simple_ddp")
} | {
    "MLP, ddp, AdamW, 5 Gbit/s": f"{MLP} --nproc 2 --pin-cores --optimizer adamw --link 5gbit,50us",
    "Llama of 7.4 million parameters, ddp, AdamW, 2 Gbit/s": "--model llama --steps 24 --warmup-steps 4 --batch-size 4 --nproc 2 --pin-cores "
    "--optimizer adamw --link 2gbit,50us",
}
OPERATIONS = (
    *(f"all_reduce --nproc {ranks} --transport shm" for ranks in (2, 4, 8)),
    "all_reduce --nproc 2 --transport thread",
    "all_reduce --nproc 2 --transport tcp",
    "all_reduce --nproc 4 --transport hybrid",
    "all_reduce --nproc 4 --transport shm --op avg",
    "all_reduce --nproc 4 --transport shm --op avg --datatype half",
    "all_reduce --nproc 4 --transport shm --op avg --datatype bfloat16",
    "all_reduce --nproc 2 --transport shm --private",
    "send_recv --nproc 2 --transport shm",
)
SIZES = "-b 4K -e 64M -f 16"

Values = dict[str, float]
"""What one run of a case gave, by name and unit."""


def cpu_seconds(build: Path, flags: str, folder: Path) -> float:
    """The CPU seconds of a run and of all ranks that it has started."""
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    run([build, *shlex.split(flags)], folder, RUN_SECONDS)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime


def summary_of(build: Path, flags: str) -> tuple[Record, float]:
    """What a run writes to `out.json`, and its CPU seconds."""
    with tempfile.TemporaryDirectory(prefix="versions_") as folder:
        seconds = cpu_seconds(build, flags, Path(folder))
        return json.loads(Path(folder, "out.json").read_text()), seconds


Case = Callable[[Path], Values]


def steps(flags: str) -> Case:
    def measure(build: Path) -> Values:
        summary, seconds = summary_of(build, f"train {flags} --quiet --json out.json")
        values = {"step ms": summary["step_ms_median"], "CPU s": seconds, "resident MB": summary["resident_bytes"] / 1e6}
        for category in ("parameters", "gradients", "optimizer", "activations", "workspace", "communication", "data"):
            if most := summary["peak_bytes"][category]:
                values[f"{category} MB"] = most / 1e6
        return values

    return measure


def operation(flags: str) -> Case:
    def measure(build: Path) -> Values:
        pinned = "--pin-cores" if "--nproc 2 " in flags else ""
        results, seconds = summary_of(build, f"bench {flags} {SIZES} {pinned} -J out.json")
        times = {f"{row['size'] >> 10:,} KiB us": (row["in_place"] or row["out_of_place"])["time"] for row in results["results"]}
        return {**times, "CPU s": seconds}

    return measure


TRACES = tempfile.TemporaryDirectory(prefix="versions_traces_")


def analyze(build: Path) -> Values:
    """`paceline analyze` on the traces of a run, which the first call makes."""
    folder = Path(TRACES.name)
    if not (folder / "profile").exists():
        cpu_seconds(build, "train --nproc 2 --epochs 1 --profile --profile-active 50 --quiet", folder)
    start = time.monotonic()
    seconds = cpu_seconds(build, "analyze profile/ddp", folder)
    return {"whole process ms": (time.monotonic() - start) * 1e3, "CPU s": seconds}


CASES: dict[str, Case] = (
    {f"steps: {name}": steps(flags) for name, flags in STEPS.items()}
    | {f"links: {name}": steps(flags) for name, flags in LINKS.items()}
    | {f"operations: {flags}": operation(flags) for flags in OPERATIONS}
    | {"traces: analyze": analyze}
)


def rows_of(rounds: list[tuple[Values, Values, Values]]) -> list[Record]:
    """For each value of a case: its medians, B/A and A/A."""
    rows = []
    for value in (name for name in rounds[0][0] if all(name in values for runs in rounds for values in runs)):
        first, after, again = ([run[value] for run in runs] for runs in zip(*rounds))
        of_builds = interval([b / ((a + c) / 2) for a, b, c in zip(first, after, again)])
        of_itself = interval([c / a for a, c in zip(first, again)])
        medians = {"before": statistics.median(first + again), "after": statistics.median(after)}
        rows.append({"value": value, **medians, "after_over_before": of_builds, "before_over_itself": of_itself})
    return rows


def verdict(row: Record, goal: float) -> str:
    of_builds, of_itself = row["after_over_before"], row["before_over_itself"]
    worse, better = ("larger", "smaller") if row["value"].endswith("MB") else ("slower", "faster")
    if of_builds["low"] > max(1, of_itself["high"]):
        return worse
    if of_builds["high"] < min(1, of_itself["low"]):
        return better
    return "unsure" if of_builds["half_width"] > goal else ""


def compared(arguments: argparse.Namespace, case: str) -> Record:
    before, after, goal = arguments.before, arguments.after, arguments.half_width / 100
    rounds: list[tuple[Values, Values, Values]] = []
    rows: list[Record] = []
    while len(rounds) < arguments.rounds:
        rounds.append(tuple(CASES[case](build) for build in (before, after, before)))
        if len(rounds) >= LEAST_ROUNDS:
            rows = rows_of(rounds)
            if all(row["after_over_before"]["half_width"] <= goal for row in rows if not row["value"].endswith("MB")):
                break
    for row in rows:
        row["verdict"] = verdict(row, goal)
    return {"case": case, "rounds": rounds, "values": rows}


def table(results: list[Record]) -> str:
    def shown(ratio: Record) -> list[str]:
        return [f"{ratio['median']:.3f}", f"{ratio['low']:.3f}-{ratio['high']:.3f}", f"{ratio['half_width'] * 100:.1f} %"]

    cells = [["case", "rounds", "before", "after", "B/A", "95 % interval", "+-", "A/A", "95 % interval", "+-", ""]]
    for result in results:
        for row in result["values"]:
            ratios = [*shown(row["after_over_before"]), *shown(row["before_over_itself"])]
            name, rounds = f"{result['case']}: {row['value']}", str(len(result["rounds"]))
            cells.append([name, rounds, f"{row['before']:,.2f}", f"{row['after']:,.2f}", *ratios, row["verdict"]])
    return aligned(cells, left={0, 10})


def main() -> int:
    parser = arguments_for(__doc__, "versions.json", rounds=200, has_program=False)
    parser.add_argument("--before", type=Path, required=True, metavar="PATH", help="the earlier build")
    parser.add_argument("--after", type=Path, default=ROOT / "target/release/paceline", metavar="PATH")
    parser.add_argument("--cases", nargs="+", default=[""], metavar="NAME", help="those whose names begin so (default: all)")
    parser.add_argument("--half-width", type=float, default=1.0, metavar="PCT", help="the goal for each interval (default: 1 %%)")
    arguments = parser.parse_args()
    cases = [name for name in CASES if name.startswith(tuple(arguments.cases))]
    if arguments.rounds < LEAST_ROUNDS or not cases:
        parser.error(f"--rounds must be at least {LEAST_ROUNDS}, for an interval of 95 %; --cases are {'; '.join(CASES)}")
    arguments.before, arguments.after = (program(parser, f"--{flag}", getattr(arguments, flag)) for flag in ("before", "after"))
    results, failures = each(cases, lambda case: compared(arguments, case))
    print(table(results), *failures, sep="\n")
    builds = {"before": commit(arguments.before.parent), "after": commit(arguments.after.parent)}
    write(arguments.out, provenance() | builds | {"half_width_pct": arguments.half_width, "results": results, "failures": failures})
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
