"""Compares the CNN step of one rank, through layers and storage, with a bare program of the same step.

    cargo build --release
    python3 bench/one_rank.py --probe 'PATH/TO/PROBE ARGUMENTS'

The probe is any program that computes the same step (batch 64, convolutions of 32, 64, 128 channels on
28 x 28, hidden 512, SGD) without layers, storage or measurement, and prints `step <milliseconds>`, the
median over its run. The ratio is the cost of the structure around the arithmetic.

Both sides are pinned to one core and launched in turn, because a program's time varies from launch to
launch. Prints the ratios and writes every launch to `results/one_rank.json`. Only the standard library
is needed.
"""
import argparse
import datetime
import json
import re
import shlex
import statistics
import subprocess
import tempfile
from pathlib import Path

from common import machine

ROOT = Path(__file__).resolve().parent.parent
BAR = 1.05


def ours(binary: Path, core: int) -> float:
    with tempfile.TemporaryDirectory(prefix="one_rank_") as folder:
        flags = "train --nproc 1 --epochs 1 --momentum 0 --quiet --json step.json"
        command = ["taskset", "-c", str(core), str(binary), *shlex.split(flags)]
        subprocess.run(command, cwd=folder, check=True)
        return json.loads(Path(folder, "step.json").read_text())["step_ms_median"]


def probe(command: str, core: int) -> float:
    line = subprocess.run(
        ["taskset", "-c", str(core), *shlex.split(command)], check=True, capture_output=True, text=True
    ).stdout
    return float(re.search(r"\bstep\s+([0-9.]+)", line).group(1))


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of paceline against a bare program.")
    parser.add_argument("--paceline", type=Path, default=ROOT / "target/release/paceline", metavar="PATH")
    parser.add_argument("--probe", required=True, metavar="COMMAND")
    parser.add_argument("--launches", type=int, default=9, help="launches of each side (default: 9)")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "results/one_rank.json", metavar="FILE")
    arguments = parser.parse_args()

    launches = []
    for _ in range(arguments.launches):
        pair = {
            "ours_ms": ours(arguments.paceline.resolve(), arguments.core),
            "probe_ms": probe(arguments.probe, arguments.core),
        }
        pair["ratio"] = pair["ours_ms"] / pair["probe_ms"]
        launches.append(pair)
        print(f"ours {pair['ours_ms']:.2f} ms, probe {pair['probe_ms']:.2f} ms, ratio {pair['ratio']:.3f}", flush=True)

    ratio = statistics.median(pair["ratio"] for pair in launches)
    verdict = "MET" if ratio <= BAR else "MISSED"
    print(f"median ratio {ratio:.3f}, bar {BAR}: {verdict}")
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "probe": " ".join([Path(shlex.split(arguments.probe)[0]).name, *shlex.split(arguments.probe)[1:]]),
        "launches": launches,
        "median_ratio": ratio,
        "bar": BAR,
        "verdict": verdict,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
