"""Compares our traces with other tools: Holistic Trace Analysis, PyTorch's profiler, TensorBoard, Perfetto.

    cargo build --release && cargo build --release -p paceline-analysis --examples
    python3 bench/traces.py                      # all parts
    python3 bench/traces.py --parts hta torch_cpu tensorboard perfetto    # the parts that measure no time
    python3 bench/traces.py --fixtures           # makes the traces of crates/analysis/tests/fixtures anew

`hta`: HTA and `paceline analyze` analyze the same traces: those of `paceline train --profile` on 2 and 4 ranks, on the
processor and on the emulated device, synthetic traces in the shape of PyTorch's on CUDA, and those of `--cuda-traces`, if given. Every figure is compared:
all of them by `hta_agreement` in Rust, and those that `paceline analyze` writes also from its `summary.json`.

`torch_cpu`: PyTorch's profiler on a CPU, two ranks over Gloo. HTA cannot analyze such traces, because they have no
kernels. `paceline analyze` analyzes their operators, and says so.

`tensorboard`: checks that TensorBoard's own reader finds the values of `metrics.jsonl` in the event file of
`--tensorboard`.

`perfetto`: reads the merged trace of all ranks with Perfetto's trace processor, if it can be fetched.

`speed`: `paceline analyze` against HTA on the same two traces of 100 MB, in turn; also the speed of the parser, and
the memory for a trace of 1 GB.

`many`: the memory for 64 ranks with a trace of 100 MB each, all in one report, and how many events a second one core reads and
analyzes of a single one. The ranks share the events of one trace, so that they are made in a minute.

`recorder`: the cost of recording an event, the time to write a million of them, and the training step with and
without the recorder, in turn.

Python environments for HTA, TensorBoard and Perfetto are made in target/peers, unless --hta-python names one.

Prints one table and writes the raw records to `results/traces.json`. Exits with 0 if everything was compared,
whether or not a bar was met, with 1 if something could not be run, and with 2 on a wrong argument.
"""
import argparse
import datetime
import gzip
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common import ROOT, Record, RunFailed, aligned, commit, machine, run, shown

# Since 0.6, Holistic Trace Analysis is published as `traceinsight`.
HTA_NAMES = ["traceinsight", "HolisticTraceAnalysis"]
HTA_PACKAGES = ["traceinsight==0.6.1", "pandas<3", "tensorboard", "setuptools<81", "perfetto"]
FIXTURES = ROOT / "crates/analysis/tests/fixtures"
EMULATED = "--device sim:copy=8gbit,33us,launch=20us --generate-on-host --pin-memory --non-blocking --copy-stream"
TRAIN = "train --channels 8 16 --hidden 32 --samples 2000 --batch-size 32 --epochs 1 --profile --profile-active 5 --quiet"
POINTS = 0.1  # percentages may differ by this many percentage points
PART = 1e-3  # times may differ by this fraction
RESOLUTION_US = 0.011  # and, in addition, by the resolution of HTA's floats and of its output
TRACE_MB = 100
LARGE_TRACE_MB = 1000
MANY_RANKS = 64
MANY_MB = 2000
EVENTS_PER_S = 1e6
MINUTES = 60


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare traces and their analysis with other tools.")
    parser.add_argument("--paceline", type=Path, default=Path("target/release/paceline"), metavar="PATH")
    parser.add_argument("--hta-python", type=Path, metavar="PATH", help="a Python that has HTA, TensorBoard, Perfetto")
    parser.add_argument("--torch-python", type=Path, default=Path(".peer/bin/python"), metavar="PATH")
    parser.add_argument("--cuda-traces", type=Path, metavar="DIR", help="traces that PyTorch wrote on CUDA, to compare too")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="(default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of what is timed (default: 5)")
    parser.add_argument("--fixtures", action="store_true", help="make the stored traces anew, and nothing else")
    parser.add_argument("--out", type=Path, default=Path("results/traces.json"), metavar="FILE")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    if not arguments.paceline.is_file():
        parser.error(f"--paceline {arguments.paceline}: no such file; `cargo build --release` makes it")
    if "torch_cpu" in arguments.parts and not arguments.torch_python.is_file():
        parser.error(f"--torch-python {arguments.torch_python}: no such file; README.md says how to make one")
    return arguments


