"""An hour of training that something goes wrong with every few seconds.

    cargo build --release
    python3 bench/soak.py                                     # as root; see bench/hosts.py for other users
    python3 bench/soak.py --seconds 300 --seed 7
    python3 bench/soak.py --elastic                           # the others go on

Two hosts, network namespaces of this machine (`hosts.py`), train one model with two ranks each, over `hybrid`. On each host a launcher restarts its ranks after
a failure (`--max-restarts`), and every attempt goes on from the last good checkpoint. The checkpoints lie on a small file system of their own, which can be full.
At the end the launchers are asked to end: the ranks save after their step N. Then a run that nothing disturbs, with the same ranks on one host, makes N
steps. Both go on for ten more steps, and must end with the same weights. Memory and descriptors of the launchers and of an undisturbed rank are sampled.

The exit code is 1 if the weights differ, if a launcher ended by itself, or if a fault caused a restart that needs none (`FAULTS`). Only the standard
library and iproute2 are needed.
"""
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from common import Record, aligned, arguments_for, parsed, provenance, ranks_of, send, write
from hosts import Network, Route

NUM_HOSTS, PER_HOST = 2, 2
LIMIT_S = 4
STEP = "--channels 4 --hidden 8 --samples 400 --global-batch-size 32 --micro-batch-size 8 --lr 0.0005 --momentum 0.9 --save-every 20"
ENDLESS = "--epochs 1000000"
DIGEST = re.compile(r"^Weights: sha256 (\w{64})$", re.MULTILINE)
STOPPED = re.compile(r"checkpoint after step (\d+) in")
# Between a fault and the next one: the ranks recover, and train for a moment.
PAUSE_S = (1.5, 5.0)
RECOVERY_S = 60.0


class Soak:
    """The disturbed run."""

    def __init__(self, network: Network, binary: Path, folder: Path, chance: random.Random, more: str) -> None:
        self.network, self.folder, self.chance = network, folder, chance
        self.checkpoint = folder / "saved" / "latest"
        self.is_reading = threading.Event()
        self.is_reading.set()
        self.restarts = [0] * NUM_HOSTS
        self.said: list[str] = []
        self.launchers = []
        for host in range(NUM_HOSTS):
            words = f"train {STEP} {more} {ENDLESS} --save saved --timeout {LIMIT_S} --max-restarts 1000000 --nproc {PER_HOST}"
            place = f"--nnodes {NUM_HOSTS} --node-rank {host} --master-addr {network.hosts[0].address} --master-port 29500"
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            command, variables = [binary, *words.split(), *place.split()], {"PACELINE_SECRET": "between namespaces"}
            process = network.hosts[host].start(command, variables, cwd=folder, start_new_session=True, **streams)
            self.launchers.append(process)
            threading.Thread(target=self._read, args=(host, process.stdout), daemon=True).start()

    def _read(self, host: int, output) -> None:
        for line in output:
            self.is_reading.wait()
            line = line.decode(errors="replace").rstrip("\n")
            if line.startswith(("paceline: restart ", "paceline: replacement ")):
                self.restarts[host] += 1
            if "paceline:" in line or "error" in line or "warning" in line:
                self.said.append(f"{time.strftime('%H:%M:%S')} host {host}: {line}")

    def ranks(self) -> list[int]:
        return [pid for launcher in self.launchers for pid in ranks_of(launcher.pid).values()]

    def stop(self, pids: list[int], seconds: float) -> None:
        send(pids, signal.SIGSTOP)
        time.sleep(seconds)
        send(pids, signal.SIGCONT)

    def cut_off(self, seconds: float) -> None:
        """No packet reaches the first host or leaves it."""
        self.network.cut(0)
        time.sleep(seconds)
        self.network.everywhere(Route())

    def some(self, count: int) -> list[int]:
        ranks = self.ranks()
        return self.chance.sample(ranks, min(count, len(ranks)))

    def is_trained(self, since: float) -> bool:
        """Whether a checkpoint has been saved since that time of day."""
        return self.checkpoint.exists() and self.checkpoint.stat().st_mtime > since

    def wait_until_trained(self) -> bool:
        """Waits until the ranks train again: until two checkpoints are new."""
        for _ in range(2):
            since, deadline = time.time(), time.monotonic() + RECOVERY_S
            while not self.is_trained(since):
                if time.monotonic() > deadline or any(launcher.poll() is not None for launcher in self.launchers):
                    return False
                time.sleep(0.02)
        return True


