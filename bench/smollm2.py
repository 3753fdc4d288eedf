"""What SmolLM2-360M takes at full size, and how memory and time of a language model grow with its sequences. Without a peer.

    cargo build --release
    python3 bench/smollm2.py                    # both parts
    python3 bench/smollm2.py --parts memory     # needs 12 GB of memory

Part `memory`: the recipe `smollm2-yelp` (361,825,920 parameters as a classifier of five classes, AdamW, 2 ranks) with random weights
and the project's own reviews, two steps under each way of sharding. Memory of parameters, gradients and optimizer state is compared
with the figures that were published for two GPUs, in MiB per rank. `zero1` to `zero3` split by owner, so ranks differ, and the
mean over ranks is compared. Resident memory is compared with our prediction.

Part `sequence`: one step of a small model on one rank at batch size 1, with sequences from 512 to 8,192 tokens: the peak of
activations and scratch memory, the time of the step, and that of attention alone.

Writes `results/smollm2.json`. The exit code is 1 if memory differs from the published figures by more than 0.1 %, or from its
prediction by more than 5 %, if the ranks together take more than 24 GiB, or if memory, or the time without attention, grows faster
than 1.1 times the sequence. Only the standard library is needed.
"""
import argparse
import csv
import gzip
import json
import shlex
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from common import ROOT, Record, aligned, program, provenance, run

MIB = 2**20
RANKS = 2
PARAMETERS = 361_825_920
RECIPE = ROOT / "crates/choices/reviews"
TRAINED = "--recipe smollm2-yelp --init random --epochs 1 --steps-per-epoch 2 --warmup-steps 0 --threads 1 --quiet --json step.json"
KINDS = ("parameters", "gradients", "optimizer")
# MiB per rank of the model, its gradients and the state of AdamW, as the comparison of strategies on SmolLM2-360M published them for
# 2 GPUs. That of the optimizer is said where it is split, and so on; what is not split is as in the baseline.
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
BY_OWNER = ("zero1", "zero2", "zero3")
PUBLISHED_TOLERANCE = 0.001
PREDICTED_TOLERANCE = 0.05
MOST_MIB = 24 * 1024
GROWTH_TOLERANCE = 1.1
LENGTHS = (512, 1024, 2048, 4096, 8192)
TIMEOUT_SECONDS = 900.0


def write_reviews(folder: Path) -> None:
    """The project's reviews with five classes: the recipe's data are not shipped."""
    for name in ("train", "test"):
        with open(RECIPE / f"{name}.csv", newline="", encoding="utf-8") as file:
            texts = [row["text"] for row in csv.DictReader(file)]
        with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "label"])
            rows.writerows([text, at % 5] for at, text in enumerate(texts))


def memory_of(binary: Path, strategy: str) -> Record:
    with tempfile.TemporaryDirectory(prefix="smollm2_") as folder:
        write_reviews(Path(folder))
        command = shlex.split(f"train {TRAINED} --strategy {strategy} --nproc {RANKS} --data-dir . --tokenizer")
        run([binary, *command, RECIPE / "tokenizer.json"], Path(folder), TIMEOUT_SECONDS)
        summary = json.loads((Path(folder) / "step.json").read_text())
    assert summary["params"] == PARAMETERS, summary["params"]
    ranks = [[rank["peak_bytes"][kind] / MIB for kind in KINDS] for rank in summary["memory"]]
    of_replica = [fmean(rank[kind] for rank in ranks) for kind in range(len(KINDS))]
    compared = [of_replica] if strategy in BY_OWNER else ranks
    off = max(abs(ours / theirs - 1) for rank in compared for ours, theirs in zip(rank, PUBLISHED[strategy]))
    predicted = fmean(rank["resident"] for rank in summary["memory_predicted"])
    resident = summary["resident_bytes"]
    totals = zip(summary["memory"], summary["memory_predicted"])
    off_totals = [abs(rank["peak_bytes"]["total"] / stated["total"] - 1) for rank, stated in totals]
    return {
        "strategy": strategy,
        "mib_per_rank": ranks,
        "published_mib": PUBLISHED[strategy],
        "published_off": off,
        "total_mib": [rank["peak_bytes"]["total"] / MIB for rank in summary["memory"]],
        "predicted_total_mib": [rank["total"] / MIB for rank in summary["memory_predicted"]],
        "resident_mib": resident / MIB,
        "predicted_resident_mib": predicted / MIB,
        "predicted_off": max(abs(resident / predicted - 1), *off_totals),
        "step_ms": summary["step_ms_median"],
        "weights_sha256": summary["weights_sha256"],
    }


