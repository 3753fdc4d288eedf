"""Whether the analysis of traces has the figures of Holistic Trace Analysis (HTA).

    cargo build --release && cargo build --release -p paceline-analysis --examples
    python3 bench/traces.py                      # measures no time
    python3 bench/traces.py --fixtures           # makes traces of crates/analysis/tests/fixtures again

HTA and paceline analyze the same traces: those of `paceline train --profile` on 2 and 4 ranks, on the processor and on the emulated device,
synthetic traces in the shape of PyTorch's on CUDA, and those of `--cuda-traces`, if given. The example `hta_agreement` compares every figure.

HTA is installed into target/peers/hta, unless --hta-python names a Python that has it. Exits with 1 if something could not be run.
"""
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from common import ROOT, Record, aligned, arguments_for, parsed, provenance, run, shown, train, write

HTA_PACKAGES = ["traceinsight==0.6.1", "pandas<3", "setuptools<81"]
FIXTURES = ROOT / "crates/analysis/tests/fixtures"
EMULATED = "--device sim:copy=8gbit,33us,launch=20us --generate-on-host --pin-memory --non-blocking --copy-stream"
TRAIN = "--channels 8 16 --hidden 32 --samples 2000 --batch-size 32 --epochs 1 --profile --profile-active 5"
LIMIT_S = 1800


def make_hta_python() -> Path:
    folder = ROOT / "target/peers/hta"
    python = folder / "bin/python"
    if not (folder / "complete").is_file():
        print(f"installing {', '.join(HTA_PACKAGES)} into {shown(folder)}", file=sys.stderr, flush=True)
        run([sys.executable, "-m", "venv", folder], ROOT, LIMIT_S)
        run([python, "-m", "pip", "install", "--quiet", *HTA_PACKAGES], ROOT, LIMIT_S)
        (folder / "complete").touch()
    return python


def write_hta(hta_python: Path, folder: Path) -> None:
    """Writes HTA's report on the traces in a folder into that folder."""
    for name, flags in [("hta.json", []), ("hta-rounded.json", ["--rounded"])]:
        (folder / name).write_text(run([hta_python, ROOT / "bench/peer/hta_report.py", *flags, folder], ROOT, LIMIT_S))


def our_traces(binary: Path, ranks: int, folder: Path, device: str = "") -> Path:
    folder.mkdir()
    train(binary, f"{TRAIN} --nproc {ranks} {device}", folder)
    return folder / "profile/ddp"


def cuda_shaped(folder: Path, flags: str) -> Path:
    run([sys.executable, ROOT / "bench/peer/cuda_trace.py", "--out", folder, *flags.split()], ROOT, LIMIT_S)
    return folder


def make_fixtures(binary: Path, hta_python: Path, scratch: Path) -> None:
    made = {f"paceline_{ranks}": our_traces(binary, ranks, scratch / f"ours_{ranks}") for ranks in (2, 4)}
    made["cuda_shaped"] = cuda_shaped(scratch / "cuda_shaped", "")
    for fixture, folder in made.items():
        write_hta(hta_python, folder)
        shutil.rmtree(FIXTURES / fixture, ignore_errors=True)
        shutil.copytree(folder, FIXTURES / fixture)


def compared(binary: Path, hta_python: Path, cuda_traces: Path | None, scratch: Path) -> Record:
    """Of each case what HTA says, and which figures differ."""
    cases = {}
    for ranks in (2, 4):
        cases[f"paceline, {ranks} ranks"] = our_traces(binary, ranks, scratch / f"ours_{ranks}")
        cases[f"paceline, {ranks} ranks, emulated device"] = our_traces(binary, ranks, scratch / f"emulated_{ranks}", EMULATED)
    for seed, flags in [(1, ""), (2, "--ranks 4 --steps 6")]:
        cases[f"synthetic, shape of CUDA, seed {seed}"] = cuda_shaped(scratch / f"cuda_{seed}", f"--seed {seed} {flags}")
    if cuda_traces:
        cases["PyTorch on CUDA"] = Path(shutil.copytree(cuda_traces, scratch / "cuda_given"))
    found: Record = {}
    for case, folder in cases.items():
        write_hta(hta_python, folder)
        agreement = json.loads(run([binary.parent / "examples/hta_agreement", folder], ROOT, LIMIT_S))
        found[case] = {"hta": json.loads((folder / "hta.json").read_text()), "agreement": agreement}
    return found


def main() -> None:
    parser = arguments_for(__doc__, "traces_hta.json", rounds=0)
    parser.add_argument("--hta-python", type=Path, metavar="PATH", help="a Python that has HTA")
    parser.add_argument("--cuda-traces", type=Path, metavar="DIR", help="traces that PyTorch wrote on CUDA, to compare too")
    parser.add_argument("--fixtures", action="store_true", help="make stored traces again, and nothing else")
    arguments = parsed(parser)
    hta_python = Path(os.path.abspath(arguments.hta_python)) if arguments.hta_python else make_hta_python()
    with tempfile.TemporaryDirectory(prefix="traces_") as scratch:
        if arguments.fixtures:
            make_fixtures(arguments.paceline, hta_python, Path(scratch))
            return
        cases = compared(arguments.paceline, hta_python, arguments.cuda_traces, Path(scratch))
    agreements = {case: of["agreement"] for case, of in cases.items()}
    rows = [[case, str(of["compared"]), str(len(of["differences"]))] for case, of in agreements.items()]
    print(aligned([["case", "figures", "differ"], *rows], left={0}))
    write(arguments.out, provenance() | {"cases": cases})


if __name__ == "__main__":
    main()
