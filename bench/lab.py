"""Makes all experiments of `paceline lab`, and puts the CNN's layouts and types beside PyTorch's.

    cargo build --release
    python3 bench/lab.py                                    # about 40 minutes
    python3 bench/lab.py --parts experiments --experiments grad-accum
    python3 bench/lab.py --parts peer --peer-python .peer/bin/python

experiments  each experiment with its defaults, as `paceline lab NAME` makes it
buckets      steps of PyTorch's DistributedDataParallel on two ranks and a slow loopback (a network namespace, so root), with the
             bucket_cap_mb that `paceline lab buckets --trace` advises from a trace, in turns with the default: promise and gain
peer         the CNN's step in both layouts and in f32 and bf16, on one rank of one thread, in turns with PyTorch's: contiguous and
             channels_last, f32 and autocast

Prints what the experiments say and a table of the peer, and writes all rows and tables to `results/lab.json`; parts that are not
asked for stay as they are there. The exit code is 1 if something could not be run.
"""
import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, Record, RunFailed, aligned, program, provenance, run

EXPERIMENTS = [
    "async-copy", "memory-layout", "precision-fusion", "parallelism", "grad-accum", "profiling", "buckets",
    "combine --grid precision=f32,bf16 fuse=true,false layout=nhwc,nchw",
]
PEER = Path(__file__).resolve().with_name("peer") / "step.py"
CNNS = {"cnn": "--model cnn", "cnn32": "--model cnn --channels 16 32 --hidden 64 --image 32 32 3"}
LIMIT_S = 1800


def experiment(binary: Path, words: str) -> Record:
    """The rows and tables of an experiment, and what it printed."""
    with tempfile.TemporaryDirectory(prefix="lab_") as folder:
        printed = run([binary, "lab", *words.split(), "--output", "out"], Path(folder), timeout_s=LIMIT_S)
        out = Path(folder) / "out"
        # All variants are in the rows already.
        tables = json.loads((out / "report.json").read_text())["tables"]
        return {
            **provenance(),
            "lab": json.loads((out / "lab.json").read_text()),
            "tables": {name: table for name, table in tables.items() if name != "variants"},
            "printed": printed.splitlines(),
        }


def experiments(binary: Path, names: list[str]) -> dict[str, Record]:
    found = {}
    for words in EXPERIMENTS:
        name = words.split()[0]
        if names and name not in names:
            continue
        found[name] = experiment(binary, words)
        print("\n".join(found[name]["printed"]), end="\n\n", flush=True)
    return found


def ours(binary: Path, flags: str, layout: str, precision: str, seconds: float, step_ms: float) -> float:
    steps = max(10, int(1000 * seconds / step_ms))
    words = f"train {flags} --nproc 1 --layout {layout} --precision {precision} --steps {steps} --warmup-steps 5 --quiet --json s.json"
    with tempfile.TemporaryDirectory(prefix="lab_") as folder:
        run(["taskset", "-c", "0", binary, *words.split()], Path(folder), timeout_s=LIMIT_S)
        return json.loads((Path(folder) / "s.json").read_text())["step_ms_median"]


def theirs(python: Path, model: str, layout: str, precision: str, seconds: float) -> Record:
    flags = ["--model", model, "--ranks", "1", "--seconds", str(seconds)]
    flags += ["--channels-last" if layout == "nhwc" else "--no-channels-last"]
    flags += ["--amp", "bf16" if precision == "bf16" else "off"]
    printed = run(["taskset", "-c", "0", python, PEER, *flags], ROOT, timeout_s=LIMIT_S)
    return json.loads(printed.strip().splitlines()[-1])


def peer(binary: Path, python: Path, rounds: int, seconds: float, precisions: list[str]) -> Record:
    cases = list(itertools.product(CNNS, ("nhwc", "nchw"), precisions))
    steps: dict[str, dict[str, list[float]]] = {" ".join(case): {"ours": [], "theirs": []} for case in cases}
    torch = ""
    for _ in range(rounds):
        for case in cases:
            model, layout, precision = case
            of = steps[" ".join(case)]
            record = theirs(python, model, layout, precision, seconds)
            torch = record["torch"]
            of["theirs"].append(record["step_ms"])
            of["ours"].append(ours(binary, CNNS[model], layout, precision, seconds, record["step_ms"] / 2))
    rows = [["model, layout, type", "ours ms", "PyTorch ms", "ratio", "least", "most"]]
    for name, of in steps.items():
        ratios = [their / our for our, their in zip(of["ours"], of["theirs"])]
        medians = [statistics.median(of["ours"]), statistics.median(of["theirs"]), statistics.median(ratios)]
        rows.append([name, *(f"{value:.2f}" for value in (*medians, min(ratios), max(ratios)))])
    print(aligned(rows, left={0}))
    return {**provenance(), "torch": torch, "rounds": rounds, "step_ms": steps}


