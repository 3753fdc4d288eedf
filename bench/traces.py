"""Compares the analysis of traces with Holistic Trace Analysis, and measures its speed and memory, and the cost of the recorder.

    cargo build --release && cargo build --release -p paceline-analysis --examples
    python3 bench/traces.py                      # all parts
    python3 bench/traces.py --parts hta          # measures no time
    python3 bench/traces.py --fixtures           # makes traces of crates/analysis/tests/fixtures again

`hta`: HTA and paceline analyze the same traces: those of `paceline train --profile` on 2 and 4 ranks, on the processor and on the emulated
device, synthetic traces in the shape of PyTorch's on CUDA, and those of `--cuda-traces`, if given. The example `hta_agreement` compares every figure.

`speed`: `paceline analyze` against HTA on the same two traces of 100 MB, in turn; also the speed of the parser, and the memory for a trace of 1 GB.

`many`: the memory for 64 ranks with a trace of 100 MB each, all in one report, and how many events a second one core reads and analyzes of a
single one. The ranks share the events of one trace, so that they are made in a minute.

`recorder`: the cost of recording an event, the time to write a million of them, and the training step with and without the recorder, in turn.

HTA is installed into target/peers/hta, unless --hta-python names a Python that has it. Prints one table and writes the raw records to
`results/traces.json`. Exits with 1 if something could not be run.
"""
import gzip
import json
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

from common import ROOT, Record, RunFailed, aligned, arguments_for, parsed, provenance, ranged, run, shown, train, write

HTA_PACKAGES = ["traceinsight==0.6.1", "pandas<3", "setuptools<81"]
FIXTURES = ROOT / "crates/analysis/tests/fixtures"
EMULATED = "--device sim:copy=8gbit,33us,launch=20us --generate-on-host --pin-memory --non-blocking --copy-stream"
TRAIN = "--channels 8 16 --hidden 32 --samples 2000 --batch-size 32 --epochs 1 --profile --profile-active 5"
TRACE_MB = 100
LARGE_TRACE_MB = 1000
MANY_RANKS = 64
LIMIT_S = 1800


class Tools:
    """The programs."""

    def __init__(self, binary: Path, hta_python: Path | None, rounds: int) -> None:
        self.binary, self.rounds = binary, rounds
        self.hta_python = Path(os.path.abspath(hta_python)) if hta_python else make_hta_python()

    def example(self, name: str, *words: str | Path) -> str:
        program = self.binary.parent / "examples" / name
        if not program.is_file():
            raise RunFailed(f"{shown(program)} is missing; `cargo build --release -p paceline-analysis --examples` makes it")
        return run([program, *words], ROOT, LIMIT_S)

    def analyze(self, traces: Path, scratch: str) -> list[str | Path]:
        return [self.binary, "analyze", "--trace-dir", traces, "--output", Path(scratch, "report")]

    def write_hta(self, folder: Path) -> None:
        """Writes HTA's report on the traces in a folder into that folder."""
        for name, flags in [("hta.json", []), ("hta-rounded.json", ["--rounded"])]:
            (folder / name).write_text(run([self.hta_python, ROOT / "bench/peer/hta_report.py", *flags, folder], ROOT, LIMIT_S))


def make_hta_python() -> Path:
    folder = ROOT / "target/peers/hta"
    python = folder / "bin/python"
    if not (folder / "complete").is_file():
        say(f"installing {', '.join(HTA_PACKAGES)} into {shown(folder)}")
        run([sys.executable, "-m", "venv", folder], ROOT, LIMIT_S)
        run([python, "-m", "pip", "install", "--quiet", *HTA_PACKAGES], ROOT, LIMIT_S)
        (folder / "complete").touch()
    return python


# --- Traces -------------------------------------------------------------------------------------------------


def our_traces(tools: Tools, ranks: int, folder: Path, device: str = "") -> Path:
    folder.mkdir()
    train(tools.binary, f"{TRAIN} --nproc {ranks} {device}", folder)
    return folder / "profile/ddp"


def cuda_shaped(folder: Path, flags: str) -> Path:
    run([sys.executable, ROOT / "bench/peer/cuda_trace.py", "--out", folder, *flags.split()], ROOT, LIMIT_S)
    return folder


def large_trace(folder: Path, ranks: int, megabytes: int) -> Path:
    return cuda_shaped(folder, f"--ranks {ranks} --megabytes {megabytes} --layers 16 --plain")


