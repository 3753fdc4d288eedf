"""Shared code of the benchmark scripts: arguments, running a program, describing the machine and the commit, records and tables."""
import argparse
import atexit
import datetime
import itertools
import json
import math
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUN_SECONDS = 900.0

Record = dict[str, Any]


class RunFailed(SystemExit):
    """A run gave no result. The message says which run, and why. The script ends with it, unless it has other runs to make."""


def shown(path: Path) -> str:
    """A path in a form that is useful to readers of the results: relative to the repository, or only its name."""
    path = Path(os.path.abspath(path))
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def ended(command: Sequence[str | Path], folder: Path, timeout_s: float | None, **how: Any) -> tuple[int | None, Any, Any]:
    """The exit code of a command and what it printed. If it takes too long, it is killed with all its ranks, and has no code."""
    process = subprocess.Popen(command, cwd=folder, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how)
    try:
        streams = process.communicate(timeout=timeout_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        streams = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return None, *streams
    return process.returncode, *streams


def run(command: Sequence[str | Path], folder: Path, timeout_s: float) -> str:
    """Runs a command and returns its standard output."""
    name = shown(Path(command[0]))
    try:
        code, output, errors = ended(command, folder, timeout_s, text=True)
    except OSError as error:
        raise RunFailed(f"{name} cannot be started (see bench/README.md): {error}") from None
    if code is None:
        raise RunFailed(f"{name} took more than {timeout_s:.0f} s")
    if code != 0:
        last_lines = " | ".join(errors.strip().splitlines()[-3:])
        raise RunFailed(f"{name} ended with {code}: {last_lines}".replace(f"{ROOT}/", ""))
    return output


def spinning(core: int, nice: int) -> ExitStack:
    """Starts a program that takes turns with whatever else wants this core, until the stack is closed. Nice values decide the shares."""
    stack = ExitStack()
    spin = ["nice", "-n", str(nice), "taskset", "-c", str(core), sys.executable, "-c", "while True: pass"]
    stack.callback(stack.enter_context(subprocess.Popen(spin)).kill)
    return stack


def each(cases: Iterable[str], measure: Callable[[str], Any]) -> tuple[list[Any], list[str]]:
    """The results of cases, and the failures of others."""
    results, failures = [], []
    for case in cases:
        try:
            results.append(measure(case))
            print(f"{case}: measured", file=sys.stderr, flush=True)
        except RunFailed as error:
            failures.append(f"{case} could not be run: {error}")
    return results, failures


def train(binary: Path, flags: str, folder: Path | None = None) -> Record:
    """The summary of `paceline train`. The run writes into an empty folder, or into the given one."""
    with tempfile.TemporaryDirectory(prefix="train_") as empty:
        folder = folder or Path(empty)
        run([binary, "train", *shlex.split(flags), "--quiet", "--json", "train.json"], folder, RUN_SECONDS)
        return json.loads((folder / "train.json").read_text())


def toml(flags: str) -> str:
    """The flags of `paceline train` as a configuration file."""
    settings: dict[str, list[str]] = {}
    switches = {"on": "true", "off": "false"}
    for word in shlex.split(flags):
        if word.startswith("--"):
            values = settings.setdefault(word.removeprefix("--"), [])
        else:
            values.append(switches.get(word) or (word if re.fullmatch(r"[\d.]+", word) else json.dumps(word)))
    forms = {0: "true", 1: "{}"}
    return "".join(f"{key} = {forms.get(len(values), '[{}]').format(', '.join(values))}\n" for key, values in settings.items())


def machine() -> Record:
    def first(path: str, key: str) -> str:
        lines = Path(path).read_text().splitlines()
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "unknown")

    return {
        "cpu": first("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": first("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
    }


def commit(folder: Path = ROOT) -> str:
    """The commit that is checked out there, marked when the working tree differs from it."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def provenance() -> Record:
    """When, where and from which commit results are made: the first entries of a file of results."""
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"date": date, "machine": machine(), "commit": commit()}


def arguments_for(description: str, out: str, rounds: int = 5, has_peer: bool = False, has_program: bool = True, has_busy: bool = False) -> argparse.ArgumentParser:
    """The arguments that most scripts have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if has_program:
        parser.add_argument("--paceline", type=Path, default=ROOT / "target/release/paceline", metavar="PATH")
    if has_peer:
        parser.add_argument("--peer-python", type=Path, default=ROOT / ".peer/bin/python", metavar="PATH", help="a Python with torch")
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"(default: {rounds})")
    if has_busy:
        parser.add_argument("--busy", action="store_true", help="on a busy machine: all runs share core 0 with another program (FILE: ..._busy.json)")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / out, metavar="FILE", help=f"(default: results/{out})")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments. Programs keep their links, by which Python recognizes a virtual environment."""
    arguments = parser.parse_args()
    if getattr(arguments, "rounds", 1) < 1:
        parser.error("--rounds must be at least 1")
    if hasattr(arguments, "paceline"):
        arguments.paceline = program(parser, "--paceline", arguments.paceline)
    if hasattr(arguments, "peer_python"):
        arguments.peer_python = Path(os.path.abspath(arguments.peer_python))
    if getattr(arguments, "busy", False):
        arguments.out = arguments.out.with_stem(f"{arguments.out.stem}_busy")
        atexit.register(spinning(0, 0).close)
    return arguments


def program(parser: argparse.ArgumentParser, flag: str, path: Path) -> Path:
    """The absolute path of a program that a flag names. Ends the script if it is not there."""
    if not path.is_file():
        parser.error(f"{flag} {path}: no such file; bench/README.md says how to make it")
    return Path(os.path.abspath(path))


def write(path: Path, record: Any) -> None:
    """Writes a file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {shown(path)}", flush=True)


