"""Kills a random rank at a random moment, many times, and checks what the other ranks report.

    cargo build --release
    cargo build --release --examples -p paceline-collectives
    python3 bench/kill_ranks.py            # kill -9, 200 times, over shm and tcp
    python3 bench/kill_ranks.py --stop     # SIGSTOP, with a time limit of 2 s

Each trial starts `endless` (all-reduces of random sizes) by `paceline launch`, waits until all ranks
work, and signals one of them. A trial is good if every other rank names the dead rank, the operation, its
number and its bytes within a second (for a stopped rank, within a second after the time limit), if the
launcher ends with a code that is not 0, if each of the other ranks has written its last operations, and if
no process, socket, shared memory or other file is left.

With `--launcher none` the script starts the ranks itself, so that no launcher ends the others before they
have reported everything. This tests the library alone.

Prints a summary and writes every trial to `results/kill_ranks.json` (`results/stop_ranks.json` with
`--stop`). The exit code is 1 if a trial failed. Only the standard library is needed.
"""
import argparse
import datetime
import json
import os
import random
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from common import commit, machine

ROOT = Path(__file__).resolve().parent.parent
# A trial that takes longer counts as hanging.
HANGS_S = 30.0
# How soon after the signal, or after the time limit, every rank must have reported the dead rank.
BAR_S = 1.0
STOP_LIMIT_S = 2
# How long the kernel may take to clear up after a launcher that has ended.
GRACE_S = 0.3
# The environment variable by which every process of a trial is recognized.
TOKEN = "KILL_RANKS_TRIAL"

READY = re.compile(r"rank (\d+) is process (\d+)")
NAMED = [
    # Killed: which rank reports, which died, and in which operation.
    re.compile(r"rank (?P<by>\d+): rank (?P<victim>\d+) died during (?P<op>\w+) #(?P<seq>\d+) \((?P<bytes>\d+) bytes\)"),
    # Stopped: the first rank that notices, and the ranks that it tells.
    re.compile(
        r"rank (?P<by>\d+): (?P<op>\w+) #(?P<seq>\d+) \((?P<bytes>\d+) bytes\) timed out after [^,]*, "
        r"waiting for ranks \[(?P<victim>\d+)[\],]"
    ),
    re.compile(
        r"rank (?P<by>\d+): .*stopped waiting in (?P<op>\w+) #(?P<seq>\d+), "
        r"where ranks \[(?P<victim>\d+)[\],]"
    ),
]


class Reader(threading.Thread):
    """Reads one stream and records when each line came."""

    def __init__(self, stream, trial: "Trial"):
        super().__init__(daemon=True)
        self.stream, self.trial = stream, trial
        self.start()

    def run(self) -> None:
        for line in self.stream:
            self.trial.hear(time.monotonic(), line.rstrip("\n"))


