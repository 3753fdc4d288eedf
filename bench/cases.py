"""The cases in which an earlier version lost, hung or blamed wrongly: what two builds do with each of them.

    python3 bench/cases.py --old PATH --new target/release/paceline     # as root, for the cases that need it

Each case is a short story with a program of either build. Its outcome is a few words, the same for every run of a build
unless the fault comes by chance; such cases are tried several times. Prints a table and writes `results/cases.json`. The
exit code is 1 if a case of the new build does not end as it should. Only the standard library is needed.
"""
import argparse
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from common import Record, aligned, program, provenance
from faults import ranks_of, wait_for_ranks

HANGS_S = 20.0
TINY = "--model mlp --input-dim 16 --hidden-dim 16 --output-dim 4 --num-layers 1 --batch-size 4 --steps-per-epoch 1"
LONG = "--model mlp --input-dim 16 --hidden-dim 16 --output-dim 4 --num-layers 1 --batch-size 4 --epochs 1000000 --steps-per-epoch 50"
BLAMED = re.compile(r"^paceline: rank (\d+) .*?(exited with code \d+|was killed by \w+|is stopped|ended)", re.MULTILINE)


class Case:
    """A build in an empty folder."""

    def __init__(self, binary: Path, folder: Path) -> None:
        self.binary, self.folder = binary, folder

    def start(self, words: str, **rest) -> subprocess.Popen:
        rest = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | rest
        return subprocess.Popen([self.binary, *words.split()], cwd=self.folder, start_new_session=True, **rest)

    def end(self, process: subprocess.Popen) -> tuple[str | int, str]:
        """The exit code, or "hangs"; and what was said on standard error."""
        try:
            _, errors = process.communicate(timeout=HANGS_S)
            return process.returncode, errors or ""
        except subprocess.TimeoutExpired:
            for pid in [*ranks_of(process.pid).values(), process.pid]:
                os.kill(pid, signal.SIGKILL)
            for stream in (process.stdout, process.stderr):
                if stream:
                    stream.close()
            process.wait()
            return "hangs", ""

    def run(self, words: str, **rest) -> tuple[str | int, str]:
        return self.end(self.start(words, **rest))

    def is_saved(self) -> bool:
        # The older build writes one file.
        return any((self.folder / "ck" / name).exists() for name in ("latest", "checkpoint.safetensors"))

    def wait_until_saved(self, process: subprocess.Popen) -> None:
        deadline = time.monotonic() + HANGS_S
        while not self.is_saved() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)


def divergence(case: Case) -> str:
    """The last step of an epoch diverges: is the good checkpoint still there?"""
    case.run(f"train {TINY} --save ck --epochs 1")
    code, _ = case.run(f"train {TINY} --save ck --epochs 3 --lr 1e39 --resume auto")
    again, _ = case.run(f"train {TINY} --save ck --epochs 4 --resume auto")
    return f"code {code}; then {'goes on' if again == 0 else 'cannot go on'}"


def leftovers(case: Case) -> str:
    """SIGTERM during training that saves all the time: files besides the checkpoints."""
    flags = "--input-dim 3000 --hidden-dim 3000 --output-dim 10 --num-layers 1 --batch-size 2"
    flags += " --steps-per-epoch 1 --epochs 10000"
    for _ in range(8):
        process = case.start(f"train --model mlp {flags} --save ck --resume auto --quiet")
        case.wait_until_saved(process)
        time.sleep(0.5)
        process.terminate()
        case.end(process)
    known = ("checkpoint.safetensors", "checkpoint.previous.safetensors", "checkpoint.lock", "latest")
    names = [path.name for path in (case.folder / "ck").iterdir()]
    stray = sum(name not in known and not name.startswith("step-") for name in names)
    return f"{'no' if stray == 0 else 'some'} stray files after 8 runs"


def two_runs(case: Case) -> str:
    """A second run with the same folder for checkpoints."""
    first = case.start(f"train {LONG} --save ck --quiet --nproc 1")
    case.wait_until_saved(first)
    code, errors = case.run(f"train {LONG} --save ck --quiet --nproc 1 --resume auto")
    first.kill()
    case.end(first)
    named = "names the other run" if str(first.pid) in errors else "does not name the other run"
    return f"second: code {code}, {named}"


def mode(case: Case) -> str:
    case.run(f"train {TINY} --save ck --epochs 1")
    file = next(path for path in (case.folder / "ck").iterdir() if path.name in ("latest", "checkpoint.safetensors"))
    return f"mode {file.stat().st_mode & 0o777:o} under umask 022"


def stuck_reader(case: Case) -> str:
    """Nobody reads, and a rank is killed."""
    process = case.start("launch -n 2 -- yes")
    ranks = wait_for_ranks(process, 2)
    time.sleep(0.5)
    os.kill(ranks[1], signal.SIGKILL)
    try:
        return f"the launcher ends with {process.wait(HANGS_S)}"
    except subprocess.TimeoutExpired:
        process.kill()
        return "the launcher never ends"
    finally:
        for stream in (process.stdout, process.stderr):
            stream.close()


