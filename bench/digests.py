"""The book: 44 short runs, and the weights and the loss with which each ends.

    python3 bench/digests.py                              # fills in what this machine can show, and compares the rest
    python3 bench/digests.py --check                      # only compares
    python3 bench/digests.py --check --paceline PATH --old PATH     # the first build resumes what the second one has saved

Each run is made with 1 to 4 threads at each level of vector instructions, to which `PACELINE_SIMD` holds it. All levels with fused multiply-add (`avx2`, `avx512`) have one
end, `fma`; plain code has its own, and so have the ways to multiply in bf16 (`avx512-bf16`, `amx`) in the runs in bf16.

`results/book.json` is the book. A level that this machine lacks is listed there as owed, and the next machine that has it compares it. What
is there already is compared, never written: the exit code is 1 if a run ends otherwise. A change that is meant to give other bits deletes the file.
"""
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, Record, RunFailed, aligned, arguments_for, parsed, program, provenance, train, write

CNN = "--channels 4 20 --hidden 72 --samples 128 --batch-size 8 --steps 4"
MLP = "--model mlp --input-dim 48 --hidden-dim 136 --output-dim 40 --num-layers 4 --batch-size 8 --steps 4"
LLAMA_OF = "--model llama --layers 3 --heads 4 --kv-heads 2 --intermediate 88 --vocab 301 --batch-size 4 --steps 3 --optimizer adamw"
LLAMA = f"{LLAMA_OF} --width 32 --seq-len 16"
# From one global batch, so that any number of ranks trains on the same.
SAVED = MLP.replace("--batch-size 8", "--global-batch-size 16").replace(" --steps 4", "") + " --optimizer adamw"
BF16 = "--precision bf16"
RUNS: dict[str, str | list[str]] = {
    # Convolutions by minimal filtering, with their gradients of weights.
    "minimal_filtering": f"{CNN.replace('4 20', '16 32 64')} --nproc 2",
    # Every strategy.
    "single": f"{CNN} --nproc 1 --evaluate",
    "simple_ddp": f"{CNN} --strategy simple_ddp --nproc 3 --transport tcp",
    "simple_ddp_ga": f"{MLP} --strategy simple_ddp_ga --accumulate 2 --tie-layers",
    "simple_ddp_hook": f"{LLAMA} --strategy simple_ddp_hook --transport thread",
    "simple_ddp_async": f"{CNN} --strategy simple_ddp_async --momentum 0.9",
    "bucket_ddp_async": f"{MLP} --strategy bucket_ddp_async --nproc 3 --optimizer adamw",
    "ddp": f"{CNN} --strategy ddp --nproc 4 --clip-grad-norm 1",
    "ddp, two buckets, hybrid": f"{LLAMA} --strategy ddp --bucket-cap-mb 0.02 --nproc 4 --transport hybrid --hosts 2",
    "flat_ddp, ring": f"{MLP} --strategy flat_ddp --nproc 3 --transport tcp --algorithm ring",
    "zero1": f"{MLP} --strategy zero1 --nproc 3 --optimizer adamw",
    "zero2": f"{CNN} --strategy zero2 --optimizer adamw",
    "zero3": f"{LLAMA} --strategy zero3 --nproc 3",
    "sharded1": f"{LLAMA} --strategy sharded1",
    "sharded2, accumulation": f"{MLP} --strategy sharded2 --accumulate 4 --nproc 3",
    "sharded3": f"{CNN} --strategy sharded3 --nproc 3 --optimizer adamw",
    "top_k": f"{MLP} --strategy top_k --top-k 0.2",
    "fp16": f"{CNN} --strategy fp16",
    "bf16": f"{LLAMA} --strategy bf16 --nproc 3",
    "local_sgd": f"{MLP} --strategy local_sgd --sync-every 3 --nproc 3",
    "no_sync": f"{CNN} --strategy no_sync",
    # Pipelines.
    "pipeline 1f1b": f"{LLAMA} --mesh pp=2 --schedule 1f1b --accumulate 4",
    "pipeline zb_h1, replicas": f"{CNN} --mesh pp=2,dp=2 --nproc 4 --schedule zb_h1 --strategy sharded2 --accumulate 4",
    "pipeline zbv, tree": f"{MLP} --mesh pp=2 --schedule zbv --accumulate 4 --accumulation-order tree",
    # Layers that ranks divide, and parameters that are rounded to travel.
    "divided mlp": f"{MLP} --mesh tp=2 --overlap-tp",
    "divided llama, sharded3": f"{LLAMA.replace('301', '300')} --mesh shard=2,tp=2 --nproc 4 --strategy sharded3",
    "gathers in bf16": f"{MLP} --strategy sharded3 --gather-precision bf16 --nproc 3",
    # The emulated accelerator.
    "late": f"{CNN} --device sim:late,seed=7",
    "late, sharded3": f"{LLAMA} --strategy sharded3 --device sim:late,seed=11",
    "late, copies": f"{MLP} --device sim:late,seed=3 --generate-on-host --pin-memory --non-blocking --copy-stream",
    # Element types.
    "cnn in bf16": f"{CNN} {BF16} --clip-grad-norm 1 --evaluate",
    "mlp in bf16, sharded3": f"{MLP} {BF16} --strategy sharded3 --nproc 3",
    "llama in bf16": f"{LLAMA} {BF16}",
    "llama in bf16, long": f"{LLAMA_OF} {BF16} --width 128 --seq-len 80 --nproc 1",
    "llama in bf16, pipeline": f"{LLAMA} {BF16} --mesh pp=2 --schedule zb_h1 --accumulate 4",
    "cnn in fp16": f"{CNN} --precision fp16 --emulate-fp16",
    # Other parts of a step.
    "accumulation, tree": f"{CNN} --accumulate 4 --accumulation-order tree",
    "batch norm": f"{CNN} --batch-norm --sync-batch-norm --lr-schedule cosine",
    "uneven ranks": f"{CNN} --rank-samples 40 24 --strategy simple_ddp",
    "reviews": "--recipe tiny-llama --steps 2 --evaluate",
    "frozen layers": f"{MLP} --freeze fc0 fc2 --lr-warmup-steps 2",
    # Checkpoints.
    "resumed": [f"{SAVED} --steps 3 --save saved", "--resume saved --steps 6"],
    "resumed by one rank": [f"{SAVED} --steps 3 --strategy sharded3 --save saved", "--resume saved --steps 6 --nproc 1 --strategy single"],
    "checkpoint of an earlier build": "--resume bench/checkpoint/step-000000003 --steps 6",
}
THREADS = (1, 2, 3, 4)
# The name in the book of the ends of each level.
LEVELS = {"portable": "portable", "avx2": "fma", "avx512": "fma", "avx512-bf16": "avx512-bf16", "amx": "amx"}
IN_BF16 = [name for name, flags in RUNS.items() if BF16 in flags]
# Portable code fuses its products on Arm.
OTHER = "" if platform.machine() == "x86_64" else f" on {platform.machine()}"


