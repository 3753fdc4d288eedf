"""Does an emulated accelerator, or an emulated card, end with the same weights in whatever order its work runs?

    python3 bench/late.py                  # all strategies, 2 and 4 ranks, 20 orders; 200 for ddp and sharded3
    python3 bench/late.py --orders 2       # a minute
    python3 bench/late.py --device cuda    # the same on an emulated card, with smaller models, 1 to 3 ranks and 5 orders

On the emulated device, the timed mode and each order of the late mode must have the weights of the processor. On a card, whose products have an order of their
own, those of its first run with `simple_ddp` are expected, or of the first one with a strategy that has other weights by its nature. There, ranks share
a card and send through the host, or have a card each and send by NCCL. With `PACELINE_CARD=1` a card of this machine is taken, which has orders of its own; NCCL
then needs as many cards as ranks, and is left out. The emulated card needs the run-time compiler of the vendor (see docs/devices.md) and
`cargo build --release -p paceline-emulated-card`. The exit code is 1 if a run ends with other weights.
"""
import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from common import Record, aligned, arguments_for, parsed, program, provenance, train, write

MODELS = {
    "cnn": "--channels 4 8 --hidden 16 --batch-size 8 --steps 3 --optimizer adamw",
    "mlp": "--model mlp --input-dim 16 --hidden-dim 24 --output-dim 4 --num-layers 3 --batch-size 8 --steps 4",
    "llama": "--recipe tiny-llama --batch-size 4 --steps 2",
}
# Small enough for a card whose every instruction is interpreted.
ON_A_CARD = {
    "cnn": "--image 8 8 3 --channels 4 8 --hidden 16 --batch-size 4 --steps 3 --optimizer adamw",
    "mlp": "--model mlp --input-dim 16 --hidden-dim 16 --output-dim 4 --batch-size 4 --steps 3",
    "llama": "--model llama --layers 2 --width 32 --heads 4 --kv-heads 2 --intermediate 48 --vocab 64 --seq-len 32 --batch-size 1 --steps 2",
}
STRATEGIES = [
    "simple_ddp", "simple_ddp_ga", "simple_ddp_hook", "simple_ddp_async", "bucket_ddp_async", "ddp", "flat_ddp", "zero1", "zero2", "zero3",
    "sharded1", "sharded2", "sharded3", "top_k", "fp16", "bf16", "local_sgd", "no_sync",
]
LONG = {"ddp", "sharded3"}
# The weights of each are its own. `simple_ddp_ga` has steps of four batches.
OWN_WEIGHTS = {"simple_ddp_ga", "top_k", "fp16", "bf16", "local_sgd", "no_sync"}
LIBRARIES = ["libcuda.so.1", "libcublasLt.so.13", "libnccl.so.2", "libnvidia-ml.so.1"]


def digest(binary: Path, words: str, **variables: int) -> str:
    os.environ.update({f"PACELINE_EMULATED_{name}": str(value) for name, value in variables.items()})
    return train(binary, words)["weights_sha256"]


def device_cases(binary: Path, words: str, orders: int) -> tuple[str, dict[str, str]]:
    """The expected weights, and those of each run on the emulated device."""
    devices = ["sim:copy=1gbit,5us,launch=0us", *(f"sim:late,seed={seed}" for seed in range(orders))]
    return digest(binary, words), {device: digest(binary, f"{words} --device {device}") for device in devices}


def card_cases(binary: Path, words: str, expected: str | None, ranks: int, orders: int) -> tuple[str, dict[str, str]]:
    """The same for a card: shared by the ranks, and, for more than one, with a card for each."""
    words = f"{words} --device cuda"
    cases = {f"seed {seed}": digest(binary, words, SEED=seed) for seed in range(orders)}
    if ranks > 1 and os.environ.get("PACELINE_CARD") != "1":
        cases |= {f"nccl, seed {seed}": digest(binary, f"{words} --transport nccl", SEED=seed, CARDS=ranks) for seed in range(orders)}
    return expected or next(iter(cases.values())), cases


def card_variables(parser: argparse.ArgumentParser, binary: Path, folder: Path) -> dict[str, str]:
    """Where a program finds the emulated card, whose library lies beside it."""
    if os.environ.get("PACELINE_CARD") == "1":
        return {}
    library = program(parser, "--paceline", binary.parent / "libpaceline_emulated_card.so")
    for name in LIBRARIES:
        (folder / name).symlink_to(library)
    folders = f"{folder}:{os.environ.get('PACELINE_CUDA_LIBRARIES', '')}"
    return {"PACELINE_CUDA_LIBRARIES": folders, "XDG_CACHE_HOME": str(folder)}


def main() -> int:
    parser = arguments_for(__doc__, "late.json", rounds=0)
    parser.add_argument("--device", choices=["sim", "cuda"], default="sim", help="sim (default), or cuda for an emulated card")
    parser.add_argument("--orders", type=int, metavar="N", help="orders of work for each case (default: 20; 5 on a card)")
    parser.add_argument("--long-orders", type=int, metavar="N", help="the same for ddp and sharded3 (default: ten times as many; 4 times on a card)")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="(default: 2 4; 1 2 3 on a card)")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, help="(default: all)")
    args = parsed(parser)
    on_card = args.device == "cuda"
    out = args.out.with_name("late_cuda.json") if on_card and args.out == parser.get_default("out") else args.out
    orders = args.orders or (5 if on_card else 20)
    long_orders = args.long_orders or orders * (4 if on_card else 10)
    record: Record = provenance() | {"cases": {}}
    rows, num_runs, others, begin = [], 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="card_") as folder:
        os.environ.update(card_variables(parser, args.paceline, Path(folder)) if on_card else {})
        for model, flags in (ON_A_CARD if on_card else MODELS).items():
            for ranks in args.ranks or ((1, 2, 3) if on_card else (2, 4)):
                exact = None
                for strategy in args.strategies:
                    # The recipe evaluates, and with no_sync there is no single model to evaluate.
                    if (model, strategy) == ("llama", "no_sync"):
                        continue
                    words, count = f"{flags} --nproc {ranks} --strategy {strategy}", long_orders if strategy in LONG else orders
                    if on_card:
                        expected, cases = card_cases(args.paceline, words, None if strategy in OWN_WEIGHTS else exact, ranks, count)
                        exact = exact or expected
                    else:
                        expected, cases = device_cases(args.paceline, words, count)
                    wrong = [name for name, digest in cases.items() if digest != expected]
                    num_runs, others = num_runs + len(cases), others + len(wrong)
                    record["cases"][f"{model}, {ranks} ranks, {strategy}"] = {"expected": expected, "orders": count, "wrong": wrong}
                    rows.append([model, str(ranks), strategy, expected[:12], str(count), str(len(wrong))])
    write(out, record)
    print(aligned([["model", "ranks", "strategy", "weights", "orders", "others"], *rows], left={0, 2, 3}))
    print(f"{num_runs} runs in {time.monotonic() - begin:.0f} s, of which {others} end with other weights")
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