class Tools:
    """The programs, and every command that was run."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.binary = Path(os.path.abspath(arguments.paceline))
        self.torch_python = Path(os.path.abspath(arguments.torch_python))
        self.hta_python = Path(os.path.abspath(arguments.hta_python)) if arguments.hta_python else make_hta_python()
        self.cuda_traces: Path | None = arguments.cuda_traces
        self.rounds: int = arguments.rounds
        self.commands: list[str] = []

    def run(self, command: Sequence[str | Path], folder: Path, timeout_s: float = 10 * MINUTES) -> str:
        self.note(command)
        return run(command, folder, timeout_s)

    def note(self, command: Sequence[str | Path]) -> str:
        """Records a command, without folders that exist only on this machine."""
        words = [shown(Path(command[0])), *(re.sub(r"\S*/traces_\w+", "SCRATCH", str(word)) for word in command[1:])]
        text = shlex.join(words).replace(f"{ROOT}/", "")
        if text not in self.commands:
            self.commands.append(text)
        return text

    def paceline(self, flags: str, folder: Path) -> str:
        return self.run([self.binary, *shlex.split(flags)], folder)

    def example(self, name: str, *words: str | Path) -> str:
        program = self.binary.parent / "examples" / name
        if not program.is_file():
            raise RunFailed(f"{shown(program)} is missing; `cargo build --release -p paceline-analysis --examples` makes it")
        return self.run([program, *map(str, words)], ROOT)

    def script(self, python: Path, name: str, *words: str | Path) -> str:
        return self.run([python, ROOT / "bench/peer" / name, *map(str, words)], ROOT)

    def versions(self) -> Record:
        code = (
            "import json, sys\nfrom importlib.metadata import PackageNotFoundError, version\nfound = {}\n"
            "for name in sys.argv[1:]:\n    try: found[name] = version(name)\n    except PackageNotFoundError: pass\n"
            "print(json.dumps(found))"
        )
        found = {"paceline": run([self.binary, "--version"], ROOT, MINUTES).strip()}
        # TensorBoard and Perfetto are needed for their own parts only.
        found |= json.loads(run([self.hta_python, "-c", code, *HTA_NAMES, "pandas", "tensorboard", "perfetto"], ROOT, MINUTES))
        if not any(name in found for name in HTA_NAMES):
            raise RunFailed(f"--hta-python has none of {', '.join(HTA_NAMES)}")
        if self.torch_python.is_file():
            found |= json.loads(run([self.torch_python, "-c", code, "torch"], ROOT, MINUTES))
        return found


def make_hta_python() -> Path:
    folder = ROOT / "target/peers/hta"
    python = folder / "bin/python"
    if not (folder / "complete").is_file():
        say(f"installing {', '.join(HTA_PACKAGES)} into {shown(folder)}")
        run([sys.executable, "-m", "venv", folder], ROOT, 5 * MINUTES)
        run([python, "-m", "pip", "install", "--quiet", *HTA_PACKAGES], ROOT, 30 * MINUTES)
        (folder / "complete").touch()
    return python


# --- Traces -------------------------------------------------------------------------------------------------


def our_traces(tools: Tools, ranks: int, folder: Path, device: str = "") -> Path:
    tools.paceline(f"{TRAIN} --nproc {ranks} {device}", folder)
    return folder / "profile/ddp"


def cuda_shaped(tools: Tools, folder: Path, *words: str) -> Path:
    tools.script(Path(sys.executable), "cuda_trace.py", "--out", folder, *words)
    return folder


def torch_cpu_traces(tools: Tools, folder: Path) -> Path:
    tools.script(tools.torch_python, "profile_step.py", "--out", folder)
    return folder


def write_hta(tools: Tools, folder: Path) -> None:
    """Writes HTA's report on the traces in a folder into that folder."""
    for name, flags in [("hta.json", []), ("hta-rounded.json", ["--rounded"])]:
        (folder / name).write_text(tools.script(tools.hta_python, "hta_report.py", *flags, folder))


