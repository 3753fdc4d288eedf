"""Whether `paceline tokenizer train` makes the tokenizer that the package `tokenizers` makes, and whether texts have the same tokens by it.

    cargo build --release
    python3 bench/tokens.py --peer .peer/bin/python          # seconds

On our own pages, and on bytes of all kinds, with several sizes of the vocabulary: both train, and their vocabularies and merges are
compared. Then the text is tokenized by both, with our tokenizer: what `paceline train` has kept in its cache of tokens is compared,
token by token, with what the package makes of the same text.

Prints one table, and writes `results/tokens.json`. The exit code is 1 if anything differs or a run failed.
"""
import argparse
import array
import json
import struct
import sys
import tempfile
from pathlib import Path

from common import ROOT, Record, RunFailed, aligned, program, provenance, run, shown

PEER = ROOT / "bench/peer/tokens.py"
RUN_SECONDS = 600
MAGIC = b"PLTOKEN1"
TRAIN = (
    "train --model llama --layers 1 --width 16 --heads 2 --intermediate 16 --data text --seq-len 16 --nproc 1 --batch-size 1 --steps 1"
    " --warmup-steps 0 --quiet --data-dir texts --tokenizer tokenizer.json --token-cache cache"
)


def texts() -> dict[str, str]:
    pages = "\n".join(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md")))
    code = "\n".join(page.read_text() for page in sorted((ROOT / "bench").glob("*.py")))
    odd = "".join(chr(at) for at in range(1, 0x3000) if not 0xD800 <= at < 0xE000) * 3 + "  \t\n\r\n \u00a0 \U0001f600\u200d\U0001f680 don't I'LL 3.14 a" * 40
    return {"pages": pages, "code": code, "odd": odd}


def kept(cache: Path) -> list[int]:
    """The tokens of the only file of a cache, whose layout crates/data/src/text/cache.rs describes."""
    (file,) = cache.glob("*.tokens")
    data = file.read_bytes()
    if not data.startswith(MAGIC):
        raise RunFailed(f"{file.name} is no cache of tokens")
    rows, tokens = struct.unpack_from("<QQ", data, len(MAGIC) + 32)
    begin = len(MAGIC) + 32 + 16 + 16 * rows
    return array.array("I", data[begin : begin + 4 * tokens]).tolist()


def measure(arguments: argparse.Namespace, folder: Path, name: str, text: str, vocab: int) -> Record:
    (folder / "texts").mkdir(parents=True)
    (folder / "texts/text.txt").write_bytes(text.encode())
    run([arguments.paceline, "tokenizer", "train", "--data-dir", "texts", "--vocab", str(vocab), "--to", "tokenizer.json"], folder, RUN_SECONDS)
    ours = json.loads((folder / "tokenizer.json").read_text())["model"]
    run([arguments.paceline, *TRAIN.split(), "--vocab", str(len(ours["vocab"]))], folder, RUN_SECONDS)
    peer = [arguments.peer, PEER, "--text", "texts/text.txt", "--vocab", str(vocab), "--tokenizer", "tokenizer.json", "--to", "own.json", "--ids", "ids.bin"]
    run(peer, folder, RUN_SECONDS)
    theirs = json.loads((folder / "own.json").read_text())["model"]
    ids = array.array("I", (folder / "ids.bin").read_bytes()).tolist()
    own = kept(folder / "cache")
    differ = sum(a != b for a, b in zip(own, ids)) + abs(len(own) - len(ids))
    merges = [[tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in of["merges"]] for of in (ours, theirs)]
    same = ours["vocab"] == theirs["vocab"] and merges[0] == merges[1]
    return {"text": name, "bytes": len(text.encode()), "vocab": len(ours["vocab"]), "same_tokenizer": same, "tokens": len(ids), "differ": differ}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paceline", type=Path, default=ROOT / "target/release/paceline", metavar="PATH")
    parser.add_argument("--peer", type=Path, default=ROOT / ".peer/bin/python", metavar="PATH", help="a Python with tokenizers")
    parser.add_argument("--out", type=Path, default=ROOT / "results/tokens.json", metavar="FILE")
    arguments = parser.parse_args()
    arguments.paceline = program(parser, "--paceline", arguments.paceline)
    arguments.peer = program(parser, "--peer", arguments.peer)
    results = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in texts().items():
                for vocab in (300, 1000, 8000):
                    results.append(measure(arguments, Path(folder) / f"{name}_{vocab}", name, text, vocab))
    except RunFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    rows = [[of["text"], str(of["bytes"]), str(of["vocab"]), "yes" if of["same_tokenizer"] else "NO", str(of["tokens"]), str(of["differ"])] for of in results]
    print(aligned([["text", "bytes", "vocabulary", "same tokenizer", "tokens", "differ"], *rows], left={0}))
    arguments.out.write_text(json.dumps(provenance() | {"results": results}, indent=1) + "\n")
    print(f"wrote {shown(arguments.out)}", file=sys.stderr)
    return 0 if all(of["same_tokenizer"] and of["differ"] == 0 for of in results) else 1


if __name__ == "__main__":
    sys.exit(main())