def kill_after_pause(soak: Soak) -> None:
    """A rank is stopped, another one is killed, the first one goes on."""
    stopped, *killed = soak.some(2)
    send([stopped], signal.SIGSTOP)
    time.sleep(soak.chance.uniform(0.0, 0.3))
    send(killed, signal.SIGKILL)
    time.sleep(soak.chance.uniform(0.0, 0.3))
    send([stopped], signal.SIGCONT)


def suspend(soak: Soak) -> None:
    """All that belongs to the run stops for longer than the time limit, as a frozen control group does."""
    everybody = [*soak.ranks(), *(launcher.pid for launcher in soak.launchers)]
    soak.chance.shuffle(everybody)
    soak.stop(everybody, LIMIT_S + 2)


def stuck_reader(soak: Soak) -> None:
    soak.is_reading.clear()
    time.sleep(LIMIT_S)
    soak.is_reading.set()


def full_disk(soak: Soak) -> None:
    ballast = soak.checkpoint.with_name("ballast")
    with open(ballast, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    time.sleep(2)
    ballast.unlink()


def torn_checkpoint(soak: Soak) -> None:
    """The last checkpoint loses its end, and a rank dies. The one before must serve."""
    rank, saved = soak.some(1), soak.checkpoint.with_name(soak.checkpoint.read_text().strip())
    largest = max(saved.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    send(rank, signal.SIGKILL)


def bad_network(soak: Soak) -> None:
    soak.network.everywhere(Route(delay_s=0.005, jitter_s=0.005, loss=0.02, duplicate=0.02, reorder=0.02))
    time.sleep(4)
    soak.network.everywhere(Route())


# By name: the fault, and whether a run must survive it without a restart.
FAULTS: dict[str, tuple[Callable[[Soak], None], bool]] = {
    "a rank is killed": (lambda soak: send(soak.some(1), signal.SIGKILL), False),
    "two ranks are killed": (lambda soak: send(soak.some(2), signal.SIGKILL), False),
    "one is stopped, another killed": (kill_after_pause, False),
    "a rank hangs": (lambda soak: soak.stop(soak.some(1), LIMIT_S + 2), False),
    "a rank pauses": (lambda soak: soak.stop(soak.some(1), soak.chance.uniform(0.1, LIMIT_S / 2)), True),
    "everything is suspended": (suspend, True),
    # All end after the same step.
    "one rank is asked to end": (lambda soak: send(soak.some(1), signal.SIGTERM), False),
    "nobody reads the output": (stuck_reader, True),
    "the disk is full": (full_disk, False),
    "the last checkpoint is torn": (torn_checkpoint, False),
    "a bad network": (bad_network, True),
    "a short silence": (lambda soak: soak.cut_off(LIMIT_S / 4), True),
    "a partition": (lambda soak: soak.cut_off(LIMIT_S + 2), False),
}


def resources(pid: int) -> tuple[int, int]:
    """Resident KiB and open descriptors of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(resident.split()[1]), len(os.listdir(f"/proc/{pid}/fd"))


class Sampler:
    """Samples processes once per second, until it is stopped."""

    def __init__(self, pids: Callable[[], list[int]]) -> None:
        self.samples: list[tuple[int, int]] = []
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._sample, args=(pids,), daemon=True)
        self.thread.start()

    def _sample(self, pids: Callable[[], list[int]]) -> None:
        while not self.stopped.wait(1.0):
            # A process that has ended has neither.
            with suppress(OSError, StopIteration):
                if found := [resources(pid) for pid in pids()]:
                    self.samples.append((sum(one[0] for one in found), sum(one[1] for one in found)))

    def result(self) -> Record:
        """The median of the first quarter, of the last quarter, and the most."""
        self.stopped.set()
        self.thread.join()
        quarter = max(1, len(self.samples) // 4)
        columns = zip(*self.samples)
        return {
            name: {"first": statistics.median(column[:quarter]), "last": statistics.median(column[-quarter:]), "most": max(column)}
            for name, column in zip(("resident_kib", "descriptors"), columns)
        }


def steps_made(folder: Path) -> tuple[int, int]:
    """How many attempts there were, and how many steps they made together."""
    lines = [line for file in folder.glob("runs/*/metrics.jsonl") for line in file.read_text().splitlines()]
    return len(list((folder / "runs").iterdir())), sum('"loss"' in line for line in lines)


def finish(binary: Path, folder: Path, words: str, sampler: bool) -> tuple[str, Record]:
    """Runs `train` to its end, on one host. Returns the digest of the weights, and what its ranks use."""
    command = [binary, "train", *words.split(), "--nproc", str(NUM_HOSTS * PER_HOST), "--transport", "shm"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    samples = Sampler(lambda: list(ranks_of(process.pid).values())) if sampler else None
    output, _ = process.communicate()
    found = DIGEST.search(output)
    if process.returncode or not found:
        raise SystemExit(f"the run that {words} ended with {process.returncode}: {output[-2000:]}")
    return found[1], samples.result() if samples else {}


def disturb(soak: Soak, seconds: float, names: list[str]) -> list[Record]:
    """Lets faults happen. Returns them, each with the restarts that followed."""
    events: list[Record] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        # The fault must not fall on a run that has not recovered, or a torn checkpoint could be the only one.
        if not soak.wait_until_trained():
            events.append({"fault": "the run does not train", "said": soak.said[-40:]})
            break
        time.sleep(soak.chance.uniform(*PAUSE_S))
        name = soak.chance.choice(names)
        fault, is_survived = FAULTS[name]
        before, said = list(soak.restarts), len(soak.said)
        begin = time.monotonic()
        fault(soak)
        trains = soak.wait_until_trained()
        event = {"fault": name, "restarts": max(now - then for now, then in zip(soak.restarts, before)), "trains_after_s": round(time.monotonic() - begin, 2)}
        event["good"] = trains and not (is_survived and event["restarts"])
        events.append(event if event["good"] else event | {"said": soak.said[said:][-40:]})
        print(f"{name}: {event['restarts']} restarts, trains after {event['trains_after_s']} s", flush=True)
        if not event["good"]:
            print(*events[-1]["said"], sep="\n", flush=True)
    return events


def main() -> int:
    parser = arguments_for(__doc__, "soak.json", rounds=0)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--elastic", action="store_true", help="ranks leave and are replaced while the others go on")
    arguments = parsed(parser)
    binary = arguments.paceline
    origin = provenance()
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="soak_") as name, closing(Network(NUM_HOSTS, arguments.seed)) as network:
        folder = Path(name)
        (folder / "saved").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "soak", folder / "saved"], check=True)
        try:
            network.everywhere(Route())
            elastic = f"--elastic 1:4 --evict-after {LIMIT_S}" if arguments.elastic else ""
            soak = Soak(network, binary, folder, chance, elastic)
            launchers = Sampler(lambda: [launcher.pid for launcher in soak.launchers])
            # An elastic run ends when a rank is asked to.
            names = [name for name in FAULTS if not (elastic and name == "one rank is asked to end")]
            events = disturb(soak, arguments.seconds, names)
            send([launcher.pid for launcher in soak.launchers], signal.SIGTERM)
            codes = [launcher.wait(60) for launcher in soak.launchers]
            used_by_launchers = launchers.result()
            stopped = next((found for line in reversed(soak.said) if (found := STOPPED.search(line))), None)
            attempts, made = steps_made(folder)
            if not stopped:
                raise SystemExit("the run did not say where it stopped:\n" + "\n".join(soak.said[-40:]))
            steps = int(stopped[1])
            more = f"{STEP} --steps {steps + 10}"
            disturbed, _ = finish(binary, folder, f"{more} --save saved --resume auto", False)
        finally:
            subprocess.run(["umount", "--lazy", folder / "saved"], check=False)
    with tempfile.TemporaryDirectory(prefix="soak_") as name:
        undisturbed, used_by_ranks = finish(binary, Path(name), f"{more} --save saved", True)
    counts = Counter(event["fault"] for event in events)
    rows = [["fault", "times", "restarts", "longest until it trains"]]
    for fault, times in counts.most_common():
        of = [event for event in events if event["fault"] == fault]
        longest = max((event.get("trains_after_s", 0.0) for event in of), default=0.0)
        rows.append([fault, str(times), str(sum(event.get("restarts", 0) for event in of)), f"{longest:.1f} s"])
    is_good = disturbed == undisturbed and codes == [143] * NUM_HOSTS and all(event.get("good") for event in events)
    record: Record = {
        **origin, "seed": arguments.seed, "seconds": arguments.seconds, "good": is_good, "codes": codes, "attempts": attempts, "steps": steps,
        "steps_redone": made - steps, "weights": {"disturbed": disturbed, "undisturbed": undisturbed}, "launchers": used_by_launchers,
        "undisturbed_ranks": used_by_ranks, "events": events,
    }  # fmt: skip
    print(aligned(rows, left={0}))
    print(f"{steps} steps, {made - steps} of them made again, {attempts} attempts; codes {codes}")
    print(f"weights: {disturbed[:16]} with faults, {undisturbed[:16]} without")
    print(f"launchers: {used_by_launchers}\nundisturbed ranks: {used_by_ranks}")
    write(arguments.out, record)
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
