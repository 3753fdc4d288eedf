"""Compares matrix products with PyTorch's and with the processor's peak, on one thread.

    cargo build --release -p paceline-kernels --example products
    python3 bench/products.py                   # needs the peer: see bench/README.md

The sizes (m x n x k) are those of language models, in all three orientations that a layer needs. In every round the example runs, and
then PyTorch; both use AMX where the processor has it. A figure is the best of all rounds: what others do on the machine makes a
product slower, and never faster. The peak is that of a loop of f32 fused multiply-adds in registers, measured within our runs.
`bf16` is what a layer computes: operands in bf16, sums in f32, rounded once. Its peak is the higher one of f32 and of the instructions for
bf16 that we use.

Writes `results/products.json`. Exits with 1 if something could not be run. Only the standard library is needed.
"""
import argparse
import json
import re
from pathlib import Path

from common import ROOT, Record, aligned, program, provenance, run

PEER_SCRIPT = Path(__file__).resolve().with_name("peer") / "products.py"
ROW = re.compile(r"^(\d+x\d+x\d+) (a b|a b\^T|a\^T b) +([0-9. ]+)$", re.MULTILINE)
PEAKS = re.compile(r"^peak: f32 ([0-9.]+), bf16 ([0-9.]+)$", re.MULTILINE)
GOALS = {"f32": 0.90, "bf16": 0.88}
TIMEOUT_SECONDS = 300.0

Key = tuple[str, str, str]


def ours(binary: Path) -> tuple[dict[Key, float], float, float]:
    output = run([binary], ROOT, TIMEOUT_SECONDS)
    speeds: dict[Key, float] = {}
    for size, orientation, columns in ROW.findall(output):
        bf16, *_, f32 = map(float, columns.split())
        speeds[size, orientation, "bf16"], speeds[size, orientation, "f32"] = bf16, f32
    peaks = PEAKS.search(output)
    if not speeds or peaks is None:
        raise SystemExit(f"no table in:\n{output}")
    return speeds, *map(float, peaks.groups())


def theirs(python: Path, sizes: list[str]) -> dict[Key, float]:
    output = run([python, PEER_SCRIPT, *sizes], ROOT, TIMEOUT_SECONDS)
    records = map(json.loads, output.splitlines())
    return {(record["size"], record["orientation"], record["dtype"]): record["gflops"] for record in records}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", type=Path, default=ROOT / "target/release/examples/products")
    parser.add_argument("--peer-python", type=Path, default=ROOT / ".peer/bin/python")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "results/products.json")
    arguments = parser.parse_args()
    binary, python = program(parser, "--products", arguments.products), program(parser, "--peer-python", arguments.peer_python)
    rounds: list[Record] = []
    for _ in range(arguments.rounds):
        speeds, f32_peak, bf16_peak = ours(binary)
        peer = theirs(python, list(dict.fromkeys(size for size, _, _ in speeds)))
        peak = {"f32": f32_peak, "bf16": max(f32_peak, bf16_peak)}
        rounds += [
            {"key": key, "ours": speed, "theirs": peer[key], "peak": peak[key[2]]} for key, speed in speeds.items()
        ]
    records = []
    for key in dict.fromkeys(record["key"] for record in rounds):
        of = [record for record in rounds if record["key"] == key]
        best = {side: max(record[side] for record in of) for side in ("ours", "theirs", "peak")}
        shares = {side: best[side] / best["peak"] for side in ("ours", "theirs")}
        size, orientation, dtype = key
        ratio = best["ours"] / best["theirs"]
        records.append({"size": size, "orientation": orientation, "dtype": dtype, **best, "shares": shares, "ratio": ratio})
    records.sort(key=lambda record: record["dtype"], reverse=True)
    rows = [["product", "", "", "ours", "of peak", "goal", "PyTorch", "of peak", "ratio"]]
    for record in records:
        goal, share = GOALS[record["dtype"]], record["shares"]["ours"]
        rows.append([
            record["dtype"], record["size"], record["orientation"], f"{record['ours']:.0f}", f"{100 * share:.0f} %",
            f"{100 * goal:.0f} % {'met' if share >= goal else 'missed'}", f"{record['theirs']:.0f}",
            f"{100 * record['shares']['theirs']:.0f} %", f"{record['ratio']:.2f}",
        ])
    print("GFLOP/s, one thread")
    print(aligned(rows, left={0, 1, 2, 5}))
    arguments.output.write_text(json.dumps({**provenance(), "best": records, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
