"""The memory of SmolLM2-360M at full size under each way of sharding, beside the figures that were published for two GPUs.

    cargo build --release
    python3 bench/smollm2.py                    # needs 12 GB of memory

The recipe `smollm2-yelp` (361,825,920 parameters as a classifier of five classes, AdamW, 2 ranks) with random weights and the project's own
reviews, two steps under each strategy: MiB of parameters, gradients and optimizer state of a rank. `zero1` to `zero3` split by owner, so ranks
differ, and the mean over ranks is compared. Resident memory stands beside our prediction.

Writes `results/smollm2.json` (an earlier form also had longer sequences). Exits with 1 if memory differs from the published figures by more than
0.1 %, or from its prediction by more than 5 %, or if strategies end with different weights.
"""
import csv
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from common import ROOT, Record, aligned, arguments_for, parsed, provenance, train, write

MIB = 2**20
RECIPE = ROOT / "crates/choices/reviews"
TRAINED = (
    "--recipe smollm2-yelp --init random --epochs 1 --steps-per-epoch 2 --warmup-steps 0 --threads 1 --nproc 2 --data-dir ."
    f" --tokenizer {RECIPE}/tokenizer.json"
)
KINDS = ("parameters", "gradients", "optimizer")
WHOLE = (1380.26, 1380.26, 2760.51)
HALVES = tuple(whole / 2 for whole in WHOLE)
PUBLISHED = {
    "simple_ddp": WHOLE,
    "zero1": (*WHOLE[:2], HALVES[2]),
    "zero2": (WHOLE[0], *HALVES[1:]),
    "zero3": HALVES,
    "sharded1": (*WHOLE[:2], HALVES[2]),
    "sharded2": (WHOLE[0], *HALVES[1:]),
    "sharded3": HALVES,
}
PUBLISHED_TOLERANCE, PREDICTED_TOLERANCE = 0.001, 0.05


def write_reviews(folder: Path) -> None:
    """The project's reviews with five classes: the recipe's data are not shipped."""
    for name in ("train.csv", "test.csv"):
        with open(RECIPE / name, newline="", encoding="utf-8") as file:
            texts = [row["text"] for row in csv.DictReader(file)]
        with open(folder / name, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["text", "label"], *([text, at % 5] for at, text in enumerate(texts))])


def memory_of(binary: Path, strategy: str) -> Record:
    with tempfile.TemporaryDirectory(prefix="smollm2_") as folder:
        write_reviews(Path(folder))
        summary = train(binary, f"{TRAINED} --strategy {strategy}", Path(folder))
    ranks = [[rank["peak_bytes"][kind] / MIB for kind in KINDS] for rank in summary["memory"]]
    mean = [fmean(of) for of in zip(*ranks)]
    predicted = fmean(rank["resident"] for rank in summary["memory_predicted"])
    return {
        "strategy": strategy,
        "mib_per_rank": ranks,
        "published_off": max(abs(ours / theirs - 1) for ours, theirs in zip(mean, PUBLISHED[strategy])),
        "resident_mib": summary["resident_bytes"] / MIB,
        "predicted_off": abs(summary["resident_bytes"] / predicted - 1),
        "weights_sha256": summary["weights_sha256"],
    }


def row_of(record: Record) -> list[str]:
    kinds = [" to ".join(dict.fromkeys(f"{value:.2f}" for value in (min(of), max(of)))) for of in zip(*record["mib_per_rank"])]
    published = " ".join(f"{value:.2f}" for value in PUBLISHED[record["strategy"]])
    off = [f"{100 * record[key]:.3f}" for key in ("published_off", "predicted_off")]
    return [record["strategy"], *kinds, published, off[0], f"{record['resident_mib']:.0f}", off[1], record["weights_sha256"][:8]]


def main() -> int:
    arguments = parsed(arguments_for(__doc__, "smollm2.json", rounds=0))
    records = [memory_of(arguments.paceline, strategy) for strategy in PUBLISHED]
    heading = ["strategy", *KINDS, "published", "off %", "resident", "off prediction %", "weights"]
    print(aligned([heading, *map(row_of, records)], left={0, 8}))
    write(arguments.out, {"memory": {**provenance(), "runs": records}})
    is_off = any(of["published_off"] > PUBLISHED_TOLERANCE or of["predicted_off"] > PREDICTED_TOLERANCE for of in records)
    return int(is_off or len({of["weights_sha256"] for of in records}) > 1)


if __name__ == "__main__":
    sys.exit(main())
