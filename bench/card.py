"""Compares Paceline and PyTorch, side by side, on a card of NVIDIA's: training steps, and the memory that they take.

    cargo build --release
    python3 bench/card.py                       # where the card and PyTorch are; `scripts/gpu_check.sh` takes all of it there

The models: the default CNN (32 64 128 channels, batch 64 of 28x28), a wide CNN (64 128 256, batch 512 of 32x32x3), an MLP of three
4096-wide layers (batch 4096), and the Llama of 7.4 million parameters (4 sequences of 128 tokens), with SGD, in f32, TF32, bf16
and fp16. In every round each of our runs, and then PyTorch, eager and, in the first round, compiled. A step of PyTorch finds its batch on
the card; ours copies its batch there, from pinned memory and on a stream of its own (`--pin-memory --non-blocking --copy-stream`).
What a step waits for data that the host still makes is left out. `graph` is ours with `--cuda-graph`, and `mode="reduce-overhead"`
there.

`growth`: memory of the card after 128 and after 1,024 steps of the small CNN.

Prints a table, and writes all records with date, machine, card and commit to `results/card.json`. Exits with 1 if something could
not be run, with 2 on a wrong argument. Only the standard library is needed, besides PyTorch in the peer's Python.
"""
import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from common import ROOT, Record, RunFailed, provenance, run

PEER_SCRIPT = Path(__file__).resolve().with_name("peer") / "gpu_step.py"
TIMEOUT_SECONDS = 120.0
CASES = {
    "small_cnn": "--samples 4096 --epochs 2",
    "cnn": "--channels 64 128 256 --image 32 32 3 --batch-size 512 --samples 8192 --epochs 3",
    "mlp": "--model mlp --input-dim 4096 --hidden-dim 4096 --output-dim 4096 --batch-size 4096 --epochs 1 --steps-per-epoch 12",
    "llama": "--model llama --epochs 1 --steps-per-epoch 60",
}
PRECISIONS = {"f32": "", "tf32": "--tf32", "bf16": "--precision bf16", "fp16": "--precision fp16"}
COPIES = "--pin-memory --non-blocking --copy-stream"


def train(binary: Path, flags: str) -> Record:
    with tempfile.TemporaryDirectory() as folder:
        command = f"{binary} train --nproc 1 --device cuda --optimizer sgd --quiet {flags} --json run.json"
        run(shlex.split(command), Path(folder), TIMEOUT_SECONDS)
        return json.loads((Path(folder) / "run.json").read_text())


def ours(binary: Path, case: str, precision: str, form: str) -> Record:
    graph = "--cuda-graph" if form == "graph" else ""
    found = train(binary, f"{CASES[case]} {PRECISIONS[precision]} {COPIES} {graph}")
    keys = ("step_ms_median", "compute_ms", "to_device_ms", "data_ms", "launch_ms", "card_used_bytes", "weights_sha256")
    record = {"side": "paceline", "case": case, "precision": precision, "form": form, "step_ms": found["step_ms_median"]}
    return record | {key: found[key] for key in keys} | {"peak_bytes": found["peak_bytes"]["total"]}


def theirs(python: str, cases: list[str], precisions: list[str], compiled: list[str]) -> tuple[list[Record], Record]:
    with tempfile.TemporaryDirectory() as folder:
        command = [python, str(PEER_SCRIPT), "--cases", *cases, "--precisions", *precisions, "--json", "torch.json"]
        run(command + (["--compiled", *compiled] if compiled else []), Path(folder), 4 * TIMEOUT_SECONDS)
        found = json.loads((Path(folder) / "torch.json").read_text())
    return [{"side": "pytorch"} | step for step in found["steps"]], {"torch": found["torch"], "card": found["card"]}


def growth(binary: Path) -> Record:
    used = {}
    for epochs in (1, 8):
        found = train(binary, f"--samples 8192 --epochs {epochs} {COPIES}")
        used[str(128 * epochs)] = {"card_used_bytes": found["card_used_bytes"], "peak_bytes": found["peak_bytes"]["total"]}
    return used


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def table(records: list[Record]) -> None:
    def step(side: str, case: str, precision: str, form: str, key: str = "step_ms") -> float | None:
        fits = [r[key] for r in records if (r["side"], r["case"], r["precision"], r["form"]) == (side, case, precision, form)]
        return median(fits) if fits else None

    def shown(value: float | None, digits: int = 3) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    def ratio(theirs: float | None, ours: float | None) -> str:
        return shown(theirs / ours, 2) if theirs and ours else "-"

    print("model      type  ours ms  graph ms  eager ms  compiled ms  graph ms  eager/ours  graph/graph  MB: ours  eager")
    for case in CASES:
        for precision in PRECISIONS:
            own = [step("paceline", case, precision, form) for form in ("eager", "graph")]
            other = [step("pytorch", case, precision, form) for form in ("eager", "compiled", "graph")]
            memory = [step(side, case, precision, "eager", "peak_bytes") for side in ("paceline", "pytorch")]
            if own[0] is None and other[0] is None:
                continue
            megabytes = [shown(bytes_ and bytes_ / 1e6, 1) for bytes_ in memory]
            print(
                f"{case:<10} {precision:<4} {shown(own[0]):>8} {shown(own[1]):>9} {shown(other[0]):>9} {shown(other[1]):>12}"
                f" {shown(other[2]):>9} {ratio(other[0], own[0]):>11} {ratio(other[2], own[1]):>12} {megabytes[0]:>9} {megabytes[1]:>6}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare training steps on a card with PyTorch's.")
    parser.add_argument("--paceline", type=Path, default=ROOT / "target/release/paceline", metavar="PATH")
    parser.add_argument("--peer-python", default="python3", metavar="PATH")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="(default: all)")
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS), help="(default: all)")
    parser.add_argument("--compiled", nargs="*", choices=list(PRECISIONS), default=["f32", "bf16"], help="(default: f32 bf16)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--no-growth", action="store_true", help="leave out the runs that look for growth")
    parser.add_argument("--out", type=Path, default=ROOT / "results/card.json", metavar="FILE")
    arguments = parser.parse_args()
    binary = arguments.paceline.resolve()
    if not binary.is_file():
        parser.error(f"--paceline {arguments.paceline}: no such file; `cargo build --release` makes it")
    result: Record = {**provenance(), "driver": driver(), "records": []}
    records = result["records"]
    failed = False

    def kept(what: str, make) -> None:
        nonlocal failed
        try:
            make()
        except (RunFailed, OSError, KeyError, ValueError) as error:
            failed = True
            print(f"{what}: {error}", file=sys.stderr)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")

    def peer(round_: int) -> None:
        found, versions = theirs(arguments.peer_python, arguments.cases, arguments.precisions, arguments.compiled * (round_ == 0))
        records.extend({"round": round_} | record for record in found)
        result.update(versions)

    for round_ in range(arguments.rounds):
        for case in arguments.cases:
            for precision in arguments.precisions:
                for form in ("eager", "graph"):
                    run_ = lambda: records.append({"round": round_} | ours(binary, case, precision, form))
                    kept(f"{case} {precision} {form}", run_)
        kept("pytorch", lambda: peer(round_))
    if not arguments.no_growth:
        kept("growth", lambda: result.update(growth=growth(binary)))
    table(records)
    if "growth" in result:
        print("memory by number of steps:", json.dumps(result["growth"]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
