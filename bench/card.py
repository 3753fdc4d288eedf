"""Compares Paceline and PyTorch, side by side, on a card of NVIDIA's: training steps, and the memory that they take.

    cargo build --release && cargo build --release -p paceline-strategies --example card_steps
    python3 bench/card.py                       # where the card and PyTorch are; `scripts/gpu_check.sh` takes all of it there

The models: the default CNN (32 64 128 channels, batch 64 of 28x28), a wide CNN (64 128 256, batch 512 of 32x32x3), an MLP of three
4096-wide layers (batch 4096), and the Llama of 7.4 million parameters (4 sequences of 128 tokens), with SGD, in f32, TF32, bf16
and fp16. The batch lies on the card. In every round our steps (the example `card_steps`), and then PyTorch's, eager and, in the
first round, compiled. `graph` is a step as a graph: `--cuda-graph` here, and `mode="reduce-overhead"` there.

`loader`: `paceline train` of the wide CNN, whose batches are copied to the card from pinned memory on a stream of its own, beside the
same steps without a loader. `growth`: memory of the card, of all processes, after 128 and after 1,024 steps of the small CNN.

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

from common import ROOT, Record, RunFailed, program, provenance, run

PEER_SCRIPT = Path(__file__).resolve().with_name("peer") / "gpu_step.py"
TIMEOUT_SECONDS = 120.0
CASES = ["small_cnn", "cnn", "mlp", "llama"]
PRECISIONS = ["f32", "tf32", "bf16", "fp16"]
COPIES = "--pin-memory --non-blocking --copy-stream"


def train(binary: Path, flags: str) -> Record:
    with tempfile.TemporaryDirectory() as folder:
        command = f"{binary} train --nproc 1 --device cuda --optimizer sgd --quiet {flags} --json run.json"
        run(shlex.split(command), Path(folder), TIMEOUT_SECONDS)
        return json.loads((Path(folder) / "run.json").read_text())


def ours(steps: Path, cases: list[str], precisions: list[str]) -> list[Record]:
    lines = run([steps, *cases], ROOT, 4 * TIMEOUT_SECONDS).splitlines()
    return [{"side": "paceline"} | step for step in map(json.loads, lines) if step["precision"] in precisions]


def theirs(python: str, cases: list[str], precisions: list[str], compiled: list[str]) -> tuple[list[Record], Record]:
    with tempfile.TemporaryDirectory() as folder:
        command = [python, str(PEER_SCRIPT), "--cases", *cases, "--precisions", *precisions, "--json", "torch.json"]
        run(command + (["--compiled", *compiled] if compiled else []), Path(folder), 4 * TIMEOUT_SECONDS)
        found = json.loads((Path(folder) / "torch.json").read_text())
    return [{"side": "pytorch"} | step for step in found["steps"]], {"torch": found["torch"], "card": found["card"]}


def loader(binary: Path) -> Record:
    found = train(binary, "--channels 64 128 256 --image 32 32 3 --batch-size 512 --samples 16384 --epochs 2 " + COPIES)
    return {key: found[key] for key in ("step_ms_median", "wall_ms", "compute_ms", "to_device_ms", "data_ms", "copy_hidden_ms", "copy_ms")}


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
    steps = ROOT / "target/release/examples/card_steps"
    parser.add_argument("--steps", type=Path, default=steps, metavar="PATH", help="the example card_steps")
    parser.add_argument("--peer-python", default="python3", metavar="PATH")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="(default: all)")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="(default: all)")
    parser.add_argument("--compiled", nargs="*", choices=PRECISIONS, default=["f32", "bf16"], help="(default: f32 bf16)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--only-steps", action="store_true", help="leave out loader and growth")
    parser.add_argument("--out", type=Path, default=ROOT / "results/card.json", metavar="FILE")
    arguments = parser.parse_args()
    binary, steps = program(parser, "--paceline", arguments.paceline), program(parser, "--steps", arguments.steps)
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

    def own(round_: int) -> None:
        records.extend({"round": round_} | record for record in ours(steps, arguments.cases, arguments.precisions))

    def peer(round_: int) -> None:
        found, versions = theirs(arguments.peer_python, arguments.cases, arguments.precisions, arguments.compiled * (round_ == 0))
        records.extend({"round": round_} | record for record in found)
        result.update(versions)

    for round_ in range(arguments.rounds):
        kept("paceline", lambda: own(round_))
        kept("pytorch", lambda: peer(round_))
    if not arguments.only_steps:
        kept("loader", lambda: result.update(loader=loader(binary)))
        kept("growth", lambda: result.update(growth=growth(binary)))
    table(records)
    for what in ("loader", "growth"):
        if what in result:
            print(f"{what}:", json.dumps(result[what]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
