"""Does an emulated accelerator end with the weights of the processor, in whatever order its work runs?

    python3 bench/late.py                  # all strategies, 2 and 4 ranks, 20 orders; 200 for ddp and sharded3
    python3 bench/late.py --orders 2       # a minute

Runs a small CNN, an MLP and the Llama of the recipe tiny-llama with every strategy: on the processor, on the emulated device in its timed
mode, and in its late mode, where nothing runs before somebody waits, in an order that the seed draws. Counts the runs that end with other
weights. Prints a table and writes `results/late.json`. The exit code is 1 if there is such a run. Only the standard library is needed.
"""
import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path

from common import Record, aligned, program, provenance, run

MODELS = {
    "cnn": "--channels 4 8 --hidden 16 --batch-size 8 --steps 3 --optimizer adamw",
    "mlp": "--model mlp --input-dim 16 --hidden-dim 24 --output-dim 4 --num-layers 3 --batch-size 8 --steps 4",
    "llama": "--recipe tiny-llama --batch-size 4 --steps 2",
}
STRATEGIES = [
    "simple_ddp", "simple_ddp_ga", "simple_ddp_hook", "simple_ddp_async", "bucket_ddp_async", "ddp", "flat_ddp", "zero1", "zero2", "zero3",
    "sharded1", "sharded2", "sharded3", "top_k", "fp16", "bf16", "local_sgd", "no_sync",
]
LONG = {"ddp", "sharded3"}
DIGEST = re.compile(r"sha256 ([0-9a-f]{64})")


def digest(binary: Path, words: str) -> str:
    with tempfile.TemporaryDirectory(prefix="late_") as folder:
        output = run([binary, "train", *words.split()], Path(folder), timeout_s=120)
    found = DIGEST.search(output)
    return found[1] if found else "none"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the weights of an emulated accelerator with the processor's.")
    parser.add_argument("--binary", type=Path, default=Path("target/release/paceline"), metavar="PATH")
    parser.add_argument("--out", type=Path, default=Path("results/late.json"), metavar="FILE")
    parser.add_argument("--orders", type=int, default=20, metavar="N", help="seeds of the late mode for each case")
    parser.add_argument("--long-orders", type=int, metavar="N", help="the same for ddp and sharded3 (default: ten times as many)")
    args = parser.parse_args()
    binary = program(parser, "--binary", args.binary)
    long_orders = 10 * args.orders if args.long_orders is None else args.long_orders
    record: Record = provenance() | {"cases": {}}
    rows, num_runs, others, begin = [], 0, 0, time.monotonic()
    for model, flags in MODELS.items():
        for ranks in (2, 4):
            for strategy in STRATEGIES:
                # The recipe evaluates, and with no_sync there is no single model to evaluate.
                if (model, strategy) == ("llama", "no_sync"):
                    continue
                words = f"{flags} --nproc {ranks} --strategy {strategy}"
                expected = digest(binary, words)
                orders = long_orders if strategy in LONG else args.orders
                devices = ["sim:copy=1gbit,5us,launch=0us", *(f"sim:late,seed={seed}" for seed in range(orders))]
                wrong = [device for device in devices if digest(binary, f"{words} --device {device}") != expected]
                num_runs, others = num_runs + len(devices), others + len(wrong)
                case = {"expected": expected, "orders": orders, "wrong": wrong}
                record["cases"][f"{model}, {ranks} ranks, {strategy}"] = case
                rows.append([model, str(ranks), strategy, expected[:12], str(orders), str(len(wrong))])
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(aligned([["model", "ranks", "strategy", "weights", "orders", "others"], *rows], left={0, 2, 3}))
    print(f"{num_runs} runs on the emulated device in {time.monotonic() - begin:.0f} s, of which {others} end with other weights")
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