def ranged(values: Sequence[float], digits: int = 2) -> str:
    """The median, and the range."""
    return f"{statistics.median(values):,.{digits}f} [{min(values):,.{digits}f}-{max(values):,.{digits}f}]"


def interval(ratios: list[float]) -> Record:
    """The median of at least six ratios, and the 95 % interval of the median: two of the ratios, by the binomial distribution."""
    ordered, num = sorted(ratios), len(ratios)
    outside = list(itertools.accumulate(math.comb(num, i) / 2**num for i in range(num)))
    below = sum(2 * chance <= 1 - 0.95 for chance in outside) - 1
    low, high = ordered[below], ordered[num - 1 - below]
    return {"median": statistics.median(ordered), "low": low, "high": high, "half_width": (high - low) / 2}


def processes_with(variable: str) -> list[int]:
    """The processes in whose environment this text occurs."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            # It has ended, or belongs to another user.
            continue
    return found


def send(pids: Iterable[int], order: signal.Signals) -> None:
    """Sends a signal to those processes that still live."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, order)


def kill_with(variable: str) -> None:
    """Kills these processes, whatever their session, and those that they start meanwhile."""
    deadline = time.monotonic() + 10
    while (left := processes_with(variable)) and time.monotonic() < deadline:
        send(left, signal.SIGKILL)


def ranks_of(launcher: int) -> dict[int, int]:
    """The processes of the ranks that this launcher has started, by rank. (Some kernels have no list of children.)"""
    found: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The second field of `stat` may have any characters.
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (folder / "environ").read_bytes().split(b"\0") if parent == launcher else []
        except OSError:
            continue
        found |= {int(variable[5:]): int(folder.name) for variable in variables if variable.startswith(b"RANK=")}
    return found


def aligned(rows: Sequence[Sequence[str]], left: Collection[int]) -> str:
    """A table as text. Columns are aligned to the right, except those in `left`."""
    widths = [max(map(len, column)) for column in zip(*rows)]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths))
        return "  ".join(cell.ljust(width) if column in left else cell.rjust(width) for column, (cell, width) in cells).rstrip()

    return "\n".join(map(line, rows))
