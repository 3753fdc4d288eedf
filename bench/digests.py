"""Ten fixed runs: do two builds end with the same weights, figures of the loss and exit codes, and in the same time?

    python3 bench/digests.py --old PATH --new target/release/paceline
    python3 bench/digests.py --old PATH --rounds 7        # on a machine that does nothing else

Between them, the runs have every model, optimizer and kind of placement, three transports, accumulation, clipping and bf16. The two
builds take turns, and the seconds of a whole run are medians over the rounds, with their range. Prints a table and writes
`results/digests.json`. The exit code is 1 if a run ends with other weights or another loss. Only the standard library is needed.
"""
import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from common import Record, aligned, program, provenance, run

SMALL_CNN = "--samples 1024 --epochs 1"
SMALL_MLP = "--model mlp --input-dim 64 --hidden-dim 96 --output-dim 16 --num-layers 3 --batch-size 16 --steps-per-epoch 12 --epochs 1"
RUNS = {
    "cnn, ddp": SMALL_CNN,
    "cnn, one rank": f"{SMALL_CNN} --nproc 1",
    "cnn, simple_ddp, tcp, 3 ranks": f"{SMALL_CNN} --nproc 3 --strategy simple_ddp --transport tcp",
    "cnn, bf16, clipping": f"{SMALL_CNN} --precision bf16 --clip-grad-norm 1",
    "mlp, sharded3, adamw, 4 ranks": f"{SMALL_MLP} --nproc 4 --strategy sharded3 --optimizer adamw",
    "mlp, zero3, adamw, threads": f"{SMALL_MLP} --nproc 4 --strategy zero3 --optimizer adamw --transport thread",
    "mlp, sharded2, accumulation": f"{SMALL_MLP} --strategy sharded2 --accumulate 4",
    "mlp, top_k": f"{SMALL_MLP} --strategy top_k",
    "mlp, local_sgd, 3 ranks": f"{SMALL_MLP} --nproc 3 --strategy local_sgd",
    "llama, sharded1": "--recipe tiny-llama --epochs 1 --strategy sharded1",
}
DIGEST = re.compile(r"sha256 ([0-9a-f]{64})")
LOSS = re.compile(r"loss ([0-9.]+)")


def outcome(binary: Path, words: str) -> tuple[str, float]:
    """The digest and the last loss of a run, and its seconds."""
    with tempfile.TemporaryDirectory(prefix="digests_") as folder:
        begin = time.monotonic()
        output = run([binary, "train", *words.split()], Path(folder), timeout_s=300)
        seconds = time.monotonic() - begin
    digest, losses = DIGEST.search(output), LOSS.findall(output)
    if digest is None:
        return "no digest", seconds
    return f"{digest[1][:16]}, loss {losses[-1] if losses else 'unknown'}", seconds


def shown(seconds: list[float]) -> str:
    return f"{median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the weights that two builds end with.")
    parser.add_argument("--old", type=Path, required=True, metavar="PATH")
    parser.add_argument("--new", type=Path, default=Path("target/release/paceline"), metavar="PATH")
    parser.add_argument("--out", type=Path, default=Path("results/digests.json"), metavar="FILE")
    parser.add_argument("--rounds", type=int, default=1, metavar="R")
    arguments = parser.parse_args()
    old, new = program(parser, "--old", arguments.old), program(parser, "--new", arguments.new)
    record: Record = {**provenance(), "runs": {}}
    rows = [["run", "old", "new", "old s", "new s", "ratio"]]
    for name, words in RUNS.items():
        found, seconds = {}, {"old": [], "new": []}
        for _ in range(max(arguments.rounds, 1)):
            for side, binary in (("old", old), ("new", new)):
                found[side], took = outcome(binary, words)
                seconds[side].append(took)
        ratio = median(seconds["new"]) / median(seconds["old"])
        record["runs"][name] = {"flags": words, **found, "seconds": seconds, "ratio": ratio}
        same = "the same" if found["new"] == found["old"] else found["new"]
        rows.append([name, found["old"], same, shown(seconds["old"]), shown(seconds["new"]), f"{ratio:.3f}"])
    print(aligned(rows, left={0, 1, 2}))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(row[2] != "the same" for row in rows[1:]))


if __name__ == "__main__":
    sys.exit(main())