def make_fixtures(tools: Tools) -> None:
    with tempfile.TemporaryDirectory(prefix="traces_") as scratch:
        makers = {
            "paceline_2": lambda folder: our_traces(tools, 2, folder),
            "paceline_4": lambda folder: our_traces(tools, 4, folder),
            "cuda_shaped": lambda folder: cuda_shaped(tools, folder),
            "torch_cpu": lambda folder: torch_cpu_traces(tools, folder),
        }
        for name, make in makers.items():
            folder = Path(scratch, name)
            folder.mkdir()
            made = make(folder)
            if name != "torch_cpu":
                write_hta(tools, made)
            shutil.rmtree(FIXTURES / name, ignore_errors=True)
            shutil.copytree(made, FIXTURES / name)
            say(f"{shown(FIXTURES / name)}: {sum(f.stat().st_size for f in made.rglob('*') if f.is_file()) / 1e3:.0f} KB")


# --- HTA ----------------------------------------------------------------------------------------------------


class Comparison:
    """Our figures beside HTA's."""

    def __init__(self) -> None:
        self.compared = 0
        self.differences: list[str] = []

    def close(self, what: str, ours: float | None, theirs: float | None, tolerance: float) -> None:
        self.compared += 1
        if ours is None and theirs is None:
            return
        if ours is None or theirs is None or abs(ours - theirs) > tolerance:
            self.differences.append(f"{what}: {ours} here, {theirs} in HTA")

    def time(self, what: str, ours: float | None, theirs: float | None) -> None:
        self.close(what, ours, theirs, PART * abs(theirs or 0) + RESOLUTION_US)

    def number(self, what: str, ours: float | None, theirs: float | None) -> None:
        self.close(what, ours, theirs, PART * abs(theirs or 0) + 1e-6)


def plain(name: str) -> str:
    """The name of a kernel in the report of a run on the processor."""
    if not name.startswith("ncclDevKernel_"):
        return name
    first, *rest = name.removeprefix("ncclDevKernel_").split("_")
    return " ".join([re.sub("(?<!^)([A-Z])", r"_\1", first).lower(), *(word.lower() for word in rest if word)])


def compare_summary(summary: Record, hta: Record) -> Comparison:
    """Compares the figures that both `paceline analyze` and HTA give."""
    found = Comparison()
    tables = {name: table["rows"] for name, table in summary["tables"].items()}

    def row(table: str, **keys: object) -> Record:
        fits = [row for row in tables.get(table, []) if all(row[key] == value for key, value in keys.items())]
        if not fits:
            found.differences.append(f"{table}: no row {keys}")
        return fits[0] if fits else {}

    for theirs in hta["temporal"]:
        ours = row("summary", rank=theirs["rank"])
        names = {"idle_time": "idle_time", "compute_time": "temporal_compute_time", "non_compute_time": "non_compute_time"}
        for key, name in names.items():
            found.time(f"{name}, rank {theirs['rank']}", ours.get(f"{name}_us"), theirs[f"{key}(us)"])
            found.close(f"{key} %, rank {theirs['rank']}", ours.get(f"{key}_pctg"), theirs[f"{key}_pctg"], POINTS)
        found.time(f"kernel time, rank {theirs['rank']}", ours.get("kernel_time_us"), theirs["kernel_time(us)"])
    for theirs in hta["overlap"]:
        ours = row("summary", rank=theirs["rank"])
        pctg = theirs["comp_comm_overlap_pctg"]
        found.close(f"overlap %, rank {theirs['rank']}", ours.get("comm_comp_overlap_pctg"), pctg, POINTS)
    # The report of a run on the processor names what it shows as people do, and leaves out what a processor does not have.
    on_processor = "launches" not in tables
    name_of = plain if on_processor else str
    # The longest kernels have rows of their own; all others share one row.
    theirs_by_name = {(theirs["rank"], name_of(theirs["name"])): theirs for theirs in hta["kernels"]}
    for ours in tables["kernels"]:
        if ours["kind"] == "other" or ours["name"] == "others":
            continue
        theirs = theirs_by_name.get((ours["rank"], ours["name"]), {})
        for key, name in {"sum": "sum (us)", "mean": "mean (us)", "min": "min (us)", "max": "max (us)", "std": "stddev"}.items():
            found.time(f"{ours['name']}, {key}, rank {ours['rank']}", ours[f"{key}_us"], theirs.get(name))
    if on_processor:
        return found
    for theirs in hta["idle"]:
        ours = row("idle", rank=theirs["rank"], stream=theirs["stream"], category=theirs["idle_category"])
        found.time(f"idle time of stream {theirs['stream']}", ours.get("idle_us"), theirs["idle_time"])
    for rank, theirs in hta["launches"].items():
        ours = row("launches", rank=int(rank))
        found.number("launches", ours.get("launches"), theirs["cpu"]["count"])
        for key, value in {
            "cpu_mean_us": theirs["cpu"]["mean"], "gpu_mean_us": theirs["gpu"]["mean"],
            "delay_mean_us": theirs["delay"]["mean"], "delay_max_us": theirs["delay"]["max"],
        }.items():
            found.time(f"launches, {key}, rank {rank}", ours.get(key), value)
        for key in ("short_kernels", "slow_calls", "long_delays"):
            found.number(f"launches, {key}, rank {rank}", ours.get(key), theirs[key])
    for theirs in hta["queues"]:
        ours = row("queues", rank=theirs["rank"], stream=theirs["stream"])
        for key, name in {"changes": "count", "mean": "mean", "p50": "50%", "max": "max"}.items():
            found.number(f"queue of stream {theirs['stream']}, {key}", ours.get(key), theirs[name])
    for theirs in hta["copies"]:
        ours = row("copies", rank=theirs["rank"], name=theirs["name"])
        for key, name in {"mean_gb_s": "mean", "max_gb_s": "max"}.items():
            found.number(f"{theirs['name']}, {key}", ours.get(key), theirs[name])
    return found