def levels_here(binary: Path) -> list[str]:
    """What the program says that this machine has."""
    asked = subprocess.run([binary, "train"], env={"PACELINE_SIMD": "?"}, capture_output=True, text=True)
    said = re.search(r"this machine has (.*); name one", asked.stderr)
    if said is None:
        raise RunFailed(f"{binary.name} cannot be held to a level of instructions")
    return [level for level in LEVELS if level in said[1].split(", ")]


def runs_at(level: str) -> list[str]:
    return list(RUNS) if LEVELS[level] in ("portable", "fma") else IN_BF16


def ended(binary: Path, old: Path, name: str, level: str, threads: int) -> str:
    """The digest of the weights and the losses with which a run ends."""
    parts = RUNS[name]
    lines = parts if isinstance(parts, list) else [parts]
    os.environ["PACELINE_SIMD"] = level
    with tempfile.TemporaryDirectory(prefix="digests_") as folder:
        for at, line in enumerate(lines):
            words = [str(ROOT / word) if word.startswith("bench/") else word for word in line.split()]
            build = old if at + 1 < len(lines) else binary
            found = train(build, shlex.join([*words, "--threads", str(threads), "--warmup-steps", "0"]), Path(folder))
    losses = [found["train_loss"], found["eval_loss"]]
    return " ".join([found["weights_sha256"][:16], *(f"{loss:.6g}" for loss in losses if loss is not None)])


def compared(binary: Path, old: Path, book: Record, level: str) -> list[list[str]]:
    """Makes the runs of a level. Adds those that the book lacks, and returns a row for each that ends otherwise."""
    entry = book["levels"].setdefault(LEVELS[level] + OTHER, {**provenance(), "levels": [], "ends": {}})
    rows, known = [], entry["ends"]
    for name in runs_at(level):
        for threads in THREADS:
            try:
                found = ended(binary, old, name, level, threads)
            except RunFailed as error:
                found = f"failed: {error}"
            if not found.startswith("failed"):
                known.setdefault(name, found)
            if known.get(name) != found:
                rows.append([name, level, str(threads), known.get(name, "nothing"), found])
    entry["levels"] = sorted({*entry["levels"], level})
    return rows


def read(file: Path) -> Record:
    """The book, or an empty one. Ends the script if its runs are others than ours."""
    book: Record = json.loads(file.read_text()) if file.is_file() else {"runs": {}, "owed": [], "levels": {}}
    changed = [name for name, flags in book["runs"].items() if RUNS.get(name) != flags]
    if changed:
        raise RunFailed(f"{file.name} has other flags for {', '.join(changed)}; give a changed run another name, or delete the file")
    book["runs"] = RUNS
    return book


def main() -> int:
    parser = arguments_for(__doc__, "book.json", rounds=0)
    parser.add_argument("--check", action="store_true", help="only compare with the book, and write nothing")
    parser.add_argument("--old", type=Path, metavar="PATH", help="an earlier build, which saves what the resumed runs go on from")
    arguments = parsed(parser)
    binary = arguments.paceline
    if arguments.check and not arguments.out.is_file():
        parser.error(f"--check: there is no {arguments.out}")
    old = program(parser, "--old", arguments.old) if arguments.old else binary
    try:
        here, book = levels_here(binary), read(arguments.out)
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = []
    for level in here:
        if arguments.check and LEVELS[level] + OTHER not in book["levels"]:
            print(f"{level}: left out, the book lacks it")
            continue
        rows += compared(binary, old, book, level)
        print(f"{level}: {len(runs_at(level))} runs, each with {THREADS[0]} to {THREADS[-1]} threads", flush=True)
    book["owed"] = [level for level in LEVELS if not any(level in of["levels"] for of in book["levels"].values())]
    if rows:
        print(aligned([["run", "level", "threads", "in the book", "found"], *rows], left={0, 1, 3, 4}))
    print(f"{len(rows)} ends differ; owed to a machine that has it: {', '.join(book['owed']) or 'nothing'}")
    if not arguments.check:
        write(arguments.out, book)
    return int(bool(rows))


if __name__ == "__main__":
    sys.exit(main())
