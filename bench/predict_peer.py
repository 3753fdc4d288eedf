"""PyTorch's steps on slow links: as `paceline predict --trace` predicts them, and with the buckets that `paceline lab buckets --trace` advises.

    cargo build --release
    python3 bench/predict_peer.py                       # about fifteen minutes, as root
    python3 bench/predict_peer.py --parts buckets

Two ranks of DistributedDataParallel over Gloo send through the same loopback, which `tc` limits in a network namespace, so each has half of its rate.

`predict`: from traces of a run on a fast loopback, and the time of a step without the profiler, the step is predicted on three slower ones, and
measured there. A value is the predicted step over the measured one.

`buckets`: from traces of a run on a slow loopback the bucket_cap_mb is advised; steps with it and without it alternate. Promise and gain.

Prints tables and writes `results/predict_peer.json` with date, machine and commit. Exits with 1 if something could not be run.
"""
import json
import re
import statistics
import sys
import tempfile
from pathlib import Path

from common import ROOT, RUN_SECONDS, Record, RunFailed, aligned, arguments_for, behind_link, last_json, parsed, provenance, ranged, run, write

MLP, SMALL_MLP = (f"--model mlp --features {' '.join([str(width)] * count)} --batch-size 512" for width, count in ((1024, 5), (512, 9)))
MODELS = {"mlp 4 x 1024": MLP, "mlp 8 x 512": SMALL_MLP, "llama 7.4 M": "--model llama"}
# Of the loopback, in Mbit/s: communication hides, about half of it hides, most of it is waited for.
RATES = (8000, 2000, 500)
# What to train, and how fast the loopback is.
BUCKET_CASES = {
    "mlp 4 x 1024, 2 Gbit/s": (MLP, "2gbit"),
    "mlp 4 x 1024, 500 Mbit/s": (MLP, "500mbit"),
    "mlp 8 x 512, 2 Gbit/s": (SMALL_MLP, "2gbit"),
    "llama 7.4 M, 1 Gbit/s": ("--model llama", "1gbit"),
    "cnn, 1 Gbit/s": ("--model cnn", "1gbit"),
}


class Bench:
    """The programs, and how long each of PyTorch's runs takes."""

    def __init__(self, binary: Path, python: Path, seconds: float) -> None:
        self.binary, self.python, self.seconds = binary, python, seconds

    def step_ms(self, flags: str, rate: str | None) -> float:
        """PyTorch's step on a loopback of this rate, or of no limit."""
        command = f"{self.python} {ROOT}/bench/peer/step.py --ranks 2 --seconds {self.seconds:g} {flags}"
        return last_json(behind_link(command, rate))["step_ms"]

    def predicted(self, flags: str) -> list[Record]:
        with tempfile.TemporaryDirectory(prefix="predict_peer_") as folder:
            self.step_ms(f"{flags} --profile {folder}/traces", None)
            links = [f"{rate / 2e3:g}gbit,50us" for rate in RATES]
            # What recording costs is taken away.
            step_ms = str(self.step_ms(flags, None))
            command = ["predict", "--trace", "traces", "--step-ms", step_ms, "--nproc", "2", "--links", *links, "--json", "out.json"]
            run([self.binary, *command], Path(folder), RUN_SECONDS)
            rows = json.loads((Path(folder) / "out.json").read_text())["rows"]
        return [{"predicted_ms": row["step_ms"], "measured_ms": self.step_ms(flags, f"{rate}mbit")} for rate, row in zip(RATES, rows)]

    def advised(self, flags: str, rate: str, rounds: int) -> Record:
        with tempfile.TemporaryDirectory(prefix="predict_peer_") as folder:
            self.step_ms(f"{flags} --profile {folder}/traces", rate)
            printed = run([self.binary, "lab", "buckets", "--trace", "traces", "--output", "out"], Path(folder), RUN_SECONDS)
        advice = re.search(r"Set bucket_cap_mb=([0-9.]+): ([0-9.]+) ms less", printed)
        found: Record = {"flags": flags, "rate": rate, "printed": printed.splitlines()}
        if advice is None:
            return found
        pairs = [(self.step_ms(flags, rate), self.step_ms(f"{flags} --bucket-cap-mb {advice[1]}", rate)) for _ in range(rounds)]
        return found | {"bucket_cap_mb": advice[1], "promise_ms": float(advice[2]), "pairs_ms": pairs}


def predict(bench: Bench, rounds: int) -> list[Record]:
    results, rows = [], [["model", "Gbit/s per rank", "predicted ms", "measured ms", "predicted over measured"]]
    for model, flags in MODELS.items():
        made = [bench.predicted(flags) for _ in range(rounds)]
        for at, rate in enumerate(RATES):
            of = [one[at] for one in made]
            results.append({"model": model, "rate_mbit": rate, "rounds": of})
            medians = [f"{statistics.median(one[key] for one in of):.1f}" for key in ("predicted_ms", "measured_ms")]
            rows.append([model, f"{rate / 2e3:g}", *medians, ranged([one["predicted_ms"] / one["measured_ms"] for one in of], 3)])
    print(aligned(rows, left={0}))
    return results


def buckets(bench: Bench, rounds: int) -> list[Record]:
    results, rows = [], [["case", "advice", "promise ms", "gain ms"]]
    for name, (flags, rate) in BUCKET_CASES.items():
        found = bench.advised(flags, rate, rounds)
        results.append({"case": name, **found})
        has_advice = "pairs_ms" in found
        gains = ranged([before - after for before, after in found["pairs_ms"]], 1) if has_advice else ""
        rows.append([name, f"bucket_cap_mb={found['bucket_cap_mb']}" if has_advice else "leave it", str(found.get("promise_ms", "")), gains])
    print(aligned(rows, left={0, 1}))
    return results


PARTS = {"predict": predict, "buckets": buckets}


def main() -> int:
    parser = arguments_for(__doc__, "predict_peer.json", rounds=3, has_peer=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: both)")
    parser.add_argument("--seconds", type=float, default=4, help="of each of PyTorch's runs (default: 4)")
    arguments = parsed(parser)
    bench = Bench(arguments.paceline, arguments.peer_python, arguments.seconds)
    try:
        found = {part: PARTS[part](bench, arguments.rounds) for part in arguments.parts}
    except RunFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    write(arguments.out, provenance() | found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