def hta(tools: Tools) -> tuple[list[Record], Record]:
    results, raw = [], {}
    with tempfile.TemporaryDirectory(prefix="traces_") as scratch:
        cases = {}
        for ranks in (2, 4):
            folder = Path(scratch, f"ours_{ranks}")
            folder.mkdir()
            cases[f"paceline, {ranks} ranks"] = our_traces(tools, ranks, folder)
            folder = Path(scratch, f"emulated_{ranks}")
            folder.mkdir()
            cases[f"paceline, {ranks} ranks, emulated device"] = our_traces(tools, ranks, folder, EMULATED)
        for seed, words in [(1, []), (2, ["--ranks", "4", "--steps", "6"])]:
            folder = cuda_shaped(tools, Path(scratch, f"cuda_{seed}"), "--seed", str(seed), *words)
            cases[f"synthetic, shape of CUDA, seed {seed}"] = folder
        if tools.cuda_traces:
            cases["PyTorch on CUDA"] = Path(shutil.copytree(tools.cuda_traces, Path(scratch, "cuda_given")))
        for case, folder in cases.items():
            write_hta(tools, folder)
            answers = json.loads((folder / "hta.json").read_text())
            agreement = json.loads(tools.example("hta_agreement", folder))
            report = Path(scratch, "report")
            tools.paceline(f"analyze --trace-dir {shlex.quote(str(folder))} --output {shlex.quote(str(report))}", Path(scratch))
            summary = json.loads((report / "summary.json").read_text())
            written = compare_summary(summary, answers)
            say(f"hta: {case}: {agreement['compared']} and {written.compared} figures, "
                f"{len(agreement['differences'])} and {len(written.differences)} differ")
            results += [
                outcome(case, "figures of the analysis that differ from HTA's", len(agreement["differences"]), "= 0",
                        not agreement["differences"] and agreement["compared"] > 100, agreement["compared"]),
                outcome(case, "figures in summary.json that differ from HTA's", len(written.differences), "= 0",
                        not written.differences and written.compared > 50, written.compared),
            ]
            raw[case] = {
                "hta": answers, "hta_rounded": json.loads((folder / "hta-rounded.json").read_text()),
                "agreement": agreement, "summary_differences": written.differences,
                "summary": summary["tables"].get("summary"),
            }
    if not tools.cuda_traces:
        raw["note"] = "no traces that PyTorch wrote on CUDA were given (--cuda-traces); the synthetic ones have their shape"
    return results, raw


# --- PyTorch, TensorBoard, Perfetto -------------------------------------------------------------------------