# What to train, and how fast the loopback is. Both ranks share it.
BUCKET_CASES = {
    "mlp 4 x 1024, 2 Gbit/s": ("--model mlp --features 1024 1024 1024 1024 1024 --batch-size 512", "2gbit"),
    "mlp 4 x 1024, 500 Mbit/s": ("--model mlp --features 1024 1024 1024 1024 1024 --batch-size 512", "500mbit"),
    "mlp 8 x 512, 2 Gbit/s": ("--model mlp --features 512 512 512 512 512 512 512 512 512 --batch-size 512", "2gbit"),
    "llama 7.4 M, 1 Gbit/s": ("--model llama", "1gbit"),
    "cnn, 1 Gbit/s": ("--model cnn", "1gbit"),
}


def on_link(python: Path, flags: str, rate: str | None, seconds: float) -> Record:
    """PyTorch's step in a network of its own whose loopback has this rate, or no limit."""
    limit = f" && tc qdisc add dev lo root tbf rate {rate} burst 256kb latency 400ms" if rate else ""
    link = f"ip link set lo up{limit}"
    command = f"{link} && exec {python} {PEER} --ranks 2 --seconds {seconds} {flags}"
    printed = run(["unshare", "--net", "sh", "-c", command], ROOT, timeout_s=LIMIT_S)
    return json.loads(printed.strip().splitlines()[-1])


def torch_buckets(binary: Path, python: Path, rounds: int, seconds: float) -> Record:
    found: Record = {"made": provenance()}
    rows = [["case", "advice", "promise ms", "gain ms", "least", "most", "gain / promise"]]
    for name, (flags, rate) in BUCKET_CASES.items():
        with tempfile.TemporaryDirectory(prefix="lab_") as folder:
            on_link(python, f"{flags} --profile {folder}/traces", rate, seconds)
            printed = run([binary, "lab", "buckets", "--trace", "traces", "--output", "out"], Path(folder), timeout_s=LIMIT_S)
            table = json.loads((Path(folder) / "out" / "buckets-of-trace.json").read_text())["tables"]
        advice = re.search(r"Set bucket_cap_mb=([0-9.]+): ([0-9.]+) ms less", printed)
        steps: dict[str, list[float]] = {"default": [], "advised": []}
        for _ in range(rounds if advice else 0):
            steps["default"].append(on_link(python, flags, rate, seconds)["step_ms"])
            advised = f"{flags} --bucket-cap-mb {advice[1]}"
            steps["advised"].append(on_link(python, advised, rate, seconds)["step_ms"])
        found[name] = {"flags": flags, "rate": rate, "printed": printed.splitlines(), "tables": table, "step_ms": steps}
        gains = [before - after for before, after in zip(*steps.values())]
        if advice:
            gain, promise = statistics.median(gains), float(advice[2])
            figures = [f"{value:.1f}" for value in (promise, gain, min(gains), max(gains))]
            rows.append([name, f"bucket_cap_mb={advice[1]}", *figures, f"{gain / promise:.2f}"])
        else:
            rows.append([name, "leave it", "", "", "", "", ""])
        print(aligned(rows, left={0, 1}), end="\n\n", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Make all experiments of the lab, and put layouts and types beside PyTorch's.")
    parser.add_argument("--binary", type=Path, default=Path("target/release/paceline"), metavar="PATH")
    parser.add_argument("--out", type=Path, default=Path("results/lab.json"), metavar="FILE")
    parser.add_argument("--parts", nargs="+", choices=["experiments", "buckets", "peer"], default=["experiments", "peer"])
    parser.add_argument("--experiments", nargs="+", default=[], metavar="NAME", help="only these")
    parser.add_argument("--peer-python", type=Path, default=Path(".peer/bin/python"), metavar="PATH")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of the peer (default: 5)")
    parser.add_argument("--seconds", type=float, default=2, help="of the peer's runs (default: 2)")
    parser.add_argument("--precisions", nargs="+", choices=["f32", "bf16"], default=["f32", "bf16"], help="of the peer (default: both)")
    args = parser.parse_args()
    binary = program(parser, "--binary", args.binary)
    results = json.loads(args.out.read_text()) if args.out.is_file() else {}
    try:
        if "experiments" in args.parts:
            made = experiments(binary, args.experiments)
            results["experiments"] = {**results.get("experiments", {}), **made}
        python = Path(os.path.abspath(args.peer_python))
        if "buckets" in args.parts:
            results["torch_buckets"] = torch_buckets(binary, python, args.rounds, args.seconds)
        if "peer" in args.parts:
            results["peer"] = peer(binary, python, args.rounds, args.seconds, args.precisions)
    except (RunFailed, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        args.out.write_text(json.dumps({**results, **provenance()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
