"""Measures how well `paceline predict --trace` predicts PyTorch's steps on links that its traced run did not have.

    cargo build --release
    python3 bench/predict_peer.py --peer .peer/bin/python        # as root: it needs a network of its own; about ten minutes

Two ranks of PyTorch train with DistributedDataParallel over Gloo on an unlimited loopback, and trace their steps. From these traces, and the
time of a step without the profiler, the step is predicted on slower links. Then PyTorch itself trains on a loopback that `tc` limits to that rate. Both ranks send through
the same loopback, so each has half of its rate. Everything is repeated in every round; a value is the predicted step over the measured one, and
the median over the rounds is compared with the bar.

Prints a table and writes `results/predict_peer.json` with date, machine and commit. Exits with 0 if everything was measured, whether or not the
bar was met, and with 1 otherwise.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, Record, RunFailed, aligned, program, provenance, run, shown
from lab import on_link

BAR = 0.15
RUN_SECONDS = 600
MODELS = {
    "mlp 4 x 1024": "--model mlp --features 1024 1024 1024 1024 1024 --batch-size 512",
    "mlp 8 x 512": "--model mlp --features 512 512 512 512 512 512 512 512 512 --batch-size 512",
    "llama 7.4 M": "--model llama",
}
# Of the loopback, in Mbit/s: communication hides, about half of it hides, most of it is waited for.
RATES = (8000, 2000, 500)


def make_round(binary: Path, python: Path, flags: str, seconds: float) -> list[Record]:
    with tempfile.TemporaryDirectory(prefix="predict_peer_") as folder:
        on_link(python, f"{flags} --profile {folder}/traces", None, seconds)
        links = [f"{rate / 2e3:g}gbit,50us" for rate in RATES]
        # What recording costs is taken away.
        step_ms = on_link(python, flags, None, seconds)["step_ms"]
        command = ["predict", "--trace", "traces", "--step-ms", str(step_ms), "--nproc", "2", "--links", *links, "--json", "out.json"]
        run([binary, *command], Path(folder), RUN_SECONDS)
        rows = json.loads((Path(folder) / "out.json").read_text())["rows"]
    return [
        {"rate_mbit": rate, "predicted_ms": row["step_ms"], "measured_ms": on_link(python, flags, f"{rate}mbit", seconds)["step_ms"]}
        for rate, row in zip(RATES, rows)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paceline", type=Path, default=ROOT / "target/release/paceline", metavar="PATH")
    parser.add_argument("--peer", type=Path, default=ROOT / ".peer/bin/python", metavar="PATH", help="a Python with torch")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--seconds", type=float, default=4, help="of each run (default: 4)")
    parser.add_argument("--out", type=Path, default=ROOT / "results/predict_peer.json", metavar="FILE")
    arguments = parser.parse_args()
    binary = program(parser, "--paceline", arguments.paceline)
    python = program(parser, "--peer", arguments.peer)
    results, rows = [], [["model", "Gbit/s per rank", "predicted ms", "measured ms", "ratio", "range", "within 15 %"]]
    try:
        for model, flags in MODELS.items():
            rounds = [make_round(binary, python, flags, arguments.seconds) for _ in range(arguments.rounds)]
            for at, rate in enumerate(RATES):
                ratios = [one[at]["predicted_ms"] / one[at]["measured_ms"] for one in rounds]
                medians = [statistics.median(one[at][key] for one in rounds) for key in ("predicted_ms", "measured_ms")]
                ratio = statistics.median(ratios)
                met = abs(ratio - 1) <= BAR
                results.append({"model": model, "rate_mbit": rate, "rounds": [one[at] for one in rounds], "ratio": ratio, "met": met})
                rows.append([model, f"{rate / 2e3:g}", *(f"{value:.1f}" for value in medians), f"{ratio:.3f}",
                             f"{min(ratios):.3f} to {max(ratios):.3f}", "yes" if met else "NO"])
            print(f"measured {model}", file=sys.stderr, flush=True)
    except (RunFailed, subprocess.SubprocessError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    print(aligned(rows, left={0}))
    arguments.out.write_text(json.dumps(provenance() | {"bar": BAR, "results": results}, indent=1) + "\n")
    print(f"wrote {shown(Path(os.path.abspath(arguments.out)))}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
