"""Compares Paceline and PyTorch, side by side, on a card of NVIDIA's: training steps, and the memory that they take.

    cargo build --release && cargo build --release -p paceline-strategies --example card_steps
    python3 bench/card.py                       # where the card and PyTorch are; `scripts/card_day.sh` takes all of it there

The cases are the rows of the table in docs/devices.md, with the batch on the card. In every round our steps (the example `card_steps`), kernel by kernel and as
graphs, and then PyTorch's, eager, as graphs of whole steps and, in the first round, compiled. Without PyTorch ours alone; with `--small` sizes that an
emulated card can compute. `growth`: memory of the card, of all processes, after 1,024 and after 10,240 steps of the small CNN.

`x` in the table is the peer's time divided by ours, of the same form (compiled: by ours kernel by kernel). TFLOP/s count the products of our faster form; the
share is that of the peak that the vendor states for dense products. Exits with 1 if something could not be run, or if memory grows.
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from common import ROOT, Record, RunFailed, aligned, arguments_for, parsed, program, provenance, run, train

PEER_SCRIPT = Path(__file__).resolve().with_name("peer") / "gpu_step.py"
TIMEOUT_SECONDS = 120.0
ROWS = ["small_cnn/f32", "small_cnn/bf16", "llama/f32", "llama/bf16", *(f"{of}/{kind}" for of in ("cnn", "mlp") for kind in ("f32", "tf32", "bf16", "fp16")),
        "smollm2/tf32", "smollm2/bf16"]
FORMS = ["eager", "graph", "compiled"]
# Dense products, in TFLOP/s, by the vendor's data sheets.
HOPPER = {"f32": 67.0, "tf32": 495.0, "bf16": 989.0, "fp16": 989.0}
PEAKS = {"H100": HOPPER, "H200": HOPPER, "A100": {"f32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}}
# Runs with epochs of 128 steps on a card, and on an emulated one.
GROWTH = {False: "--samples 8192 --batch-size 64", True: "--image 8 8 3 --channels 4 8 --hidden 16 --samples 512 --batch-size 4"}
EPOCHS = {False: (8, 80), True: (1, 8)}


def ours(steps: Path, small: bool, cases: list[str]) -> list[Record]:
    lines = run([steps, *(["small"] if small else []), *cases], ROOT, 4 * TIMEOUT_SECONDS).splitlines()
    return [{"side": "paceline"} | step for step in map(json.loads, lines)]


def theirs(python: str, small: bool, cases: list[str], forms: list[str], seconds: int) -> tuple[list[Record], Record]:
    with tempfile.TemporaryDirectory() as folder:
        command = [python, str(PEER_SCRIPT), "--cases", *cases, "--forms", *forms, "--seconds", str(seconds), "--json", "torch.json"]
        run(command + (["--small"] if small else []), Path(folder), 4 * TIMEOUT_SECONDS)
        found = json.loads((Path(folder) / "torch.json").read_text())
    return [{"side": "pytorch"} | step for step in found["steps"]], {"torch": found["torch"], "card": found["card"]}


def growth(binary: Path, small: bool) -> Record:
    used = {}
    for epochs in EPOCHS[small]:
        found = train(binary, f"--nproc 1 --device cuda --optimizer sgd {GROWTH[small]} --epochs {epochs} --pin-memory --non-blocking --copy-stream")
        used[str(128 * epochs)] = {"card_used_bytes": found["card_used_bytes"], "peak_bytes": found["peak_bytes"]["total"], "step_ms": found["step_ms"]}
    before, after = used.values()
    if any(after[key] > before[key] for key in ("card_used_bytes", "peak_bytes")):
        raise ValueError(f"more memory is in use after more steps: {used}")
    return used


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def table(records: list[Record], peaks: dict[str, float]) -> str:
    def figure(side: str, row: str, form: str, key: str = "step_ms") -> float | None:
        fits = [of[key] for of in records if (of["side"], f"{of['case']}/{of['precision']}", of["form"]) == (side, row, form) and key in of]
        return median(fits) if fits else None

    def shown(value: float | None, digits: int = 3) -> str:
        return f"{value:.{digits}f}" if value else "-"

    def ratio(theirs: float | None, ours: float | None) -> str:
        return shown(theirs / ours, 2) if theirs and ours else "-"

    heading = "row|ours ms|graph ms|eager ms|x|graph ms|x|compiled ms|x|autotuned|x|tokens/s|TFLOP/s|% of peak|MB: ours|eager|compiled"
    rows = [heading.split("|")]
    for row in dict.fromkeys(f"{of['case']}/{of['precision']}" for of in records):
        own = [figure("paceline", row, form) for form in FORMS[:2]]
        best = min((ms for ms in own if ms), default=None)
        cells = [row, *map(shown, own)]
        for form, beside in zip((*FORMS, "autotuned"), (own[0], own[1], own[0], own[0])):
            cells += [shown(ms := figure("pytorch", row, form)), ratio(ms, beside)]
        flops, tokens = (figure("paceline", row, "eager", key) for key in ("flops", "tokens"))
        rate = flops / best / 1e9 if flops and best else None
        peak = peaks.get(row.split("/")[1])
        memory = [figure("paceline", row, "eager", "peak_bytes"), *(figure("pytorch", row, form, "peak_bytes") for form in ("eager", "compiled"))]
        cells += [shown(tokens and best and 1e3 * tokens / best, 0), shown(rate, 3), shown(rate and peak and 100 * rate / peak, 1)]
        rows.append(cells + [shown(bytes_ and bytes_ / 1e6, 1) for bytes_ in memory])
    return aligned(rows, left={0})


def main() -> int:
    parser = arguments_for(__doc__, "card.json", rounds=3)
    steps = ROOT / "target/release/examples/card_steps"
    parser.add_argument("--steps", type=Path, default=steps, metavar="PATH", help="the example card_steps")
    parser.add_argument("--peer-python", default=sys.executable, metavar="PATH", help="(default: the Python that runs this)")
    parser.add_argument("--cases", nargs="+", default=ROWS, metavar="CASE[/PRECISION]", help=f"(default: {' '.join(ROWS)})")
    parser.add_argument("--forms", nargs="*", default=FORMS, help="of PyTorch's steps: eager graph compiled autotuned (default: the first three)")
    parser.add_argument("--small", action="store_true", help="sizes for an emulated card")
    parser.add_argument("--seconds", type=int, default=450, help="what PyTorch has not timed by then is left out (default: 450)")
    parser.add_argument("--parts", nargs="+", choices=["steps", "growth"], default=["steps", "growth"], help="(default: both)")
    arguments = parsed(parser)
    binary, steps = arguments.paceline, program(parser, "--steps", arguments.steps)
    result: Record = {**provenance(), "driver": driver(), "records": []}
    records = result["records"]
    failures: list[str] = []

    def kept(what: str, make) -> None:
        try:
            make()
        except (RunFailed, OSError, KeyError, ValueError) as error:
            failures.append(f"{what}: {error}")
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")

    def peer(round_: int) -> None:
        forms = [form for form in arguments.forms if round_ == 0 or form in ("eager", "graph")]
        found, versions = theirs(arguments.peer_python, arguments.small, arguments.cases, forms, arguments.seconds)
        records.extend({"round": round_} | record for record in found)
        result.update(versions)
        errors = [f"{of['case']} {of['precision']} {of['form']}: {of['error']}" for of in found if "error" in of]
        notes.extend(of for of in errors if ": left out" in of)
        failures.extend(of for of in errors if ": left out" not in of)
    has_peer = subprocess.run([arguments.peer_python, "-c", "import torch"], capture_output=True).returncode == 0
    notes = [] if has_peer or "steps" not in arguments.parts else ["PyTorch is left out: it cannot be imported"]
    for round_ in range(arguments.rounds if "steps" in arguments.parts else 0):
        kept("paceline", lambda: records.extend({"round": round_} | of for of in ours(steps, arguments.small, arguments.cases)))
        if has_peer:
            kept("pytorch", lambda: peer(round_))
    if "growth" in arguments.parts:
        kept("growth", lambda: result.update(growth=growth(binary, arguments.small)))
    if records:
        print(table(records, next((of for name, of in PEAKS.items() if name in result["driver"]), {})))
    if "growth" in result:
        print("growth:", json.dumps(result["growth"]))
    print("\n".join(notes + failures))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