def make_fixtures(tools: Tools) -> None:
    with tempfile.TemporaryDirectory(prefix="traces_") as name:
        scratch = Path(name)
        made = {f"paceline_{ranks}": our_traces(tools, ranks, scratch / f"ours_{ranks}") for ranks in (2, 4)}
        made["cuda_shaped"] = cuda_shaped(scratch / "cuda_shaped", "")
        for fixture, folder in made.items():
            tools.write_hta(folder)
            shutil.rmtree(FIXTURES / fixture, ignore_errors=True)
            shutil.copytree(folder, FIXTURES / fixture)


def hta(tools: Tools, cuda_traces: Path | None) -> tuple[list[Record], Record]:
    results, raw = [], {}
    with tempfile.TemporaryDirectory(prefix="traces_") as name:
        scratch = Path(name)
        cases = {}
        for ranks in (2, 4):
            cases[f"paceline, {ranks} ranks"] = our_traces(tools, ranks, scratch / f"ours_{ranks}")
            cases[f"paceline, {ranks} ranks, emulated device"] = our_traces(tools, ranks, scratch / f"emulated_{ranks}", EMULATED)
        for seed, flags in [(1, ""), (2, "--ranks 4 --steps 6")]:
            cases[f"synthetic, shape of CUDA, seed {seed}"] = cuda_shaped(scratch / f"cuda_{seed}", f"--seed {seed} {flags}")
        if cuda_traces:
            cases["PyTorch on CUDA"] = Path(shutil.copytree(cuda_traces, scratch / "cuda_given"))
        for case, folder in cases.items():
            tools.write_hta(folder)
            agreement = json.loads(tools.example("hta_agreement", folder))
            say(f"hta: {case}: {len(agreement['differences'])} of {agreement['compared']} figures differ")
            results.append(result(case, f"of {agreement['compared']} figures differ from HTA's", [len(agreement["differences"])]))
            raw[case] = {"hta": json.loads((folder / "hta.json").read_text()), "agreement": agreement}
    return results, raw


# --- Time and memory ----------------------------------------------------------------------------------------


