"""Whether a small language model learns a text as well here as in PyTorch: the same first weights, text, optimizer and steps.

    cargo build --release
    python3 bench/perplexity.py --peer .peer/bin/python           # about ten minutes

For each seed, `transformers` makes the first weights of the recipe `tiny-lm`. Both train on our own pages, and `transformers` computes the
perplexity per byte of both results on the last pages, which neither has seen. Part `same`: the text is one batch of 128 sequences, which every
step sees whole, so nothing but the programs differs. Part `own`: all pages but the last, where each program goes through the sequences in an
order of its own, which makes perplexities of single runs differ by several percent.

Prints a table for each part, and writes `results/perplexity.json` with date, machine and commit. The exit code is 1 if the mean over the
seeds of part `same` differs by more than 2 %, or if a run failed.
"""
import argparse
import json
import math
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

from common import ROOT, Record, RunFailed, aligned, program, provenance, run, shown

PEER = ROOT / "bench/peer/perplexity.py"
RUN_SECONDS = 1800
GOAL = 0.02
TEST_BYTES = 65_536
SEQ_LEN = 128
# Steps, and sequences of a step.
PARTS = {"same": (60, 128), "own": (400, 8)}
# The recipe without the sizes of its model, which the folder of the first weights states.
TRAINED = (
    "--model llama --data text --tokenizer bytes --data-dir texts --seq-len 128 --nproc 2 --optimizer adamw"
    " --lr 0.002 --lr-schedule cosine --beta2 0.95 --weight-decay 0.1 --decay-matrices-only --clip-grad-norm 1.0"
)


def write_text(folder: Path, part: str) -> None:
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md"))).encode()
    folder.mkdir()
    length = SEQ_LEN * PARTS[part][1] + 1 if part == "same" else len(text) - TEST_BYTES
    (folder / "train.txt").write_bytes(text[:length].decode(errors="replace").encode("ascii", "replace"))
    (folder / "test.txt").write_text(text[-TEST_BYTES:].decode(errors="ignore"))


def measure(arguments: argparse.Namespace, folder: Path, part: str, seed: int) -> Record:
    count, batch = PARTS[part]

    def peer(what: str, *flags: str | Path) -> str:
        return run([arguments.peer, PEER, what, *flags], folder, RUN_SECONDS)

    def perplexity(model: str) -> float:
        return json.loads(peer("evaluate", "--model", model, "--text", "texts/test.txt").strip().splitlines()[-1])["perplexity"]

    first, steps = f"first_{seed}", str(count)
    peer("make", "--to", first, "--seed", str(seed))
    train = f"train --pretrained {first} {TRAINED} --global-batch-size {batch} --steps {steps} --seed {seed} --save ours_{seed} --quiet"
    run([arguments.paceline, *shlex.split(train)], folder, RUN_SECONDS)
    export = f"checkpoint export ours_{seed} --hugging-face --to exported_{seed}"
    run([arguments.paceline, *shlex.split(export)], folder, RUN_SECONDS)
    peer("train", "--model", first, "--text", "texts/train.txt", "--steps", steps, "--batch", str(batch), "--seed", str(seed), "--to",
         f"theirs_{seed}")
    return {"seed": seed, "first": perplexity(first), "ours": perplexity(f"exported_{seed}"), "theirs": perplexity(f"theirs_{seed}")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paceline", type=Path, default=ROOT / "target/release/paceline", metavar="PATH")
    parser.add_argument("--peer", type=Path, default=ROOT / ".peer/bin/python", metavar="PATH", help="a Python with torch and transformers")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="SEED")
    parser.add_argument("--out", type=Path, default=ROOT / "results/perplexity.json", metavar="FILE")
    arguments = parser.parse_args()
    arguments.paceline = program(parser, "--paceline", arguments.paceline)
    arguments.peer = program(parser, "--peer", arguments.peer)
    results = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    for part in arguments.parts:
        try:
            with tempfile.TemporaryDirectory() as folder:
                write_text(Path(folder) / "texts", part)
                runs = [measure(arguments, Path(folder), part, seed) for seed in arguments.seeds]
        except RunFailed as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
        off = math.exp(statistics.mean(math.log(of["ours"] / of["theirs"]) for of in runs)) - 1
        rows = [[str(of["seed"]), *(f"{of[key]:.3f}" for key in ("first", "ours", "theirs"))] for of in runs]
        print(aligned([["seed", "first", "ours", "theirs"], *rows], left={0}))
        print(f"part {part}, ours over theirs, geometric mean: {100 * off:+.2f} %\n")
        results[part] = provenance() | {"runs": runs, "off": off}
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {shown(arguments.out)}", file=sys.stderr)
    return 0 if abs(results.get("same", {}).get("off", 0.0)) <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
