"""Hosts of our own on this machine, and a network between them that fails when it is told to.

A host is a network namespace. Its only interface leads to a switch in this script, which carries each packet to the host of its address: at once, late, twice, or
never. (The kernel's own emulation of links, netem, is a module that many kernels lack.) Root may make namespaces; other users may do so inside a
user namespace: `unshare --user --map-root-user python3 ...`. Interfaces vanish with the script, a namespace with its last process, and the processes in it are
killed with the script, however it ends.
"""
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TUNSETIFF = 0x400454CA
IFF_TUN_WITHOUT_HEADER = 0x1001


@dataclass(frozen=True)
class Route:
    """What happens to packets on the way from one host to another."""

    delay_s: float = 0.0
    # Added to the delay: a random time up to this. The order of the packets stays.
    jitter_s: float = 0.0
    # Shares of the packets, each from 0 to 1.
    loss: float = 0.0
    duplicate: float = 0.0
    # These packets arrive 5 ms after their time, behind packets that were sent later.
    reorder: float = 0.0
    # No packet arrives, and nobody is told.
    silent: bool = False


class Host:
    """A namespace with one address."""

    def __init__(self, number: int) -> None:
        self.address = f"10.77.0.{number + 1}"
        script = "ip link set lo up && echo ready && exec cat"
        # `cat` ends when this script does, because then its standard input is closed.
        self.holder = subprocess.Popen(["unshare", "--net", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if not self.holder.stdout or self.holder.stdout.readline() != "ready\n":
            raise SystemExit("cannot make a network namespace; run as root, or see the top of bench/hosts.py")
        self.tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        name = f"pl{os.getpid()}n{number}"
        fcntl.ioctl(self.tun, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN_WITHOUT_HEADER))
        subprocess.run(["ip", "link", "set", name, "netns", str(self.holder.pid)], check=True)
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", name)
        self.run("ip", "link", "set", name, "up")

    def inside(self, *command: str | Path) -> list[str | Path]:
        """The command that runs this command on the host, and ends it when this script ends."""
        enter = f"nsenter --net=/proc/{self.holder.pid}/ns/net"
        return [*f"setpriv --pdeathsig KILL {enter}".split(), *command]

    def run(self, *command: str) -> None:
        subprocess.run(self.inside(*command), check=True)

    def start(self, command: Sequence[str | Path], variables: Mapping[str, str], **rest: object) -> subprocess.Popen:
        return subprocess.Popen(self.inside(*command), env={**os.environ, **variables}, **rest)

    def close(self) -> None:
        os.close(self.tun)
        self.holder.kill()
        self.holder.communicate()


class Network:
    """Hosts and the switch between them, a thread of this process."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.hosts: list[Host] = []
        self.chance = random.Random(seed)
        self.paths: dict[tuple[int, int], Route] = {}
        self.stopped, self.stop = os.pipe()
        try:
            for number in range(count):
                self.hosts.append(Host(number))
        except BaseException:
            self.close()
            raise
        self.thread = threading.Thread(target=self._switch, daemon=True)
        self.thread.start()

    def close(self) -> None:
        os.close(self.stop)
        if hasattr(self, "thread"):
            self.thread.join()
        for host in self.hosts:
            host.close()

    def everywhere(self, path: Route) -> None:
        """From now on, all packets have this path."""
        hosts = range(len(self.hosts))
        self.paths = {pair: path for pair in itertools.permutations(hosts, 2)}

    def cut(self, host: int) -> None:
        """From now on, no packet passes between this host and the others."""
        self.paths = self.paths | {pair: Route(silent=True) for pair in self.paths if host in pair}

    def _switch(self) -> None:
        queue: list[tuple[float, int, int, int, bytes]] = []
        order = itertools.count()
        poll = select.poll()
        numbers = {host.tun: number for number, host in enumerate(self.hosts)}
        for descriptor in [*numbers, self.stopped]:
            poll.register(descriptor, select.POLLIN)
        # By pair of hosts: when the last packet arrives.
        last_due: dict[tuple[int, int], float] = {}
        while True:
            wait_ms = None if not queue else max(0.0, (queue[0][0] - time.monotonic()) * 1000)
            for descriptor, events in poll.poll(wait_ms):
                if descriptor == self.stopped:
                    return
                if not events & select.POLLIN:
                    continue
                try:
                    packet = os.read(descriptor, 65536)
                except BlockingIOError:
                    continue
                pair = (numbers[descriptor], packet[19] - 1 if len(packet) >= 20 and packet[0] >> 4 == 4 else -1)
                if pair not in self.paths:
                    continue
                for due in self._times(self.paths[pair], pair, last_due):
                    heapq.heappush(queue, (due, next(order), *pair, packet))
            now = time.monotonic()
            while queue and queue[0][0] <= now:
                _, _, sender, receiver, packet = heapq.heappop(queue)
                if self.paths[sender, receiver].silent:
                    continue
                try:
                    os.write(self.hosts[receiver].tun, packet)
                except OSError:
                    # The host's queue is full, or its interface is down: the packet is lost.
                    pass

    def _times(self, path: Route, pair: tuple[int, int], last_due: dict[tuple[int, int], float]) -> list[float]:
        """When copies of this packet arrive."""
        if path.silent or self.chance.random() < path.loss:
            return []
        due = time.monotonic() + path.delay_s + self.chance.random() * path.jitter_s
        due = last_due[pair] = max(due, last_due.get(pair, 0.0))
        if self.chance.random() < path.reorder:
            due += 0.005
        return [due, due] if self.chance.random() < path.duplicate else [due]
