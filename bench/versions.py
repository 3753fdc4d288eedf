"""Two builds of paceline beside each other: the same weights, and times and memory pair by pair.

    git worktree add /tmp/before COMMIT && (cd /tmp/before && cargo build --release)
    cargo build --release
    python3 bench/versions.py --before /tmp/before/target/release/paceline

`digests`: fixed training runs of few steps on up to three ranks. Both builds must end with the same weights, bit by bit.

`agree`: the same training run on 4, 6 and 8 ranks, with all exact strategies, over all transports, on one host and as if on
two and three hosts. All runs of the later build must end with the same weights.

`steps`: training steps of the CNN, the MLP and a small language model, on threads and on ranks, with the memory of the process of rank 0 and the most memory in use by
category, which is counted and not measured.

`links`: training steps on an emulated link: of the CNN with `ddp` and with `simple_ddp`, of the MLP and a language model with `ddp`.

`operations`: all-reduce by size, number of ranks, transport, operation and element type, also of private memory, and messages.

`analyze`: `paceline analyze` on a profiled run of the first build, as a whole process.

Both builds run in turn, and the order changes from pair to pair. Each pair gives one ratio, after over before. The
table shows the median of the ratios with its 95 % interval, from resampling the pairs. A ratio whose whole interval is
above 1.01 is marked `slower` (or `larger`), and one whose whole interval is below 0.99 `faster` (or `smaller`).

Prints one table and writes the raw values with date, machine and commits to `results/versions.json`. Only the standard
library is needed. Exits with 0 if all digests are as they must be, with 1 if not or if a run failed, with 2 on a wrong argument.
"""
import argparse
import datetime
import json
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common import Record, RunFailed, aligned, commit, machine, run

RUN_SECONDS = 600
NOISE = 0.01  # a ratio nearer to 1 than this is no difference