class Trial:
    """One start of all ranks, and one signal."""

    def __init__(self, arguments: argparse.Namespace, transport: str, chance: random.Random):
        self.arguments, self.transport = arguments, transport
        self.victim = chance.randrange(arguments.ranks)
        # Waits for a random moment within some tens of all-reduces.
        self.pause_s = chance.uniform(0, 0.3)
        self.token = secrets.token_hex(8)
        self.lines: list[tuple[float, str]] = []
        self.processes: dict[int, int] = {}
        self.named: dict[int, dict] = {}
        self.ready = threading.Event()

    def hear(self, at: float, line: str) -> None:
        self.lines.append((at, line))
        if match := READY.search(line):
            self.processes[int(match[1])] = int(match[2])
            if len(self.processes) == self.arguments.ranks:
                self.ready.set()
        for pattern in NAMED:
            # Lines that the launcher repeats at the end are indented.
            if (match := pattern.search(line)) and not line.startswith(" "):
                self.named.setdefault(int(match["by"]), {"at": at, "line": line} | match.groupdict())

    def start(self, folder: str) -> list[subprocess.Popen]:
        limit = ["--timeout", str(STOP_LIMIT_S)] if self.arguments.stop else []
        program = [str(self.arguments.endless), "--transport", self.transport, *limit]
        ranks = self.arguments.ranks
        environment = os.environ | {TOKEN: self.token, "TMPDIR": folder}
        options = dict(cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if self.arguments.launcher == "paceline":
            command = [str(self.arguments.paceline), "launch", "-n", str(ranks), "--", *program]
            return [subprocess.Popen(command, env=environment, **options)]
        shared = environment | {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            # The port is only a name: no process listens on it.
            "MASTER_PORT": str(random.randrange(20_000, 60_000)),
            "PACELINE_SECRET": self.token,
        }
        place = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        return [subprocess.Popen(program, env=shared | own, **options) for own in place]

    def run(self) -> dict:
        before = traces()
        with tempfile.TemporaryDirectory(prefix="kill_ranks_") as folder:
            started = self.start(folder)
            readers = [Reader(stream, self) for child in started for stream in (child.stdout, child.stderr)]
            is_ready = self.ready.wait(HANGS_S)
            signalled = time.monotonic()
            if is_ready:
                time.sleep(self.pause_s)
                signalled = time.monotonic()
                os.kill(self.processes[self.victim], signal.SIGSTOP if self.arguments.stop else signal.SIGKILL)
            codes, ended = self.wait(started, signalled)
            time.sleep(GRACE_S)
            processes = processes_of(self.token)
            for process in processes:
                os.kill(process, signal.SIGKILL)
            for reader in readers:
                reader.join(HANGS_S)
            # The last operations of the surviving ranks stay on purpose, in a folder that the launcher names.
            dumps = {dump.name for dump in Path(folder).glob("paceline-*/*.jsonl")}
            files = [file for file in Path(folder).rglob("*") if file.is_file() and file.suffix != ".jsonl"]
            left = {"processes": len(processes), "files": len(files)}
            left |= left_outside(before)
        return self.verdict(is_ready, signalled, ended, codes, left, dumps)

    def wait(self, started: list[subprocess.Popen], signalled: float) -> tuple[list, float]:
        """Waits for the started processes, but not for a rank that this script has stopped."""
        deadline = signalled + HANGS_S
        by_hand = self.arguments.launcher == "none"
        awaited = [child for rank, child in enumerate(started) if not (by_hand and rank == self.victim)]
        for child in awaited:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
        ended = time.monotonic()
        for child in started:
            child.kill()
            child.wait()
        return [child.returncode for child in awaited], ended

    def verdict(self, is_ready: bool, signalled: float, ended: float, codes: list, left: dict, dumps: set) -> dict:
        others = [rank for rank in range(self.arguments.ranks) if rank != self.victim]
        due = STOP_LIMIT_S if self.arguments.stop else 0
        reports = {
            rank: {
                "after_s": round(report["at"] - signalled, 4),
                "victim": int(report["victim"]),
                "operation": report["op"],
                "seq": int(report["seq"]),
                "line": report["line"],
            }
            for rank, report in self.named.items()
        }
        wrong = []
        if not is_ready:
            wrong.append("the ranks did not start")
        for rank in others:
            report = reports.get(rank)
            if report is None:
                wrong.append(f"rank {rank} named nobody")
            elif report["victim"] != self.victim:
                wrong.append(f"rank {rank} named rank {report['victim']}")
            elif report["after_s"] > due + BAR_S:
                wrong.append(f"rank {rank} took {report['after_s']} s")
            if self.arguments.launcher == "paceline" and f"world-rank{rank}.jsonl" not in dumps:
                wrong.append(f"rank {rank} left no record of its operations")
        if any(code == 0 for code in codes):
            wrong.append("an exit code is 0")
        if ended - signalled > HANGS_S:
            wrong.append("it hung")
        wrong += [f"left behind: {kind} {what}" for kind, what in left.items() if what]
        trial = {
            "transport": self.transport,
            "victim": self.victim,
            "pause_s": round(self.pause_s, 4),
            "reports": reports,
            "named_s": max((reports[rank]["after_s"] for rank in others if rank in reports), default=None),
            "ended_s": round(ended - signalled, 4),
            "exit_codes": codes,
            "left": left,
            "wrong": wrong,
        }
        if wrong:
            trial["output"] = [line for _, line in self.lines]
        return trial


def traces() -> dict[str, dict[str, str]]:
    """What a run might leave outside its own folder, by name, with the number of each socket."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {
        "sockets": {row[7]: row[6] for row in rows if len(row) > 7 and row[7].startswith("@paceline")},
        "shared_memory": {name: "" for name in os.listdir("/dev/shm") if "paceline" in name},
    }


def held_by_others() -> set[str]:
    """The numbers of all sockets that some process holds. The processes of the trial have ended by now."""
    held = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            held.update(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
        except OSError:
            # Closed, or of another user.
            continue
    return held


def left_outside(before: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    """What exists now and did not exist before, except what other programs use."""
    now = traces()
    fresh = {kind: {name: number for name, number in now[kind].items() if name not in before[kind]} for kind in now}
    held = held_by_others() if fresh["sockets"] else set()
    # What has vanished since then belonged to another program that has ended.
    still = traces()
    return {
        kind: sorted(name for name, number in names.items() if number not in held and name in still[kind])
        for kind, names in fresh.items()
    }


def processes_of(token: str) -> list[int]:
    """The processes that were started with this token in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if token.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                # It has ended, or belongs to another user.
                continue
    return found


def summary(trials: list[dict]) -> dict:
    def spread(values: list[float]) -> dict:
        return {"median": statistics.median(values), "max": max(values)} if values else {}

    return {
        "trials": len(trials),
        "good": sum(not trial["wrong"] for trial in trials),
        "named_s": spread([trial["named_s"] for trial in trials if trial["named_s"] is not None]),
        "ended_s": spread([trial["ended_s"] for trial in trials]),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill a random rank at a random moment, many times.")
    parser.add_argument("--paceline", type=Path, default=ROOT / "target/release/paceline", metavar="PATH")
    parser.add_argument("--endless", type=Path, default=ROOT / "target/release/examples/endless", metavar="PATH")
    parser.add_argument("--times", type=int, default=200, help="trials, shared by the transports (default: 200)")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="ranks of each trial (default: 4)")
    parser.add_argument("--transports", nargs="+", default=["shm", "tcp"], choices=["shm", "tcp"])
    parser.add_argument("--launcher", default="paceline", choices=["paceline", "none"])
    parser.add_argument("--stop", action="store_true", help="stop the rank instead of killing it")
    parser.add_argument("--seed", type=int, default=1, help="of the ranks and moments (default: 1)")
    parser.add_argument("--out", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    for program in (arguments.paceline, arguments.endless):
        if not program.exists():
            parser.error(f"there is no {program}; build it first, see the head of this script")
    arguments.paceline, arguments.endless = arguments.paceline.resolve(), arguments.endless.resolve()
    if arguments.out is None:
        arguments.out = ROOT / "results" / ("stop_ranks.json" if arguments.stop else "kill_ranks.json")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    chance = random.Random(arguments.seed)
    trials = []
    for number in range(arguments.times):
        transport = arguments.transports[number % len(arguments.transports)]
        trial = Trial(arguments, transport, chance).run()
        trials.append(trial)
        for what in trial["wrong"]:
            print(f"trial {number}, {transport}, rank {trial['victim']}: {what}")
    by_transport = {
        transport: summary([trial for trial in trials if trial["transport"] == transport])
        for transport in arguments.transports
    }
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "commit": commit(),
        "signal": "SIGSTOP" if arguments.stop else "SIGKILL",
        "time_limit_s": STOP_LIMIT_S if arguments.stop else None,
        "ranks": arguments.ranks,
        "launcher": arguments.launcher,
        "seed": arguments.seed,
        "summary": by_transport,
        "trials": trials,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    for transport, line in by_transport.items():
        print(f"{transport}: {line['good']} of {line['trials']} as they should be", end="")
        for what, key in (("named by all", "named_s"), ("all ended", "ended_s")):
            if line[key]:
                print(f"; {what} after {line[key]['median']:.3f} s, at most {line[key]['max']:.3f} s", end="")
        print()
    print(f"raw records: {arguments.out}")
    return 0 if all(line["good"] == line["trials"] for line in by_transport.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