def stopped_rank(case: Case) -> str:
    """Rank 2 of three is stopped."""
    process = case.start(f"train {LONG} --nproc 3 --timeout 1 --quiet --save ck")
    ranks = wait_for_ranks(process, 3)
    case.wait_until_saved(process)
    os.kill(ranks[2], signal.SIGSTOP)
    _, errors = case.end(process)
    found = BLAMED.search(errors)
    return f"blamed: rank {found[1]} {found[2]}" if found else "nobody is blamed"


def straggler(case: Case) -> str:
    """Four ranks over tcp by hand: 3 is stopped, 2 is killed, 3 goes on. Whom does 3 name?"""
    port = free_port()
    environment = os.environ | {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"LOCAL_WORLD_SIZE": "4", "PACELINE_SECRET": "cases"}
    ranks = []
    for rank in range(4):
        variables = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(case.start(f"train {LONG} --transport tcp --quiet --save ck", env=variables))
    case.wait_until_saved(ranks[0])
    ranks[3].send_signal(signal.SIGSTOP)
    ranks[2].kill()
    time.sleep(0.15)
    ranks[3].send_signal(signal.SIGCONT)
    errors = [case.end(rank)[1] for rank in ranks][3]
    found = re.search(r"rank (\d) (died|left)", errors)
    return f"rank 3 says: rank {found[1]} {found[2]}" if found else "rank 3 names nobody as dead"


def frozen(case: Case) -> str:
    """Everything is frozen for longer than the time limit, and goes on."""
    process = case.start(f"train {TINY.replace('--steps-per-epoch 1', '--steps-per-epoch 60')} --epochs 1 "
                         "--link 1gbit,5ms --nproc 2 --timeout 1 --quiet")
    ranks = wait_for_ranks(process, 2)
    time.sleep(0.5)
    everybody = [process.pid, *ranks.values()]
    for order, pause in ((signal.SIGSTOP, 2.5), (signal.SIGCONT, 0)):
        for pid in everybody:
            os.kill(pid, order)
        time.sleep(pause)
    code, errors = case.end(process)
    return f"code {code}" + (", naming ranks []" if "ranks []" in errors else "")


def few_threads(case: Case) -> str:
    """As a user who may have only a few threads."""
    def limited() -> None:
        os.setgid(65534)
        os.setuid(65534)
        resource.setrlimit(resource.RLIMIT_NPROC, (3, 3))

    case.folder.chmod(0o777)
    code, errors = case.run(f"train {TINY} --epochs 1 --transport thread --nproc 2", preexec_fn=limited)
    return f"code {code}, {'a panic' if 'panicked' in errors else 'an error' if 'error:' in errors else 'no error'}"


def full_device(case: Case) -> str:
    with open("/dev/full", "w") as full:
        return f"code {case.run('links', stdout=full)[0]}"


def no_temporary_folder(case: Case) -> str:
    return f"code {case.run('launch -n 2 -- true', env=os.environ | {'TMPDIR': '/nowhere'})[0]}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def killed_while_meeting(case: Case) -> str:
    """The ranks of `paceline launch` meet, and rank 0 is killed. Whom does the launcher name?"""
    for _ in range(20):
        # A program that ends with a code of its own when it has lost its peer.
        transport = random.choice(["shm", "tcp"])
        process = case.start(f"launch -n 2 -- {case.binary} check --transport {transport}")
        ranks = wait_for_ranks(process, 2)
        time.sleep(random.uniform(0.0, 0.1))
        try:
            os.kill(ranks[0], signal.SIGKILL)
        except (KeyError, ProcessLookupError):
            pass
        code, errors = case.end(process)
        if code != 0:
            found = BLAMED.search(errors)
            return f"blamed: rank {found[1]} {found[2]}" if found else "nobody is blamed"
    return "rank 0 is never there to be killed"


def duplicate_host(case: Case) -> str:
    """Host 1 of two is started twice."""
    port, environment = free_port(), os.environ | {"PACELINE_SECRET": "cases"}
    short = LONG.replace("--epochs 1000000", "--epochs 4")

    def host(number: int) -> subprocess.Popen:
        at = f"--nnodes 2 --node-rank {number} --master-addr 127.0.0.1 --master-port {port} --host 127.0.0.1"
        return case.start(f"train {short} --quiet --nproc 2 --timeout 5 {at}", env=environment)

    both, first = [host(1), host(1)], host(0)
    code, _ = case.end(first)
    codes = [case.end(other)[0] for other in both]
    if code != 0 or codes.count(0) != 1:
        return f"host 0 ends with {code}, those of host 1 with {sorted(codes, key=str)}"
    return "the run goes on, and one is refused"


