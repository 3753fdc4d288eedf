"""Commands with too little memory, too few threads or too few file descriptors: every shortage must end as an error.

    cargo build --release
    python3 bench/scarcity.py                                  # all parts
    python3 bench/scarcity.py --parts memory --steps 100

The commands are a short training run of two ranks over each of three transports, a sweep of two runs, and the analysis
of two traces. Each part first finds out how much of a resource a command needs, by halving. It then runs the command with
limits in even steps from almost nothing to that amount.

`memory`: the address space of every process (RLIMIT_AS). `threads`: the threads and processes of a user who has no others
(RLIMIT_NPROC; needs root, to become that user, and is left out otherwise). `descriptors`: the open files of every process
(RLIMIT_NOFILE).

A trial is good if the command ends within the limit of time, with exit code 0, 1, 2 or 3, prints no panic, and leaves no
process and no half-written file. Where it fails, it has to say why; the last line of its errors is recorded. Two kinds of
ends are counted by themselves, because the program can do nothing about them. `not loaded`: the system has no room for the
program. `aborted`: the standard library of Rust aborts a process that is refused a small allocation ("memory allocation of
64 bytes failed"), and so does the library that multiplies matrices, which takes some MB per thread. Nothing may be left then
either, and if a rank aborts, its launcher has to name it.

Prints a line for each part and for each trial that was not good, and writes all trials to `results/scarcity.json`. The exit
code is 1 if a trial was not good. Only the standard library is needed.
"""
import argparse
import collections
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from common import Record, program, provenance

HANGS_S = 60.0
# A user with no processes of their own.
USER = 54321
RUN = "--channels 4 --hidden 8 --samples 64 --batch-size 8 --epochs 1 --lr 0.001 --nproc 2"
TRAIN = f"train {RUN} --save saved --timeout 20 --tensorboard --transport"
COMMANDS = {
    "thread": f"{TRAIN} thread",
    "shm": f"{TRAIN} shm",
    "tcp": f"{TRAIN} tcp",
    "sweep": f"sweep {RUN} --transport thread --vary seed=1,2 --rounds 1 --output out",
    "analyze": "analyze {traces} --output out",
}
MARK = "PACELINE_SCARCITY"
LOADER = "error while loading shared libraries"
ABORT = "memory allocation of"

# The limit, and the range of amounts in which the smallest sufficient one lies.
PARTS = {
    "memory": (resource.RLIMIT_AS, 1 << 20, 1 << 36),
    "threads": (resource.RLIMIT_NPROC, 0, 256),
    "descriptors": (resource.RLIMIT_NOFILE, 3, 512),
}


def left_over(mark: str) -> list[int]:
    """The processes that a run has left, found by a variable of their environment. They are killed."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            is_ours = wanted in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if is_ours:
            found.append(int(folder.name))
            os.kill(int(folder.name), signal.SIGKILL)
    return found


def run(binary: Path, name: str, traces: str, part: str, amount: int) -> Record:
    limit = PARTS[part][0]
    mark = uuid.uuid4().hex
    words = [binary, *COMMANDS[name].format(traces=traces).split()]
    with tempfile.TemporaryDirectory(prefix="scarcity_") as folder:
        user = {}
        if part == "threads":
            os.chown(folder, USER, USER)
            user = {"user": USER, "group": USER, "extra_groups": []}
        process = subprocess.Popen(
            words, cwd=folder, env=os.environ | {MARK: mark, "HOME": folder}, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            preexec_fn=lambda: resource.setrlimit(limit, (amount, amount)), **user,
        )
        try:
            output, errors = process.communicate(timeout=HANGS_S)
            hangs = False
        except subprocess.TimeoutExpired:
            hangs = True
        left = left_over(mark)
        if hangs:
            output, errors = process.communicate()
        partial = [path.name for path in Path(folder).rglob("*.partial")]
    # A sweep goes on after a run that fails, and says why in its table.
    told = errors if errors.strip() else "\n".join(line for line in output.splitlines() if "failed" in line)
    told = told.replace(traces, "TRACES").replace(str(binary), binary.name)
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    trial: Record = {"command": name, part: amount, "code": process.returncode, "error": lines[-1] if lines else ""}
    code = process.returncode
    # Without room for the dynamic loader or the first stack, the kernel kills the program before its first instruction.
    if LOADER in errors or (code < 0 and not lines):
        kind, good = "not loaded", not hangs and not left
    elif ABORT in errors:
        # The process that was started has aborted, or a rank, whose launcher or sweep says so.
        kind = "aborted"
        good = not hangs and not left and (code == -signal.SIGABRT or code in (1, 134) and "SIGABRT" in errors)
    else:
        kind = "done" if code == 0 else "refused"
        good = not hangs and not left and code in (0, 1, 2, 3) and "panicked" not in errors and (code == 0 or bool(lines))
    good = good and not partial
    trial |= {"kind": "hangs" if hangs else kind, "left": len(left), "good": good}
    return trial if good else trial | {"errors": (output + errors)[-3000:]}


def enough(binary: Path, name: str, traces: str, part: str) -> int:
    """The smallest amount with which a command succeeds."""
    _, low, high = PARTS[part]
    while high - low > max(1, high // 64):
        middle = (low + high) // 2
        if run(binary, name, traces, part, middle)["code"] == 0:
            high = middle
        else:
            low = middle
    return high


def main() -> int:
    parser = argparse.ArgumentParser(description="Run with too little of everything.")
    parser.add_argument("--paceline", type=Path, default=Path("target/release/paceline"), metavar="PATH")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="(default: all)")
    parser.add_argument("--commands", nargs="+", choices=list(COMMANDS), default=list(COMMANDS), help="(default: all)")
    parser.add_argument("--steps", type=int, default=40, help="limits per part and command (default: 40)")
    parser.add_argument("--out", type=Path, default=Path("results/scarcity.json"), metavar="FILE")
    arguments = parser.parse_args()
    binary = program(parser, "--paceline", arguments.paceline)
    record: Record = {
        **provenance(),
        "parts": {},
    }
    folder = tempfile.TemporaryDirectory(prefix="scarcity_traces_")
    os.chmod(folder.name, 0o755)
    profiled = f"train {RUN} --transport thread --profile --profile-active 1 --quiet"
    subprocess.run([binary, *profiled.split()], cwd=folder.name, check=True, stderr=subprocess.DEVNULL)
    traces = f"{folder.name}/profile/ddp"
    for part in arguments.parts:
        if part == "threads" and os.getuid() != 0:
            print("threads: left out, because only root can become another user")
            continue
        trials = []
        for name in arguments.commands:
            most, least = enough(binary, name, traces, part), PARTS[part][1]
            amounts = sorted({least + (most - least) * step // arguments.steps for step in range(arguments.steps + 1)})
            for amount in amounts:
                trials.append(run(binary, name, traces, part, amount))
                if not trials[-1]["good"]:
                    print(json.dumps(trials[-1], indent=1), flush=True)
        kinds = collections.Counter(of["kind"] for of in trials)
        num_good = sum(of["good"] for of in trials)
        print(f"{part}: {num_good} of {len(trials)} good; {', '.join(f'{n} {k}' for k, n in kinds.items())}", flush=True)
        record["parts"][part] = {"good": num_good, "kinds": dict(kinds), "trials": trials}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(part["good"] < len(part["trials"]) for part in record["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
