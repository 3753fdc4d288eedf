"""Faults that a run must survive, or must end with by naming the right rank.

    cargo build --release
    python3 bench/faults.py                                   # all parts
    python3 bench/faults.py --parts kills --times 300

`kills`: kill -9 of a random rank of a training run at a random moment: while the ranks meet, train, save or end. 2 to
5 ranks, over shm, tcp and hybrid. The launcher must name the killed rank and exit with 137 within a second.

`suspensions`: the launcher and all ranks are stopped for longer than the time limit of the ranks, and then go on. The
run must succeed.

`readers`: nobody reads what two ranks print. Either a rank is killed, or the launcher gets SIGTERM. The launcher must
exit, with the code of that signal.

Prints a line for each part and for each trial that was not good, and writes all trials to `results/faults.json`. The exit
code is 1 if a trial was not good. Only the standard library is needed.
"""
import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import Record, program, provenance

HANGS_S = 30.0
# How soon after the signal the launcher must have ended.
BAR_S = 1.0
TRAIN = (
    "train --channels 4 --hidden 8 --samples 400 --batch-size 8 --save saved --save-every 5 --lr 0.001 --quiet"
)
NAMED = re.compile(r"^paceline: rank (\d+) \(process \d+\) (.*?) after", re.MULTILINE)


def parent_of(stat: Path) -> int:
    """The parent by /proc/PID/stat, whose second field may have any characters; -1 if the process is gone."""
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def ranks_of(launcher: int) -> dict[int, int]:
    """The processes of the ranks that this launcher has started, by rank. (Some kernels have no list of children.)"""
    found = {}
    children = [stat.parent.name for stat in Path("/proc").glob("[0-9]*/stat") if parent_of(stat) == launcher]
    for child in children:
        try:
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for variable in variables:
            if variable.startswith(b"RANK="):
                found[int(variable[5:])] = int(child)
    return found


def wait_for_ranks(launcher: subprocess.Popen, count: int) -> dict[int, int]:
    """Waits until all ranks have started; empty if the launcher ends before."""
    deadline = time.monotonic() + HANGS_S
    while time.monotonic() < deadline and launcher.poll() is None:
        ranks = ranks_of(launcher.pid)
        if len(ranks) == count:
            return ranks
        time.sleep(0.001)
    return {}


def start(binary: Path, words: list[str], folder: str, **streams: object) -> subprocess.Popen:
    return subprocess.Popen([binary, *words], cwd=folder, start_new_session=True, **streams)


def ended(process: subprocess.Popen) -> float | None:
    """The moment at which a process has ended; None, and a kill, if it hangs."""
    try:
        process.wait(HANGS_S)
        return time.monotonic()
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def kill(binary: Path, chance: random.Random) -> Record:
    count = chance.randint(2, 5)
    transport = chance.choice(["shm", "tcp", "hybrid"] if count == 4 else ["shm", "tcp"])
    victim, delay = chance.randrange(count), chance.uniform(0, 1.0)
    trial: Record = {"ranks": count, "transport": transport, "victim": victim, "delay_s": round(delay, 3)}
    with tempfile.TemporaryDirectory(prefix="faults_") as folder:
        words = [*TRAIN.split(), "--epochs", "60", "--nproc", str(count), "--transport", transport]
        process = start(binary, words, folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        ranks = wait_for_ranks(process, count)
        time.sleep(delay)
        try:
            os.kill(ranks[victim], signal.SIGKILL)
        except (KeyError, ProcessLookupError):
            pass
        signalled = time.monotonic()
        end = ended(process)
        errors = process.stderr.read() if process.stderr else ""
    named = NAMED.findall(errors)
    trial["code"] = process.returncode
    trial["s"] = None if end is None else round(end - signalled, 3)
    if process.returncode == 0:
        # The rank had ended before the signal.
        return trial | {"phase": "over", "good": True}
    right = named == [(str(victim), "was killed by SIGKILL")]
    good = end is not None and end - signalled < BAR_S and process.returncode == 137 and right
    return trial | {"good": good} | ({} if good else {"errors": errors[-2000:]})


def suspend(binary: Path, chance: random.Random) -> Record:
    count, transport = chance.randint(2, 4), chance.choice(["shm", "tcp"])
    delay = chance.uniform(0.3, 1.0)
    trial: Record = {"ranks": count, "transport": transport, "delay_s": round(delay, 3)}
    with tempfile.TemporaryDirectory(prefix="faults_") as folder:
        # Steps that take long enough for the run to be stopped in the middle.
        flags = f"--steps 60 --link 1gbit,5ms --timeout 2 --nproc {count} --transport {transport}"
        words = [*TRAIN.split(), *flags.split()]
        process = start(binary, words, folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        ranks = wait_for_ranks(process, count)
        time.sleep(delay)
        everyone = [process.pid, *ranks.values()]
        chance.shuffle(everyone)
        for order, pause in ((signal.SIGSTOP, 3.0), (signal.SIGCONT, 0.0)):
            for pid in everyone:
                os.kill(pid, order)
            time.sleep(pause)
        end = ended(process)
        errors = process.stderr.read() if process.stderr else ""
    good = end is not None and process.returncode == 0
    return trial | {"code": process.returncode, "good": good} | ({} if good else {"errors": errors[-2000:]})


def stuck_reader(binary: Path, chance: random.Random) -> Record:
    how = chance.choice(["rank killed", "SIGTERM"])
    trial: Record = {"how": how}
    with tempfile.TemporaryDirectory(prefix="faults_") as folder:
        script = "yes & yes >&2 & wait"
        words = ["launch", "-n", "2", "--grace", "0.2", "--", "sh", "-c", script]
        process = start(binary, words, folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        ranks = wait_for_ranks(process, 2)
        time.sleep(chance.uniform(0.1, 0.5))
        signalled = time.monotonic()
        if how == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        else:
            os.kill(ranks[chance.randrange(2)], signal.SIGKILL)
        end = ended(process)
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()
    expected = 143 if how == "SIGTERM" else 137
    good = end is not None and process.returncode == expected
    trial["s"] = None if end is None else round(end - signalled, 3)
    return trial | {"code": process.returncode, "good": good}


PARTS: dict[str, tuple[Callable[[Path, random.Random], Record], int]] = {
    "kills": (kill, 300),
    "suspensions": (suspend, 100),
    "readers": (stuck_reader, 200),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Inject faults into runs.")
    parser.add_argument("--paceline", type=Path, default=Path("target/release/paceline"), metavar="PATH")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="(default: all)")
    parser.add_argument("--times", type=int, help="trials of each part (default: 300, 100 and 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/faults.json"), metavar="FILE")
    arguments = parser.parse_args()
    binary = program(parser, "--paceline", arguments.paceline)
    record: Record = {
        **provenance(),
        "seed": arguments.seed,
        "parts": {},
    }
    for part in arguments.parts:
        trial, times = PARTS[part]
        chance = random.Random(f"{part} {arguments.seed}")
        trials = []
        for _ in range(arguments.times or times):
            trials.append(trial(binary, chance))
            if not trials[-1]["good"]:
                print(json.dumps(trials[-1], indent=1), flush=True)
        num_good = sum(of["good"] for of in trials)
        times_s = [of["s"] for of in trials if of.get("s") is not None]
        longest = f", longest {max(times_s):.2f} s" if times_s else ""
        over = sum(of.get("phase") == "over" for of in trials)
        print(f"{part}: {num_good} of {len(trials)} good{longest}" + (f", {over} over before" if over else ""), flush=True)
        record["parts"][part] = {"good": num_good, "trials": trials}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(part["good"] < len(part["trials"]) for part in record["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