def interrupted(case: Case) -> str:
    """SIGINT at any moment: to a launcher, to ranks in one process, or to some of the ranks of no launcher."""
    flags = f"train {LONG} --quiet --save ck --save-every 3"
    how = random.choice(["--nproc 2", "--nproc 2 --transport tcp", "--nproc 2 --transport thread", "by hand"])
    if how == "by hand":
        environment = os.environ | {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port()), "PACELINE_SECRET": "cases"}
        asked = [case.start(flags, env=environment | {"RANK": str(rank)}) for rank in range(2)]
        # Before they have met, one would wait for the other.
        case.wait_until_saved(asked[0])
    else:
        asked = [case.start(f"{flags} {how}")]
    time.sleep(random.uniform(0.0, 1.0))
    asked[-1].send_signal(signal.SIGINT)
    codes = {case.end(process)[0] for process in asked}
    # A process that SIGINT kills has no code of its own; shells say 130.
    return "130" if codes <= {130, -signal.SIGINT} else f"{how}: {sorted(codes, key=str)}"


def listener_first(case: Case) -> str:
    """Somebody else listens on the master port before rank 0 does."""
    secret = "nobody-else-knows-this"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        environment = os.environ | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "PACELINE_SECRET": secret}
        rank = case.start(f"train {LONG} --quiet --host 127.0.0.1 --timeout 5", env=environment)
        listener.settimeout(HANGS_S)
        stream, _ = listener.accept()
        with stream:
            stream.settimeout(2.0)
            heard = stream.recv(4096)
            # What answers here speaks as a rank does, and makes its proof up.
            stream.sendall((b"3nilecap\x01" if heard.startswith(b"pacelin3") else b"2nilecap\x01") + bytes(64))
            try:
                while more := stream.recv(4096):
                    heard += more
            except (TimeoutError, ConnectionResetError):
                pass
    _, errors = case.end(rank)
    said = "says that it does not know the secret" if "does not know the secret" in errors else "does not say why"
    return f"{'hears' if secret.encode() in heard else 'does not hear'} the secret; the rank {said}"


# By name: the case, how often it is tried, and how it should end.
CASES: dict[str, tuple[Callable[[Case], str], int, str]] = {
    "divergence in the last step of an epoch": (divergence, 1, "code 1; then goes on"),
    "SIGTERM while saving": (leftovers, 1, "no stray files after 8 runs"),
    "two runs save to one folder": (two_runs, 1, "second: code 2, names the other run"),
    "mode of a checkpoint": (mode, 1, "mode 644 under umask 022"),
    "nobody reads, a rank is killed": (stuck_reader, 5, "the launcher ends with 137"),
    "SIGSTOP of rank 2 of 3": (stopped_rank, 5, "blamed: rank 2 is stopped"),
    "a straggler over tcp, rank 2 killed": (straggler, 24, "rank 3 says: rank 2 died"),
    "all ranks frozen beyond the limit": (frozen, 10, "code 0"),
    "a limit of three threads": (few_threads, 1, "code 1, an error"),
    "standard output is /dev/full": (full_device, 1, "code 1"),
    "no folder for temporary files": (no_temporary_folder, 1, "code 0"),
    "rank 0 killed while the ranks meet": (killed_while_meeting, 120, "blamed: rank 0 was killed by SIGKILL"),
    "a host started twice": (duplicate_host, 12, "the run goes on, and one is refused"),
    "SIGINT at any moment": (interrupted, 60, "130"),
    "a listener on the port first": (
        listener_first, 1, "does not hear the secret; the rank says that it does not know the secret"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Tell what two builds do with known faults.")
    parser.add_argument("--old", type=Path, required=True, metavar="PATH")
    parser.add_argument("--new", type=Path, default=Path("target/release/paceline"), metavar="PATH")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("results/cases.json"), metavar="FILE")
    arguments = parser.parse_args()
    builds = {
        "old": program(parser, "--old", arguments.old),
        "new": program(parser, "--new", arguments.new),
    }
    os.umask(0o022)
    record: Record = {
        **provenance(),
        "cases": {},
    }
    rows, is_good = [["case", "old", "new"]], True
    for name in arguments.cases:
        case, times, wanted = CASES[name]
        outcomes = {}
        for build, binary in builds.items():
            found: Counter[str] = Counter()
            for _ in range(times):
                with tempfile.TemporaryDirectory(prefix="cases_") as folder:
                    found[case(Case(binary, Path(folder)))] += 1
            outcomes[build] = dict(found.most_common())
        record["cases"][name] = {"wanted": wanted, **outcomes}
        is_good &= list(outcomes["new"]) == [wanted]
        cells = ["; ".join(f"{count} x {what}" if times > 1 else what for what, count in of.items())
                 for of in outcomes.values()]
        rows.append([name, *cells])
        print(aligned(rows[-1:], left={0, 1, 2}), flush=True)
    print("\n" + aligned(rows, left={0, 1, 2}))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