def memory_row(record: Record) -> list[str]:
    def range_of(values: list[float]) -> str:
        low, high = (f"{of(values):.2f}" for of in (min, max))
        return low if low == high else f"{low} to {high}"

    kinds = [range_of(list(values)) for values in zip(*record["mib_per_rank"])]
    published = " ".join(f"{value:.2f}" for value in record["published_mib"])
    off, predicted = record["published_off"], record["predicted_off"]
    return [
        record["strategy"], *kinds, published, f"{100 * off:.3f}", f"{record['resident_mib']:.0f}", f"{100 * predicted:.1f}",
        record["weights_sha256"][:8],
    ]


def sequence_of(binary: Path, length: int) -> Record:
    steps = max(4, 16 * LENGTHS[0] // length)
    model = f"--model llama --seq-len {length} --batch-size 1 --optimizer adamw"
    with tempfile.TemporaryDirectory(prefix="smollm2_") as folder:
        command = f"train {model} --nproc 1 --threads 1 --epochs 1 --steps-per-epoch {steps + 1} --warmup-steps 1 --quiet"
        profiled = f"--profile --profile-wait 0 --profile-warmup 1 --profile-active {steps} --json step.json"
        run([binary, *shlex.split(f"{command} {profiled}")], Path(folder), TIMEOUT_SECONDS)
        summary = json.loads((Path(folder) / "step.json").read_text())
        attention_ms = attention_of(Path(folder))
    peak = summary["memory"][0]["peak_bytes"]
    return {
        "length": length,
        "activations_mib": peak["activations"] / MIB,
        "workspace_mib": peak["workspace"] / MIB,
        "step_ms": summary["step_ms_median"],
        "attention_ms": attention_ms,
    }


def attention_of(folder: Path) -> float:
    """Milliseconds per step in the kernels of attention, of the trace of the run."""
    trace = json.loads(gzip.decompress(next(folder.rglob("*.pt.trace.json.gz")).read_bytes()))
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = [event for event in events if event["name"].startswith("ProfilerStep")]
    kernels = [event for event in events if event["name"].startswith("attention") and event.get("cat") == "kernel"]
    assert steps and kernels, sorted({event["name"] for event in events})
    return sum(event["dur"] for event in kernels) / 1e3 / len(steps)


def sequence_rows(records: list[Record]) -> list[list[str]]:
    first = records[0]
    rows = [["tokens", "activations MiB", "x", "scratch MiB", "step ms", "of it attention", "the rest, x"]]
    for record in records:
        rest, first_rest = (of["step_ms"] - of["attention_ms"] for of in (record, first))
        rows.append([
            f"{record['length']}", f"{record['activations_mib']:.1f}", f"{record['activations_mib'] / first['activations_mib']:.2f}",
            f"{record['workspace_mib']:.1f}", f"{record['step_ms']:.1f}", f"{record['attention_ms']:.1f}", f"{rest / first_rest:.2f}",
        ])
    return rows


def grows_too_fast(first: Record, record: Record) -> bool:
    allowed = GROWTH_TOLERANCE * record["length"] / first["length"]
    rest, first_rest = (of["step_ms"] - of["attention_ms"] for of in (record, first))
    memory, first_memory = (of["activations_mib"] + of["workspace_mib"] for of in (record, first))
    return rest > allowed * first_rest or memory > allowed * first_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paceline", type=Path, default=ROOT / "target/release/paceline")
    parser.add_argument("--parts", nargs="+", choices=["memory", "sequence"], default=["memory", "sequence"])
    parser.add_argument("--output", type=Path, default=ROOT / "results/smollm2.json")
    arguments = parser.parse_args()
    binary = program(parser, "--paceline", arguments.paceline)
    results = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    fails = False
    if "memory" in arguments.parts:
        records = [memory_of(binary, strategy) for strategy in PUBLISHED]
        heading = ["strategy", *KINDS, "published", "off %", "resident", "off %", "weights"]
        print(aligned([heading, *map(memory_row, records)], left={0, 8}))
        fails = any(
            record["published_off"] > PUBLISHED_TOLERANCE
            or record["predicted_off"] > PREDICTED_TOLERANCE
            or RANKS * record["resident_mib"] > MOST_MIB
            for record in records
        ) or len({record["weights_sha256"] for record in records}) > 1
        results["memory"] = {**provenance(), "runs": records}
    if "sequence" in arguments.parts:
        records = [sequence_of(binary, length) for length in LENGTHS]
        print(aligned(sequence_rows(records), left=set()))
        fails = fails or any(grows_too_fast(records[0], record) for record in records)
        results["sequence"] = {**provenance(), "runs": records}
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(fails)


if __name__ == "__main__":
    main()
