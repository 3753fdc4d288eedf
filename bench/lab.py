"""Makes all experiments of `paceline lab` with their defaults.

    cargo build --release
    python3 bench/lab.py                                    # about 40 minutes
    python3 bench/lab.py --experiments grad-accum

Prints what they say, and writes all rows and tables to `results/lab.json`; experiments that are not asked for stay as they are there. The exit
code is 1 if one could not be run.
"""
import json
import sys
import tempfile
from pathlib import Path

from common import Record, RunFailed, arguments_for, parsed, provenance, run, write

EXPERIMENTS = [
    "async-copy", "memory-layout", "precision-fusion", "parallelism", "grad-accum", "profiling", "buckets",
    "combine --grid precision=f32,bf16 fuse=true,false layout=nhwc,nchw",
]
LIMIT_S = 1800


def experiment(binary: Path, words: str) -> Record:
    """The rows and tables of an experiment, and what it printed."""
    with tempfile.TemporaryDirectory(prefix="lab_") as folder:
        printed = run([binary, "lab", *words.split(), "--output", "out"], Path(folder), LIMIT_S)
        print(printed, flush=True)
        out = Path(folder) / "out"
        # All variants are in the rows already.
        tables = json.loads((out / "report.json").read_text())["tables"]
        return {
            **provenance(),
            "lab": json.loads((out / "lab.json").read_text()),
            "tables": {name: table for name, table in tables.items() if name != "variants"},
            "printed": printed.splitlines(),
        }


def main() -> int:
    names = [words.split()[0] for words in EXPERIMENTS]
    parser = arguments_for(__doc__, "lab.json", rounds=0)
    parser.add_argument("--experiments", nargs="+", choices=names, default=names, metavar="NAME", help="only these")
    args = parsed(parser)
    results = json.loads(args.out.read_text()) if args.out.is_file() else {}
    try:
        for words, name in zip(EXPERIMENTS, names):
            if name in args.experiments:
                results.setdefault("experiments", {})[name] = experiment(args.paceline, words)
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        write(args.out, {**results, **provenance()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