def torch_cpu(tools: Tools) -> tuple[list[Record], Record]:
    with tempfile.TemporaryDirectory(prefix="traces_") as scratch:
        folder = torch_cpu_traces(tools, Path(scratch, "torch"))
        try:
            tools.script(tools.hta_python, "hta_report.py", "--no-critical-path", folder)
            refusal = None
        except RunFailed as error:
            refusal = str(error).rsplit(" | ", 1)[-1]  # the exception, without its traceback
        report = Path(scratch, "report")
        printed = tools.paceline(f"analyze --trace-dir {folder} --output {report}", Path(scratch))
        tables = json.loads((report / "summary.json").read_text())["tables"]
        page = (report / "summary.html").read_text()
    counted = [row["counted"] for row in tables["files"]["rows"]]
    says_so = [text for text in (printed, page) if "analyzed from its operators" in text]
    rows = tables["summary"]["rows"]
    reduced = [row.get("all_reduce_calls") or 0 for row in rows]
    computed = [row["compute_time_us"] for row in rows]
    results = [
        outcome("PyTorch on a CPU", "HTA gives up", int(refusal is not None), "= 1", refusal is not None),
        outcome("PyTorch on a CPU", "ranks analyzed from operators", counted.count("operators"), "= 2", counted == ["operators"] * 2),
        outcome("PyTorch on a CPU", "console and page say so", len(says_so), "= 2", len(says_so) == 2),
        outcome("PyTorch on a CPU", "least all-reduces of a rank", min(reduced), ">= 1", min(reduced) >= 1),
        outcome("PyTorch on a CPU", "least compute time of a rank, us", min(computed), "> 0", min(computed) > 0),
    ]
    printed = printed.replace(scratch, "SCRATCH").splitlines()
    return results, {"hta": refusal, "printed": printed, "summary": rows}


def tensorboard(tools: Tools) -> tuple[list[Record], Record]:
    with tempfile.TemporaryDirectory(prefix="traces_") as scratch:
        flags = "train --channels 8 --hidden 16 --samples 1000 --epochs 2 --clip-grad-norm 1 --evaluate --eval-every 5"
        tools.paceline(f"{flags} --tensorboard --quiet", Path(scratch))
        [folder] = Path(scratch, "runs").iterdir()
        curves = json.loads(tools.script(tools.hta_python, "read_scalars.py", folder))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {
        "train/loss": "loss", "train/learning_rate": "lr", "train/grad_norm": "grad_norm", "speed/step_ms": "step_ms",
        "anatomy/exposed_ms": "comm_exposed_ms", "communication/mb": "comm_mb",
    }
    wrong = []
    for curve, key in names.items():
        expected = [[line["step"], line[key]] for line in lines if key in line]
        found = curves.get(curve, [])
        same = len(found) == len(expected) and all(
            step == at and math.isclose(value, ours, rel_tol=1e-6, abs_tol=1e-9)  # a scalar has 32 bits
            for (step, value), (at, ours) in zip(found, expected)
        )
        wrong += [] if same and expected else [curve]
    evaluated = [line["step"] for line in lines if "eval_loss" in line]
    if [step for step, _ in curves.get("evaluation/loss", [])][: len(evaluated)] != evaluated or not evaluated:
        wrong.append("evaluation/loss")
    results = [outcome("--tensorboard", "curves that differ from metrics.jsonl", len(wrong), "= 0", not wrong, len(names) + 1)]
    return results, {"curves": sorted(curves), "wrong": wrong}


def perfetto(tools: Tools) -> tuple[list[Record], Record]:
    with tempfile.TemporaryDirectory(prefix="traces_") as scratch:
        folder = our_traces(tools, 2, Path(scratch))
        merged = Path(scratch, "merged.json.gz")
        tools.paceline(f"trace merge {folder} --output {merged}", Path(scratch))
        with gzip.open(merged, "rt") as file:
            num_events = len(json.load(file)["traceEvents"])
        found = json.loads(tools.script(tools.hta_python, "perfetto_import.py", merged))
    raw = {"events": num_events} | found
    if reason := found.get("unavailable"):
        say(f"perfetto: its trace processor could not be had here: {reason}")
        raw["note"] = "not available here; crates/analysis/tests/merge.rs holds the file against the rules of its importer"
        return [], raw
    errors = sum(found["errors"].values())
    return [
        outcome("merged trace", "import errors of Perfetto", errors, "= 0", errors == 0),
        outcome("merged trace", "slices", found["slices"], ">= 1", found["slices"] >= 1),
        outcome("merged trace", "flows", found["flows"], ">= 1", found["flows"] >= 1),
    ], raw