def timed(command: Sequence[str | Path], folder: str) -> tuple[Record, str]:
    """Runs a command, and returns its time and its peak memory: that of its largest process as the kernel counts
    it, or, if larger, that of all its processes together as sampled."""
    with open(f"{folder}/stdout", "w+") as out, open(f"{folder}/stderr", "w+") as errors:
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
            raise RunFailed(f"{shlex.join(map(str, command))} ended with {process.returncode}: {errors.read()[-300:]}")
        peak = max(usage.ru_maxrss * 1024, together)
        return {"wall_s": seconds, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_rss_bytes": peak}, out.read()


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
        traces = large_trace(Path(scratch, "traces"), 2, TRACE_MB)
        theirs = [tools.hta_python, ROOT / "bench/peer/hta_report.py", "--only-breakdowns", traces]
        for number in range(1, tools.rounds + 1):
            ours, _ = timed(tools.analyze(traces, scratch), scratch)
            of_hta, printed = timed(theirs, scratch)
            raw["rounds"].append({"paceline": ours, "hta": of_hta | {"inside": json.loads(printed)}})
            say(f"speed: round {number} of {tools.rounds}: {ours['wall_s']:.2f} s; HTA {of_hta['wall_s']:.2f} s")
        trace = sorted(traces.rglob("*.json"))[0]
        for line in tools.example("parse_speed", trace, str(tools.rounds)).splitlines():
            raw["parse"].append(float(re.search(r"([\d.]+) MB/s of the parsing thread", line)[1]))
        shutil.rmtree(traces)
        large = large_trace(Path(scratch, "large"), 1, LARGE_TRACE_MB)
        raw["large"] = [timed(tools.analyze(large, scratch), scratch)[0] for _ in range(3)]
    rounds = raw["rounds"]
    # Python's start and imports are not counted against HTA; our whole process is counted against us.
    hta_s = [one["hta"]["inside"]["load_s"] + one["hta"]["inside"]["analyse_s"] for one in rounds]
    case = f"2 ranks, {TRACE_MB} MB each"
    return [
        result(case, "HTA's time over ours", [theirs / one["paceline"]["wall_s"] for theirs, one in zip(hta_s, rounds)]),
        # HTA reads each rank in a process of its own, so all of its processes count.
        result(case, "HTA's peak memory over ours", [one["hta"]["peak_rss_bytes"] / one["paceline"]["peak_rss_bytes"] for one in rounds]),
        result(case, "MB/s that one thread parses", raw["parse"]),
        result(f"{LARGE_TRACE_MB} MB", "seconds", [one["wall_s"] for one in raw["large"]]),
        result(f"{LARGE_TRACE_MB} MB", "peak memory of the analysis, MB", [one["peak_rss_bytes"] / 1e6 for one in raw["large"]]),
    ], raw


def many(tools: Tools) -> tuple[list[Record], Record]:
    with tempfile.TemporaryDirectory(prefix="traces_") as scratch:
        folder = large_trace(Path(scratch, "one"), 1, TRACE_MB)
        [trace] = folder.rglob("*.json")
        text = trace.read_bytes()
        on_one_core = ["taskset", "-c", "0", *tools.analyze(folder, scratch)]
        raw: Record = {"events": text.count(b'"ph": "'), "one": [timed(on_one_core, scratch)[0] for _ in range(tools.rounds)]}
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
        raw["many"] = [timed(tools.analyze(Path(scratch, "many"), scratch), scratch)[0] for _ in range(2)]
    case = f"{MANY_RANKS} ranks, {TRACE_MB} MB each"
    return [
        result("one rank, one core", "events per second", [raw["events"] / one["wall_s"] for one in raw["one"]]),
        result(case, "seconds", [one["wall_s"] for one in raw["many"]]),
        result(case, "peak memory of the analysis, MB", [one["peak_rss_bytes"] / 1e6 for one in raw["many"]]),
    ], raw


def recorder(tools: Tools) -> tuple[list[Record], Record]:
    flags = "--nproc 2 --pin-cores --epochs 4 --steps-per-epoch 64 --warmup-steps 10"
    profile = "--profile --profile-wait 0 --profile-warmup 0 --profile-active 256"
    raw: Record = {"costs": [json.loads(tools.example("recorder_speed", "1000000")) for _ in range(tools.rounds)], "rounds": []}
    with tempfile.TemporaryDirectory(prefix="traces_") as scratch:
        for number in range(tools.rounds):
            sample = {}
            # The order of the two changes from round to round.
            for kind in ("on", "off") if number % 2 else ("off", "on"):
                sample[kind] = train(tools.binary, f"{flags} {profile if kind == 'on' else ''}", Path(scratch))["step_ms_median"]
            raw["rounds"].append(sample)
        newest = max(Path(scratch, "profile/ddp/rank_0").iterdir(), key=lambda file: file.stat().st_mtime)
        with gzip.open(newest, "rt") as file:
            events = json.load(file)["traceEvents"]
    # The file has the recorded events, plus what the writer adds to a kernel: operator, launch, arrow.
    added = {"cpu_op", "cuda_runtime", "ac2g"}
    num_recorded = sum(event["ph"] != "M" and event.get("cat") not in added for event in events)
    per_step = num_recorded / sum(event["name"].startswith("ProfilerStep#") for event in events)
    on_ns = statistics.median(one["on_ns_per_event"] for one in raw["costs"])
    return [
        result("a million events", "seconds to write them", [one["write_s"] for one in raw["costs"]]),
        result("CNN, 2 ranks", "events x their cost, % of a step", [per_step * on_ns / 1e6 / one["off"] * 100 for one in raw["rounds"]]),
        result("CNN, 2 ranks", "step with the recorder over without", [one["on"] / one["off"] for one in raw["rounds"]]),
    ], raw


PARTS = {"hta": hta, "speed": speed, "many": many, "recorder": recorder}


def result(case: str, measure: str, values: list[float]) -> Record:
    return {"case": case, "measure": measure, "values": values}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = arguments_for(__doc__, "traces.json")
    parser.add_argument("--hta-python", type=Path, metavar="PATH", help="a Python that has HTA")
    parser.add_argument("--cuda-traces", type=Path, metavar="DIR", help="traces that PyTorch wrote on CUDA, to compare too")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: all)")
    parser.add_argument("--fixtures", action="store_true", help="make stored traces again, and nothing else")
    arguments = parsed(parser)
    results, raw = [], {}
    try:
        tools = Tools(arguments.paceline, arguments.hta_python, arguments.rounds)
        if arguments.fixtures:
            make_fixtures(tools)
            return 0
        for part in arguments.parts:
            found, raw[part] = hta(tools, arguments.cuda_traces) if part == "hta" else PARTS[part](tools)
            results += found
    except RunFailed as error:
        say(f"error: {error}")
        return 1
    rows = [(of["case"], of["measure"], ranged(of["values"], 3)) for of in results]
    print(aligned([("case", "measure", "value [min-max]"), *rows], left={0, 1, 2}))
    write(arguments.out, provenance() | {"results": results, "raw": raw})
    return 0


if __name__ == "__main__":
    sys.exit(main())
