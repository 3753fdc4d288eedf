"""What checkpoints cost while training goes on.

    cargo build --release
    python3 bench/checkpoints.py

An MLP of 14.7 million parameters with AdamW, 2 ranks under `sharded3`, in turns without checkpoints, with one every 100 steps while training
goes on, and with one every 100 steps that training waits for (`--save-sync`). The mean step is the time of the epoch divided by its steps, so
it includes what lies between steps.

Prints a table, and writes `results/checkpoints.json`. Whether checkpoints survive kills is what `attack.py` and `soak.py` try.
"""
import re
import shlex
import sys
import tempfile
from pathlib import Path

from common import RUN_SECONDS, aligned, arguments_for, parsed, provenance, ranged, run, write

STEPS = 300
TRAIN = (
    "train --model mlp --input-dim 2048 --hidden-dim 2048 --num-layers 3 --output-dim 1024 --batch-size 64 --optimizer adamw --strategy sharded3"
    f" --nproc 2 --threads 1 --pin-cores --epochs 1 --steps-per-epoch {STEPS}"
)
MODES = {"none": "", "while training goes on": "--save ck --save-every 100", "waiting": "--save ck --save-every 100 --save-sync"}


def mean_ms(binary: Path, flags: str) -> float:
    with tempfile.TemporaryDirectory(prefix="checkpoints_") as folder:
        output = run([binary, *shlex.split(f"{TRAIN} {flags}")], Path(folder), RUN_SECONDS)
    epoch = re.search(r"^Epoch 1/1: .*, ([0-9.]+) s$", output, re.MULTILINE)
    if epoch is None:
        raise SystemExit(f"no line of the epoch in:\n{output}")
    return float(epoch[1]) * 1e3 / STEPS


def main() -> int:
    arguments = parsed(arguments_for(__doc__, "checkpoints.json", rounds=3))
    rounds = [{mode: mean_ms(arguments.paceline, flags) for mode, flags in MODES.items()} for _ in range(arguments.rounds)]
    rows = [["checkpoints", "mean step ms", "of none"]]
    rows += [[mode, ranged([of[mode] for of in rounds]), ranged([of[mode] / of["none"] for of in rounds], 3)] for mode in MODES]
    print(aligned(rows, left={0}))
    write(arguments.out, provenance() | {"command": TRAIN, "mean_ms": rounds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