# --- Time and memory ----------------------------------------------------------------------------------------


def timed(tools: Tools, command: Sequence[str | Path], folder: Path) -> tuple[Record, str]:
    """Runs a command, and returns its time and its peak memory: that of its largest process as the kernel counts
    it, or, if larger, that of all its processes together as sampled."""
    text = tools.note(command)
    with open(folder / "stdout", "w+") as out, open(folder / "stderr", "w+") as errors:
        begin = time.perf_counter()
        process = subprocess.Popen(list(map(str, command)), cwd=folder, stdout=out, stderr=errors)
        together = 0
        while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
            together = max(together, proportional_bytes(process.pid))
            # Sampling stops the process for a moment, so long runs are sampled rarely.
            time.sleep(0.02 if time.perf_counter() - begin < 2 else 0.5)
        _, status, usage = ended
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        if process.returncode != 0:
            raise RunFailed(f"{text} ended with {process.returncode}: {errors.read()[-300:]}")
        largest = usage.ru_maxrss * 1024
        return {
            "wall_s": seconds, "cpu_s": usage.ru_utime + usage.ru_stime, "largest_process_bytes": largest,
            "peak_rss_bytes": max(largest, together),
        }, out.read()


def proportional_bytes(pid: int) -> int:
    """Memory of a process and of all processes that it has started. Shared pages count once."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
        for task in Path(f"/proc/{pid}/task").iterdir():
            children = (task / "children").read_text().split()
            total += sum(proportional_bytes(int(child)) for child in children)
    except OSError:
        pass  # the process has just ended
    return total


def speed(tools: Tools) -> tuple[list[Record], Record]:
    raw: Record = {"rounds": [], "parse": [], "large": []}
    with tempfile.TemporaryDirectory(prefix="traces_") as scratch:
        traces = cuda_shaped(tools, Path(scratch, "traces"), "--megabytes", str(TRACE_MB), "--layers", "16", "--plain")
        sizes = [file.stat().st_size for file in sorted(traces.rglob("*.json"))]
        raw["file_bytes"] = sizes
        report = Path(scratch, "report")
        analyze = [tools.binary, "analyze", "--trace-dir", traces, "--output", report]
        theirs = [tools.hta_python, ROOT / "bench/peer/hta_report.py", "--only-breakdowns", traces]
        for number in range(1, tools.rounds + 1):
            ours, _ = timed(tools, analyze, Path(scratch))
            hta, printed = timed(tools, theirs, Path(scratch))
            hta["inside"] = json.loads(printed)
            raw["rounds"].append({"paceline": ours, "hta": hta})
            say(f"speed: round {number} of {tools.rounds}: {ours['wall_s']:.2f} s, {ours['peak_rss_bytes'] / 1e6:.0f} MB; "
                f"HTA {hta['wall_s']:.2f} s, {hta['peak_rss_bytes'] / 1e6:.0f} MB")
        trace = sorted(traces.rglob("*.json"))[0]
        for line in tools.example("parse_speed", trace, str(tools.rounds)).splitlines():
            raw["parse"].append({"line": line, "mb_per_s": float(re.search(r"([\d.]+) MB/s of the parsing thread", line)[1])})
        shutil.rmtree(traces)
        large = cuda_shaped(tools, Path(scratch, "large"), "--ranks", "1", "--megabytes", str(LARGE_TRACE_MB), "--layers", "16", "--plain")
        raw["large_bytes"] = next(large.rglob("*.json")).stat().st_size
        for _ in range(3):
            one, _ = timed(tools, [tools.binary, "analyze", "--trace-dir", large, "--output", report], Path(scratch))
            raw["large"].append(one)
            say(f"speed: {raw['large_bytes'] / 1e6:.0f} MB in {one['wall_s']:.1f} s, {one['peak_rss_bytes'] / 1e6:.0f} MB resident")
    rounds = raw["rounds"]
    # Python's start and imports are not counted against HTA; our whole process is counted against us.
    hta_s = [one["hta"]["inside"]["load_s"] + one["hta"]["inside"]["analyse_s"] for one in rounds]
    faster = [theirs / one["paceline"]["wall_s"] for theirs, one in zip(hta_s, rounds)]
    # HTA reads each rank in a process of its own, so all of its processes count.
    smaller = [one["hta"]["peak_rss_bytes"] / one["paceline"]["peak_rss_bytes"] for one in rounds]
    case = f"2 ranks, {min(sizes) / 1e6:.0f} MB each"
    return [
        held(case, "HTA's time over ours", faster, ">= 10", lambda value: value >= 10),
        held(case, "HTA's peak memory over ours", smaller, ">= 10", lambda value: value >= 10),
        held(case, "MB/s that one thread parses", [one["mb_per_s"] for one in raw["parse"]], ">= 200", lambda value: value >= 200),
        held(f"{raw['large_bytes'] / 1e6:.0f} MB", "peak memory of the analysis, MB",
             [one["peak_rss_bytes"] / 1e6 for one in raw["large"]], "< 1000", lambda value: value < 1000),
    ], raw


def many(tools: Tools) -> tuple[list[Record], Record]:
    raw: Record = {"one": [], "many": []}
    with tempfile.TemporaryDirectory(prefix="traces_") as scratch:
        folder = cuda_shaped(tools, Path(scratch, "one"), "--ranks", "1", "--megabytes", str(TRACE_MB), "--layers", "16", "--plain")
        [trace] = folder.rglob("*.json")
        text = trace.read_bytes()
        raw |= {"file_bytes": len(text), "events": text.count(b'"ph": "')}
        report = Path(scratch, "report")
        # On one core: the fastest of the rounds is the one that others disturbed least, and all are written down.
        for _ in range(tools.rounds):
            one, _ = timed(tools, ["taskset", "-c", "0", tools.binary, "analyze", "--trace-dir", folder, "--output", report], Path(scratch))
            raw["one"].append(one)
            say(f"many: one rank of {len(text) / 1e6:.0f} MB on one core: {one['wall_s']:.2f} s, {one['peak_rss_bytes'] / 1e6:.0f} MB")
        # A file may consist of several compressed parts. Only the first one, with the rank, differs.
        info = text.index(b'"distributedInfo"')
        begin, end = text.index(b'"rank": 0', info), text.index(b'"traceEvents"')
        before = text[:begin]
        after = text[begin + len(b'"rank": 0'):end].replace(b'"world_size": 1', b'"world_size": %d' % MANY_RANKS)
        body = gzip.compress(text[end:], compresslevel=1)
        for rank in range(MANY_RANKS):
            file = Path(scratch, "many", f"rank_{rank}", trace.name + ".gz")
            file.parent.mkdir(parents=True)
            file.write_bytes(gzip.compress(before + b'"rank": %d' % rank + after) + body)
        for _ in range(2):
            all_ranks, _ = timed(tools, [tools.binary, "analyze", "--trace-dir", Path(scratch, "many"), "--output", report], Path(scratch))
            raw["many"].append(all_ranks)
            say(f"many: {MANY_RANKS} ranks: {all_ranks['wall_s']:.1f} s, {all_ranks['peak_rss_bytes'] / 1e6:.0f} MB")
    case = f"{MANY_RANKS} ranks, {raw['file_bytes'] / 1e6:.0f} MB each"
    return [
        held("one rank, one core", "events per second", [raw["events"] / one["wall_s"] for one in raw["one"]],
             f">= {EVENTS_PER_S:.0f}", lambda value: value >= EVENTS_PER_S),
        held(case, "peak memory of the analysis, MB", [one["peak_rss_bytes"] / 1e6 for one in raw["many"]],
             f"<= {MANY_MB}", lambda value: value <= MANY_MB),
    ], raw


def recorder(tools: Tools) -> tuple[list[Record], Record]:
    raw: Record = {"costs": [], "rounds": []}
    for _ in range(tools.rounds):
        raw["costs"].append(json.loads(tools.example("recorder_speed", "1000000")))
    steps = 256
    train = "train --nproc 2 --pin-cores --quiet --epochs 4 --steps-per-epoch 64 --warmup-steps 10 --json run.json"
    profile = f"--profile --profile-wait 0 --profile-warmup 0 --profile-active {steps}"
    with tempfile.TemporaryDirectory(prefix="traces_") as scratch:
        for number in range(1, tools.rounds + 1):
            sample = {}
            # The order of the two changes from round to round.
            for kind in ("off", "on") if number % 2 else ("on", "off"):
                tools.paceline(f"{train} {profile if kind == 'on' else ''}", Path(scratch))
                summary = json.loads(Path(scratch, "run.json").read_text())
                sample[kind] = {key: summary[key] for key in ("steps", "step_ms_median", "step_ms_p99")}
            raw["rounds"].append(sample)
            say(f"recorder: round {number} of {tools.rounds}: {sample['off']['step_ms_median']:.3f} ms off, "
                f"{sample['on']['step_ms_median']:.3f} ms on")
        newest = max(Path(scratch, "profile/ddp/rank_0").iterdir(), key=lambda file: file.stat().st_mtime)
        with gzip.open(newest, "rt") as file:
            events = json.load(file)["traceEvents"]
    # The file has the recorded events, plus what the writer adds to a kernel: operator, launch, arrow.
    added = {"cpu_op", "cuda_runtime", "ac2g"}
    num_recorded = sum(1 for event in events if event["ph"] != "M" and event.get("cat") not in added)
    num_steps = sum(1 for event in events if event["name"].startswith("ProfilerStep#"))
    per_step = num_recorded / num_steps
    raw |= {"recorded_events_per_step": per_step, "profiled_steps": num_steps}
    on_ns = statistics.median(one["on_ns_per_event"] for one in raw["costs"])
    shares = [per_step * on_ns / 1e6 / one["off"]["step_ms_median"] * 100 for one in raw["rounds"]]
    ratios = [one["on"]["step_ms_median"] / one["off"]["step_ms_median"] for one in raw["rounds"]]
    return [
        held("a million events", "seconds to write them", [one["write_s"] for one in raw["costs"]], "< 2", lambda value: value < 2),
        held("CNN, 2 ranks", "events x their cost, % of a step", shares, "<= 1", lambda value: value <= 1),
        held("CNN, 2 ranks", "step with the recorder over without", ratios, "1 within the range, or <= 1.01",
             lambda value: value <= 1.01 or min(ratios) <= 1 <= max(ratios)),
    ], raw


PARTS = {
    "hta": hta, "torch_cpu": torch_cpu, "tensorboard": tensorboard, "perfetto": perfetto, "speed": speed, "many": many,
    "recorder": recorder,
}


def outcome(case: str, measure: str, value: float, bar: str, met: bool, compared: int | None = None) -> Record:
    """A result that is counted once."""
    of = {} if compared is None else {"compared": compared}
    return {"case": case, "measure": measure, "values": [value], "median": value, "bar": bar, "met": met} | of


def held(case: str, measure: str, values: list[float], bar: str, met: object) -> Record:
    """The median of several measurements, compared with its bar."""
    median = statistics.median(values)
    return {"case": case, "measure": measure, "values": values, "median": median, "bar": bar, "met": bool(met(median))}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(results: Sequence[Record]) -> str:
    rows = [("part", "case", "measure", "value [min-max]", "bar", "")]
    for result in results:
        values = result["values"]
        value = f"{result['median']:.4g}"
        if len(values) > 1:
            value += f" [{min(values):.4g}-{max(values):.4g}]"
        if "compared" in result:
            value += f" of {result['compared']}"
        rows.append((result["part"], result["case"], result["measure"], value, result["bar"], "MET" if result["met"] else "MISSED"))
    return aligned(rows, left={0, 1, 2, 5})


def main() -> int:
    arguments = parse_arguments()
    try:
        tools = Tools(arguments)
        if arguments.fixtures:
            make_fixtures(tools)
            return 0
        versions = tools.versions()
    except RunFailed as error:
        say(f"error: {error}")
        return 1
    results: list[Record] = []
    raw: Record = {}
    failures: list[str] = []
    for part in arguments.parts:
        try:
            found, raw[part] = PARTS[part](tools)
            results += [{"part": part} | result for result in found]
        except RunFailed as error:
            failures.append(f"{part}: {error}")
            say(f"error: {part}: {error}")
    record = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions,
        "commands": tools.commands,
        "results": results,
        "failures": failures,
        "raw": raw,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(results))
    print(f"Raw records: {shown(arguments.out)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
