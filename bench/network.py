"""Faults of the network: what a run over tcp or hybrid makes of a bad network, and of one that falls silent.

    cargo build --release
    python3 bench/network.py                                  # as root; see bench/hosts.py for other users
    python3 bench/network.py --parts partition pauses --times 50

Each rank runs on a host of its own, or two ranks share a host (`hybrid`). Hosts are network namespaces of this machine,
joined by a switch that delays, loses, repeats and reorders packets (`hosts.py`).

`disturbed`: delay, jitter, loss, duplicates, reordering, little bandwidth, and a silence that ends before the time
limit. The run must end with the weights of an undisturbed run.

`partition`: from some packet on, a host is silent: it neither answers nor resets a connection. This happens while the
ranks meet, while they train, while they compute and send nothing, and at the end. Each rank must end by the time limit,
and must name ranks on the other side and no others.

`pauses`: one rank is stopped, another one is killed, the first one goes on. All must end; the ranks that remain must
name the killed rank, by themselves in namespaces, or through the launcher on one host.

`unreachable`: rank 0's host is silent from the beginning, or the other hosts have no route to it.

Prints a line for each case and for each trial that was not good, and writes all trials to `results/network.json`. The
exit code is 1 if a trial was not good. Only the standard library and iproute2 are needed.
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
from collections.abc import Callable, Iterable
from pathlib import Path

from common import Record, program, provenance
from faults import NAMED, ended, start, wait_for_ranks
from hosts import Network, Route

HANGS_S = 60.0
# With much loss a run takes a minute or more, because TCP doubles its pauses.
SLOW_S = 240.0
# How much longer than its time limit a rank may take to end. A question to the store has another 5 s, so that
# rank 0, which knows who is missing, can answer when the time is over.
SLACK_S = {"meeting": 7.0, "training": 2.0, "idle": 3.0, "end": 2.0}
LIMIT_S = 2
SMALL = "--channels 4 --hidden 8 --samples 400 --batch-size 8 --lr 0.001"
# A step of this model computes for long enough that nobody sends anything meanwhile.
LARGE = "--channels 32 64 --hidden 64 --samples 2000 --batch-size 128 --lr 0.001"
# Transport: hosts, and ranks on each of them.
LAYOUTS = {"tcp": (3, 1), "hybrid": (2, 2)}
DIGEST = re.compile(r"^Weights: sha256 (\w{64})$", re.MULTILINE)


class Ranks:
    """The ranks of one run, each on its host."""

    def __init__(self, network: Network, binary: Path, transport: str, flags: str, timeout_s: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="network_")
        self.num_hosts, self.per_host = LAYOUTS[transport]
        world = self.num_hosts * self.per_host
        words = f"train {flags} --transport {transport} --timeout {timeout_s}".split()
        self.begin = time.monotonic()
        self.processes: list[subprocess.Popen] = []
        for rank in range(world):
            host = network.hosts[self.host_of(rank)]
            variables = {
                "RANK": rank,
                "WORLD_SIZE": world,
                "LOCAL_RANK": rank % self.per_host,
                "LOCAL_WORLD_SIZE": self.per_host,
                "MASTER_ADDR": network.hosts[0].address,
                "MASTER_PORT": 29500,
                "PACELINE_SECRET": "between namespaces",
                "TORCHELASTIC_ERROR_FILE": self.path(rank, "json"),
            }
            with open(self.path(rank, "out"), "w") as out, open(self.path(rank, "err"), "w") as err:
                variables = {name: str(value) for name, value in variables.items()}
                self.processes.append(
                    host.start([binary, *words], variables, cwd=self.folder.name, stdout=out, stderr=err)
                )

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.folder.cleanup()

    def host_of(self, rank: int) -> int:
        return rank // self.per_host

    def path(self, rank: int, kind: str) -> Path:
        return Path(self.folder.name) / f"rank{rank}.{kind}"

    def signal(self, rank: int, order: signal.Signals) -> None:
        if self.processes[rank].poll() is None:
            self.processes[rank].send_signal(order)

    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def outcomes(self, since: Callable[[], float | None], hangs_s: float = HANGS_S) -> list[Record]:
        """How each rank ended: its code, whom it names, and the time since then. None as code: it hangs."""
        ends: dict[int, float] = {}
        deadline = time.monotonic() + hangs_s
        while len(ends) < len(self.processes) and time.monotonic() < deadline:
            for rank, process in enumerate(self.processes):
                if rank not in ends and process.poll() is not None:
                    ends[rank] = time.monotonic()
            time.sleep(0.002)
        origin = since() or self.begin
        found = []
        for rank, process in enumerate(self.processes):
            outcome: Record = {"rank": rank, "code": process.poll(), "named": self.named(rank)}
            outcome["s"] = round(ends[rank] - origin, 3) if rank in ends else None
            if outcome["code"] != 0:
                outcome["said"] = self.path(rank, "err").read_text().strip()[-600:]
            found.append(outcome)
        return found

    def named(self, rank: int) -> list[int]:
        try:
            error = json.loads(self.path(rank, "json").read_text())
        except OSError:
            return []
        return error["message"]["extraInfo"].get("culprits", [])

    def digest(self) -> str | None:
        found = DIGEST.search(self.path(0, "out").read_text())
        return found[1] if found else None


def healed(network: Network, chance: random.Random, calm: Route, ranks: Ranks, num_packets: int) -> None:
    """A silence of one to two seconds somewhere in the first part of a run of that many packets."""
    network.cut_at = (chance.randint(1, num_packets * 2 // 3), frozenset([chance.randrange(ranks.num_hosts)]))
    while network.cut_time is None and ranks.running():
        time.sleep(0.01)
    time.sleep(chance.uniform(1.0, 2.0))
    network.paths = {pair: calm for pair in network.paths}


DISTURBED: dict[str, Route] = {
    "delay of 20 ms and up to 10 ms more": Route(delay_s=0.02, jitter_s=0.01),
    "loss of 1 %": Route(loss=0.01),
    "loss of 5 %": Route(loss=0.05),
    "loss of 20 %": Route(loss=0.20),
    "10 % twice": Route(duplicate=0.10),
    "10 % reordered": Route(reorder=0.10),
    "10 % each: lost, twice, reordered, late": Route(0.005, 0.005, 0.1, 0.1, 0.1),
    "5 Mbit/s": Route(bits_per_s=5e6, delay_s=0.001),
    "silence of 1 to 2 s": Route(),
}


def disturbed(network: Network, binary: Path, chance: random.Random, times: int) -> Iterable[tuple[str, Record]]:
    for transport in LAYOUTS:
        flags = f"{SMALL} --steps 12"
        network.everywhere(Route())
        with Ranks(network, binary, transport, flags, 120) as ranks:
            calm = ranks.outcomes(lambda: None)
            expected, num_packets = ranks.digest(), network.num_packets
        yield f"{transport}, undisturbed", {"good": all(of["code"] == 0 for of in calm), "ranks": calm}
        for name, route in DISTURBED.items():
            for _ in range(times):
                network.everywhere(route)
                with Ranks(network, binary, transport, flags, 120) as ranks:
                    if name.startswith("silence"):
                        healed(network, chance, route, ranks, num_packets)
                    found = ranks.outcomes(lambda: None, SLOW_S)
                    digest = ranks.digest()
                good = expected is not None and digest == expected and all(of["code"] == 0 for of in found)
                record = {"packets": network.num_packets, "digest": digest, "good": good, "ranks": found}
                yield f"{transport}, {name}", record


def judge(moment: str, ranks: Ranks, away: frozenset[int], found: list[Record]) -> Record:
    """Whether all ranks ended in time and named ranks on the other side."""
    world = range(len(found))
    for outcome in found:
        side = ranks.host_of(outcome["rank"]) in away
        beyond = {rank for rank in world if (ranks.host_of(rank) in away) != side}
        in_time = outcome["s"] is not None and outcome["s"] <= LIMIT_S + SLACK_S[moment]
        named = set(outcome["named"])
        if outcome["code"] == 0:
            # It had all that it needed before the silence.
            outcome["good"] = in_time and moment == "end"
        else:
            outcome["good"] = in_time and bool(named) and named <= beyond
    return {"good": all(of["good"] for of in found), "ranks": found}


def cut_when_idle(network: Network, chance: random.Random, ranks: Ranks, away: frozenset[int]) -> None:
    """Waits until no packet has come for a while, and makes these hosts silent."""
    quiet_s = chance.uniform(0.02, 0.04)
    after = chance.randint(200, 400)
    while ranks.running():
        if network.num_packets > after and time.monotonic() - network.last_packet > quiet_s:
            return network.cut(away)
        time.sleep(0.002)


def partition(network: Network, binary: Path, chance: random.Random, times: int) -> Iterable[tuple[str, Record]]:
    for transport, (num_hosts, _) in LAYOUTS.items():
        # How many packets it takes to meet, and to train for ten steps.
        network.everywhere(Route())
        with Ranks(network, binary, transport, f"{SMALL} --steps 1", 60) as ranks:
            ranks.outcomes(lambda: None)
        num_one = network.num_packets
        network.everywhere(Route())
        with Ranks(network, binary, transport, f"{SMALL} --steps 11", 60) as ranks:
            ranks.outcomes(lambda: None)
        num_all = network.num_packets
        num_meeting = num_one - (num_all - num_one) // 10
        packets = {
            "meeting": (0, num_meeting),
            "training": (num_one, 10 * num_all),
            "end": (num_all - 60, num_all - 1),
        }
        for moment in SLACK_S:
            for _ in range(times):
                away = frozenset([chance.randrange(num_hosts)])
                network.everywhere(Route())
                trial: Record = {"host": min(away)}
                if moment in packets:
                    network.cut_at = (chance.randint(*packets[moment]), away)
                    trial["packet"] = network.cut_at[0]
                steps = 11 if moment == "end" else 100_000
                flags = f"{LARGE if moment == 'idle' else SMALL} --steps {steps}"
                with Ranks(network, binary, transport, flags, LIMIT_S) as ranks:
                    if moment == "idle":
                        cut_when_idle(network, chance, ranks, away)
                    found = ranks.outcomes(lambda: network.cut_time)
                    yield f"{transport}, {moment}", trial | judge(moment, ranks, away, found)


def pauses(network: Network, binary: Path, chance: random.Random, times: int) -> Iterable[tuple[str, Record]]:
    for _ in range(times):
        for transport in LAYOUTS:
            yield f"{transport}, between hosts", paused_between_hosts(network, binary, chance, transport)
        yield "launcher, one host", paused_by_launcher(binary, chance)


def pause_and_kill(chance: random.Random, order: Callable[[int, signal.Signals], None], world: int) -> Record:
    """Stops a rank, kills another one, wakes the first one, at random moments."""
    stopped, killed = chance.sample(range(world), 2)
    delays = [chance.uniform(0.0, 0.6), chance.uniform(0.0, 1.0), chance.uniform(0.0, 1.0)]
    time.sleep(delays[0])
    order(stopped, signal.SIGSTOP)
    time.sleep(delays[1])
    order(killed, signal.SIGKILL)
    time.sleep(delays[2])
    order(stopped, signal.SIGCONT)
    return {"stopped": stopped, "killed": killed, "delays_s": [round(delay, 3) for delay in delays]}


def paused_between_hosts(network: Network, binary: Path, chance: random.Random, transport: str) -> Record:
    network.everywhere(Route())
    with Ranks(network, binary, transport, f"{SMALL} --steps 100000", LIMIT_S) as ranks:
        trial = pause_and_kill(chance, ranks.signal, len(ranks.processes))
        signalled = time.monotonic()
        found = ranks.outcomes(lambda: signalled)
    rest = [of for of in found if of["rank"] != trial["killed"]]
    in_time = all(of["s"] is not None and of["s"] <= LIMIT_S + SLACK_S["meeting"] for of in found)
    some_name = any(trial["killed"] in of["named"] for of in rest)
    to_blame = {trial["killed"], trial["stopped"]}
    wrong = [of["rank"] for of in rest if not to_blame & set(of["named"])]
    good = in_time and some_name and all(of["code"] not in (0, None) for of in rest)
    return trial | {"good": good, "name_neither": wrong, "ranks": found}


def paused_by_launcher(binary: Path, chance: random.Random) -> Record:
    count, transport = chance.randint(3, 4), chance.choice(["shm", "tcp"])
    with tempfile.TemporaryDirectory(prefix="network_") as folder:
        flags = f"train {SMALL} --steps 100000 --quiet --timeout {LIMIT_S} --nproc {count} --transport {transport}"
        process = start(binary, flags.split(), folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        processes = wait_for_ranks(process, count)

        def order(rank: int, what: signal.Signals) -> None:
            try:
                os.kill(processes[rank], what)
            except ProcessLookupError:
                pass

        trial = pause_and_kill(chance, order, count) | {"transport": transport, "num_ranks": count}
        signalled = time.monotonic()
        end = ended(process)
        errors = process.stderr.read() if process.stderr else ""
    named = NAMED.findall(errors)
    right = named == [(str(trial["killed"]), "was killed by SIGKILL")]
    trial["s"] = None if end is None else round(end - signalled, 3)
    good = end is not None and right and process.returncode == 137
    return trial | {"code": process.returncode, "good": good} | ({} if good else {"errors": errors[-2000:]})


def unreachable(network: Network, binary: Path, chance: random.Random, times: int) -> Iterable[tuple[str, Record]]:
    for _ in range(times):
        for transport in LAYOUTS:
            network.everywhere(Route())
            network.cut([0])
            away = frozenset([0])
            with Ranks(network, binary, transport, f"{SMALL} --steps 10", LIMIT_S) as ranks:
                found = ranks.outcomes(lambda: None)
                yield f"{transport}, rank 0's host silent", judge("meeting", ranks, away, found)
    network.everywhere(Route())
    others = network.hosts[1:]
    for host in others:
        host.run("ip", "route", "add", "blackhole", f"{network.hosts[0].address}/32")
    with Ranks(network, binary, "tcp", f"{SMALL} --steps 10", LIMIT_S) as ranks:
        found = ranks.outcomes(lambda: None)
        for outcome in found:
            said = outcome.get("said", "")
            says_why = outcome["rank"] == 0 or "no route" in said and network.hosts[0].address in said
            outcome["good"] = outcome["s"] is not None and outcome["code"] not in (0, None) and says_why
        yield "tcp, no route to rank 0's host", {"good": all(of["good"] for of in found), "ranks": found}
    for host in others:
        host.run("ip", "route", "del", "blackhole", f"{network.hosts[0].address}/32")


PARTS: dict[str, tuple[Callable[[Network, Path, random.Random, int], Iterable[tuple[str, Record]]], int]] = {
    "disturbed": (disturbed, 1),
    "partition": (partition, 5),
    "pauses": (pauses, 20),
    "unreachable": (unreachable, 2),
}


def longest(trials: Iterable[Record]) -> float:
    """The longest time in these trials, of any rank or of the launcher."""
    times = [of.get("s") or 0.0 for trial in trials for of in [trial, *trial.get("ranks", [])]]
    return max(times, default=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description="Disturb the network between ranks.")
    parser.add_argument("--paceline", type=Path, default=Path("target/release/paceline"), metavar="PATH")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="(default: all)")
    parser.add_argument("--times", type=int, help="trials of each case (default: 1, 5, 20 and 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/network.json"), metavar="FILE")
    arguments = parser.parse_args()
    binary = program(parser, "--paceline", arguments.paceline)
    record: Record = {
        **provenance(),
        "seed": arguments.seed,
        "time_limit_s": LIMIT_S,
        "parts": {},
    }
    is_good = True
    with Network(max(hosts for hosts, _ in LAYOUTS.values()), arguments.seed) as network:
        for part in arguments.parts:
            trials_of, times = PARTS[part]
            cases: dict[str, list[Record]] = {}
            chance = random.Random(f"{part} {arguments.seed}")
            for name, trial in trials_of(network, binary, chance, arguments.times or times):
                trials = cases.setdefault(name, [])
                trials.append(trial)
                is_good &= trial["good"]
                what = "good" if trial["good"] else "NOT GOOD " + json.dumps(trial, indent=1)
                print(f"{part}: {name} ({len(trials)}), {longest([trial]):.2f} s: {what}", flush=True)
            for name, trials in cases.items():
                num_good = sum(trial["good"] for trial in trials)
                print(f"{part}: {name}: {num_good} of {len(trials)} good, longest {longest(trials):.2f} s", flush=True)
            record["parts"][part] = cases
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