SMALL_CNN = "--channels 8 16 --hidden 32 --samples 1000 --batch-size 25 --epochs 2"
SMALL_MLP = "--model mlp --input-dim 64 --hidden-dim 64 --output-dim 16 --batch-size 16 --steps-per-epoch 10 --epochs 2"
DIGESTS = (
    f"{SMALL_CNN} --nproc 1",
    f"{SMALL_CNN} --nproc 2",
    f"{SMALL_CNN} --nproc 2 --strategy simple_ddp --transport thread",
    f"{SMALL_CNN} --nproc 3 --strategy bucket_ddp_async --transport tcp --optimizer adamw",
    f"{SMALL_CNN} --nproc 3 --strategy flat_ddp --transport hybrid --hosts 3 --momentum 0.9",
    f"{SMALL_CNN} --nproc 2 --batch-norm --sync-batch-norm --lr-schedule cosine",
    f"{SMALL_CNN} --nproc 2 --strategy top_k --top-k 0.2",
    f"{SMALL_CNN} --nproc 2 --strategy local_sgd --sync-every 3 --accumulate 2",
    f"{SMALL_MLP} --num-layers 2 --nproc 2 --strategy fp16",
    f"{SMALL_MLP} --nproc 3 --strategy simple_ddp_ga --accumulate 2 --tie-layers --num-layers 4",
)
AGREE = f"{SMALL_CNN} --momentum 0.9 --clip-grad-norm 1"
EXACT = ("simple_ddp", "simple_ddp_hook", "simple_ddp_async", "bucket_ddp_async", "flat_ddp", "ddp --bucket-cap-mb 0.01")
MLP = "--model mlp --input-dim 1024 --hidden-dim 1024 --output-dim 1024 --num-layers 3 --batch-size 128 --steps 60 --warmup-steps 4"
CNN = "--steps 120 --warmup-steps 10"
LLAMA = "--recipe tiny-llama --steps 400 --warmup-steps 20"
STEPS = {
    f"{name}, {where}": f"{flags} {how}"
    for name, flags in (("CNN", CNN), ("MLP", MLP), ("Llama", LLAMA))
    for where, how in (("2 ranks", "--nproc 2 --pin-cores"), ("1 rank, 2 threads", "--nproc 1 --threads 2"))
} | {"CNN, 1 rank": f"{CNN} --nproc 1 --pin-cores"}
LARGE_LLAMA = "--model llama --optimizer adamw --nproc 1 --pin-cores"
STEPS |= {
    f"Llama of 7.4 million parameters, {precision}, {size} x 128 tokens": f"{LARGE_LLAMA} --precision {precision} --batch-size {size} --steps {steps} "
    "--warmup-steps 4"
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

Values = Iterator[tuple[str, float]]  # what was measured, and in which value


class Build:
    """One of the two programs."""

    def __init__(self, binary: Path) -> None:
        self.binary = Path(os.path.abspath(binary))

    def run(self, flags: str, folder: Path) -> None:
        run([self.binary, *shlex.split(flags)], folder, RUN_SECONDS)

    def summary(self, command: str, flags: str) -> Record:
        with tempfile.TemporaryDirectory(prefix="versions_") as folder:
            self.run(f"{command} {flags}", Path(folder))
            return json.loads(Path(folder, "out.json").read_text())


def train(build: Build, flags: str) -> Record:
    return build.summary("train", f"{flags} --quiet --json out.json")


def agreeing(build: Build) -> Iterator[tuple[int, str, str]]:
    """The number of ranks, the flags and the digest of each run that must end like the others on as many ranks."""
    for ranks in (4, 6, 8):
        for strategy in EXACT:
            flags = f"--nproc {ranks} --strategy {strategy}"
            yield ranks, flags, train(build, f"{AGREE} {flags}")["weights_sha256"]
        hybrid = [f"hybrid --hosts {hosts}" for hosts in (2, 3) if ranks % hosts == 0]
        for transport in ["thread", "shm", "tcp", *hybrid]:
            flags = f"--nproc {ranks} --transport {transport}"
            yield ranks, flags, train(build, f"{AGREE} {flags}")["weights_sha256"]


def steps(cases: dict[str, str]) -> Callable[[Build], Values]:
    def measure(build: Build) -> Values:
        for case, flags in cases.items():
            summary = train(build, flags)
            yield f"{case}: step ms", summary["step_ms_median"]
            yield f"{case}: resident MB", summary["resident_bytes"] / 1e6
            for category in ("parameters", "gradients", "optimizer", "activations", "workspace", "communication", "data"):
                if most := summary["peak_bytes"][category]:
                    yield f"{case}: {category} MB", most / 1e6

    return measure


def operations(build: Build) -> Values:
    for flags in OPERATIONS:
        pinned = "--pin-cores" if "--nproc 2 " in flags else ""
        for row in build.summary("bench", f"{flags} {SIZES} {pinned} -J out.json")["results"]:
            words = flags
            for flag in ("all_reduce ", "--nproc ", "--transport ", "--op ", "--datatype ", "--"):
                words = words.replace(flag, "")
            times = row["in_place"] or row["out_of_place"]
            yield f"{words}, {row['size'] >> 10:,} KiB: us", times["time"]


class Analyze:
    """`paceline analyze` on one trace, which the first call makes."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="versions_trace_"))

    def __call__(self, build: Build) -> Values:
        traces = self.folder / "profile/ddp"
        if not traces.exists():
            build.run("train --nproc 2 --epochs 1 --profile --profile-active 50 --quiet", self.folder)
        start = time.monotonic()
        build.run(f"analyze {traces}", self.folder)
        yield "analyze: whole process ms", (time.monotonic() - start) * 1e3


PARTS: dict[str, Callable[[Build], Values]] = {
    "steps": steps(STEPS),
    "links": steps(LINKS),
    "operations": operations,
    "analyze": Analyze(),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare two builds of paceline, pair by pair.")
    parser.add_argument("--before", type=Path, required=True, metavar="PATH", help="the earlier build")
    parser.add_argument("--after", type=Path, default=Path("target/release/paceline"), metavar="PATH")
    parts = ["digests", "agree", *PARTS]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="(default: all)")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="steps: only these, such as 'CNN, 2 ranks' (default: all)")
    parser.add_argument("--pairs", type=int, default=10, help="runs of each build (default: 10)")
    parser.add_argument("--out", type=Path, default=Path("results/versions.json"), metavar="FILE")
    arguments = parser.parse_args()
    if arguments.pairs < 2:
        parser.error("--pairs must be at least 2: one pair has no spread")
    if arguments.cases:
        unknown = set(arguments.cases) - set(STEPS)
        if unknown:
            parser.error(f"--cases: there is no {', '.join(sorted(unknown))}; there are {'; '.join(STEPS)}")
        PARTS["steps"] = steps({name: STEPS[name] for name in arguments.cases})
    for build in (arguments.before, arguments.after):
        if not build.is_file():
            parser.error(f"{build}: no such file; `cargo build --release` makes it")
    return arguments


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median, from 2,000 samples of the pairs with replacement."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def compared(before: Build, after: Build, part: str, num_pairs: int) -> list[Record]:
    values: dict[str, list[dict[str, float]]] = {}
    for pair in range(num_pairs):
        order = [("before", before), ("after", after)]
        for side, build in order if pair % 2 == 0 else reversed(order):
            for case, value in PARTS[part](build):
                values.setdefault(case, [{} for _ in range(num_pairs)])[pair][side] = value
    rows = []
    for case, pairs in values.items():
        ratios = [pair["after"] / pair["before"] for pair in pairs]
        low, high = interval(ratios)
        words = ("larger", "smaller") if case.endswith("MB") else ("slower", "faster")
        verdict = words[0] if low > 1 + NOISE else words[1] if high < 1 - NOISE else ""
        rows.append(
            {"part": part, "case": case, "pairs": pairs, "ratio": statistics.median(ratios), "low": low, "high": high}
            | {"min": min(ratios), "max": max(ratios), "verdict": verdict}
        )
    return rows


def table(rows: list[Record]) -> str:
    cells = [["case", "before", "after", "ratio", "95 % interval", "all pairs", ""]]
    for row in rows:
        medians = [statistics.median(pair[side] for pair in row["pairs"]) for side in ("before", "after")]
        cells.append(
            [row["case"], *(f"{median:,.2f}" for median in medians), f"{row['ratio']:.3f}"]
            + [f"{row['low']:.3f}-{row['high']:.3f}", f"{row['min']:.2f}-{row['max']:.2f}", row["verdict"]]
        )
    return aligned(cells, left={0, 6})


def ends(runs: list[Record]) -> dict[int, tuple[int, int]]:
    """For each number of ranks, the number of runs and the number of different digests with which they ended."""
    digests: dict[int, list[str]] = {}
    for row in runs:
        digests.setdefault(row["ranks"], []).append(row["digest"])
    return {ranks: (len(found), len(set(found))) for ranks, found in digests.items()}


def main() -> int:
    arguments = parse_arguments()
    before, after = Build(arguments.before), Build(arguments.after)
    record: Record = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "before": commit(arguments.before.resolve().parent),
        "after": commit(arguments.after.resolve().parent),
        "digests": [],
        "agree": [],
        "results": [],
    }
    try:
        if "digests" in arguments.parts:
            for flags in DIGESTS:
                digests = [train(build, flags)["weights_sha256"] for build in (before, after)]
                record["digests"].append({"flags": flags, "before": digests[0], "after": digests[1]})
            equal = sum(row["before"] == row["after"] for row in record["digests"])
            print(f"digests: {equal} of {len(DIGESTS)} equal", flush=True)
        if "agree" in arguments.parts:
            for ranks, flags, digest in agreeing(after):
                record["agree"].append({"ranks": ranks, "flags": flags, "digest": digest})
            for ranks, (num_runs, num_digests) in ends(record["agree"]).items():
                print(f"agree: {num_runs} runs on {ranks} ranks, different digests: {num_digests}", flush=True)
        for part in arguments.parts:
            if part in PARTS:
                rows = compared(before, after, part, arguments.pairs)
                record["results"] += rows
                print(table(rows), flush=True)
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    is_same = all(row["before"] == row["after"] for row in record["digests"])
    return int(not is_same or any(num_digests > 1 for _, num_digests in ends(record["agree"]).values()))


if __name__ == "__main__":
    sys.exit(main())
