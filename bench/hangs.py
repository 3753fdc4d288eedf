"""Jobs of PyTorch that hang, as files of its flight recorder: whom does `paceline hang` name?

    python3 bench/hangs.py                     # forty faults
    python3 bench/hangs.py --only 3 --keep DIR # one of them, whose files stay in DIR
    python3 bench/hangs.py --watch             # programs in PyTorch that hang, and some that are slow, under `paceline record --watch-hang`

A job is simulated: the host of a rank puts calls into the queue of its device, some calls ahead, and the device takes them one by one; a call ends when
all members of its group have begun it. Each fault stops or changes one rank. When nobody can go on, every rank writes what
torch/csrc/distributed/c10d/FlightRecorderDetail.hpp of PyTorch 2.15 writes (pickles of protocol 2 with shared frames), or what earlier versions wrote.
Gloo writes less: no state but `retired`, no members of groups, no sends and receives (seen in 2.15). The exit code is 1 if a culprit is not named.

With `--watch`, three ranks of bench/peer/hanging.py run over Gloo. A program that hangs is to be explained, with rank 1 as the cause, within 90 s; one that is
slow for twice the limit is not. The answers go into the same file of results.
"""
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from common import arguments_for, ended, parsed, provenance, write

START_NS = 1_796_000_000_000_000_000
CALL_NS = 2_000_000
# A buffer of this many entries loses the older ones.
BUFFER = 60


@dataclass(frozen=True)
class Call:
    group: str
    kind: str
    elems: int
    line: int
    dtype: str = "Float"
    peer: int | None = None  # of a send or receive
    is_awaited: bool = False  # the host waits for the device


@dataclass
class Rank:
    calls: list[Call]
    enqueued: int = 0
    started: int = 0
    completed: int = 0
    host_stops: int | None = None
    device_stops: int | None = None
    times: dict[int, list[int]] = field(default_factory=dict)


class Job:
    """Ranks with their calls; `groups` has the ranks of each name."""

    def __init__(self, groups: dict[str, tuple[str, list[int]]], calls: list[list[Call]], ahead: int, is_gloo: bool):
        self.groups, self.ahead, self.is_gloo = groups, 1 if is_gloo else ahead, is_gloo
        self.ranks = [Rank(of) for of in calls]

    def may_enqueue(self, rank: Rank) -> bool:
        last = rank.calls[rank.enqueued - 1] if rank.enqueued else None
        blocks = last is not None and last.is_awaited and rank.completed < rank.enqueued
        there = rank.enqueued < len(rank.calls) and rank.enqueued != rank.host_stops
        return there and not blocks and rank.enqueued - rank.completed < self.ahead

    def number(self, rank: int, at: int) -> tuple:
        """Which call of all ranks it is: of a group, or between two ranks."""
        call = self.ranks[rank].calls[at]
        before = self.ranks[rank].calls[:at]
        if call.peer is None:
            return call.group, sum(of.group == call.group and of.peer is None for of in before)
        way = (rank, call.peer) if call.kind == "send" else (call.peer, rank)
        return call.group, way, sum(of.group == call.group and (of.kind, of.peer) == (call.kind, call.peer) for of in before)

    def meets(self, rank: int, at: int) -> bool:
        """Whether all that take part in a call have begun it, and mean the same."""
        call = self.ranks[rank].calls[at]
        members = [rank, call.peer] if call.peer is not None else self.groups[call.group][1]
        number = self.number(rank, at)
        for member in members:
            of = self.ranks[member]
            if of.started <= of.completed or of.device_stops == of.completed or self.number(member, of.completed) != number:
                return False
            theirs = of.calls[of.completed]
            if call.peer is None and (theirs.kind, theirs.elems, theirs.dtype) != (call.kind, call.elems, call.dtype):
                return False
        return True

    def run(self) -> None:
        now, is_moving = START_NS, True
        while is_moving:
            is_moving = False
            now += CALL_NS
            for rank in self.ranks:
                if self.may_enqueue(rank):
                    rank.times[rank.enqueued] = [now]
                    rank.enqueued += 1
                    is_moving = True
                if rank.started == rank.completed < rank.enqueued and rank.device_stops != rank.started:
                    rank.times[rank.started].append(now)
                    rank.started += 1
                    is_moving = True
            met = [rank for number, rank in enumerate(self.ranks) if rank.started > rank.completed and self.meets(number, rank.completed)]
            for rank in met:
                rank.times[rank.completed].append(now)
                rank.completed += 1
                is_moving = True

    def dump(self, number: int, version: str) -> dict:
        rank, entries, counters = self.ranks[number], [], {}
        names = [name for name, (_, ranks) in self.groups.items() if number in ranks]
        status = {str(at): dict(last_enqueued_collective=-1, last_started_collective=-1, last_completed_collective=-1) for at in range(len(names))}
        frames = {}
        for at, call in enumerate(rank.calls[: rank.enqueued]):
            seq, p2p, op = counters.setdefault(call.group, [0, 0, 0])
            seq, p2p, op = (seq, p2p + 1, op + 1) if call.peer is not None else (seq + 1, p2p, op + 1)
            counters[call.group] = [seq, p2p, op]
            local, times = names.index(call.group), rank.times[at]
            state = "completed" if at < rank.completed else "started" if at < rank.started else "scheduled"
            of = status[str(local)]
            of["last_enqueued_collective"] = op if self.is_gloo else seq + p2p
            if state == "completed":
                of["last_completed_collective"] = of["last_enqueued_collective"]
            if state != "scheduled" and not self.is_gloo:
                of["last_started_collective"] = of["last_enqueued_collective"]
            if self.is_gloo and call.peer is not None:
                continue
            name = call.kind
            if call.peer is not None:
                ranks = self.groups[call.group][1]
                way = (number, call.peer) if call.kind == "send" else (call.peer, number)
                name = "{} {}{}{}".format(call.kind, ranks.index(way[call.kind == "recv"]), "->" if call.kind == "send" else "<-", ranks.index(way[call.kind != "recv"]))
            lines = [("all_reduce", "torch/distributed/distributed_c10d.py", 4174), ("step", "train.py", call.line), ("<module>", "train.py", 400)]
            entry = {
                "frames": [frames.setdefault(of, dict(name=of[0], filename=of[1], line=of[2])) for of in lines],
                "record_id": at, "pg_id": local, "process_group": (call.group, self.groups[call.group][0]),
                "thread_name": "python", "thread_id": "1401",
                "collective_seq_id": seq, "p2p_seq_id": p2p, "op_id": op,
                "profiling_name": f"{'gloo' if self.is_gloo else 'nccl'}:{name}", "time_created_ns": times[0],
                "input_sizes": [[call.elems]], "input_dtypes": [call.dtype], "output_sizes": [[call.elems]], "output_dtypes": [call.dtype],
                "state": "scheduled" if self.is_gloo else state,
                "time_discovered_started_ns": times[1] if len(times) > 1 and not self.is_gloo else None,
                "time_discovered_completed_ns": times[2] if len(times) > 2 and not self.is_gloo else None,
                "retired": state == "completed", "timeout_ms": 600_000, "is_p2p": call.peer is not None,
            }
            if version < "2.9":
                del entry["thread_name"], entry["thread_id"]
            entries.append(entry)
        config = {name: dict(name=name, desc=self.groups[name][0], ranks=str(self.groups[name][1])) for name in names}
        if self.is_gloo:
            config = {"": dict(name="", desc="", ranks=str(self.groups[names[-1]][1]))}
        extra = {"2.4": {}, "2.7": {"nccl_version": "2.21.5"}, "2.10": {"comm_lib_version": "" if self.is_gloo else "2.28.3"}}[version]
        return {"version": version, "pg_config": config, "pg_status": status, "entries": entries[-BUFFER:], **extra}


def replicas(ranks: int, steps: int = 12) -> tuple[dict, list]:
    """DistributedDataParallel: three buckets a step, and the loss, for which the host waits."""
    step = [Call("0", "all_reduce", elems, 40 + at) for at, elems in enumerate([4096, 9000, 512])]
    step.append(Call("0", "all_reduce", 1, 52, is_awaited=True))
    return {"0": ("default_pg", list(range(ranks)))}, [step * steps for _ in range(ranks)]


def shards(ranks: int, steps: int = 6) -> tuple[dict, list]:
    """fully_shard: gathers, reductions, a barrier at the end of a step."""
    gathers = [Call("0", "_all_gather_base", 1000 + at, 60) for at in range(4)]
    reductions = [Call("0", "_reduce_scatter_base", 1000 + at, 70) for at in range(4)]
    step = [*gathers, *gathers[::-1], *reductions, Call("0", "all_reduce", 1, 81, is_awaited=True)]
    return {"0": ("default_pg", list(range(ranks)))}, [step * steps for _ in range(ranks)]


def grid(tensor: int, data: int, stages: int, steps: int = 3, batches: int = 2) -> tuple[dict, list]:
    """Tensor x data x pipeline parallelism: stages send, layers and gradients are reduced, and all ranks add up the loss."""
    ranks = range(tensor * data * stages)
    place = {rank: (rank % tensor, rank // tensor % data, rank // (tensor * data)) for rank in ranks}
    groups = {"0": ("default_pg", list(ranks))}
    for name, axis in [("tp", 0), ("dp", 1), ("pp", 2)]:
        for rank in ranks:
            same = [of for of in ranks if all(place[of][other] == place[rank][other] for other in range(3) if other != axis)]
            groups.setdefault(f"{name}_{same}", (name, same))
    by = {(name, rank): of for of, (name, members) in groups.items() for rank in members}
    calls: list[list[Call]] = [[] for _ in ranks]
    for rank in ranks:
        stage, apart = place[rank][2], tensor * data
        tp, dp, pp = (by[name, rank] for name in ("tp", "dp", "pp"))
        for _ in range(steps):
            for _ in range(batches):
                if stage > 0:
                    calls[rank].append(Call(pp, "recv", 640, 101, peer=rank - apart))
                calls[rank] += [Call(tp, "all_reduce", 640, 110 + at) for at in range(2)]
                if stage + 1 < stages:
                    calls[rank].append(Call(pp, "send", 640, 120, peer=rank + apart))
            for _ in range(batches):
                if stage + 1 < stages:
                    calls[rank].append(Call(pp, "recv", 640, 131, peer=rank + apart))
                calls[rank] += [Call(tp, "all_reduce", 640, 140 + at) for at in range(2)]
                if stage > 0:
                    calls[rank].append(Call(pp, "send", 640, 150, peer=rank - apart))
            calls[rank] += [Call(dp, "all_reduce", 5000 + at, 160) for at in range(2)]
            calls[rank].append(Call("0", "all_reduce", 1, 170, is_awaited=True))
    return groups, calls


def cases(seed: int) -> list[tuple[str, str, list[int], Job, list[int], str]]:
    """Forty faults: what happens, the cause to name, its ranks, the job, ranks without a file, and the version of the files."""
    draw, found = random.Random(seed), []
    makes = [lambda: replicas(8), lambda: shards(4), lambda: grid(2, 4, 2), lambda: grid(2, 2, 4), lambda: grid(4, 2, 2)]

    def add(title: str, cause: str, make: int, change, version: str = "2.10", is_gloo: bool = False) -> None:
        groups, calls = makes[make]()
        job = Job(groups, calls, draw.choice([1, 3, 8]), is_gloo)
        culprits, missing = change(job)
        job.run()
        assert any(rank.completed < len(rank.calls) for rank in job.ranks), title
        found.append((title, cause, sorted(culprits), job, missing, version))

    def place(job: Job, fits=lambda call: True) -> tuple[int, int]:
        rank = draw.randrange(len(job.ranks))
        calls = job.ranks[rank].calls
        return rank, draw.choice([at for at in range(len(calls) // 3, len(calls) - 4) if fits(calls[at])])

    def host(job: Job):
        rank, at = place(job)
        job.ranks[rank].host_stops = at
        return [rank], []

    def gone(job: Job):
        rank, at = place(job)
        job.ranks[rank].host_stops = at
        return [rank], [rank]

    def device(job: Job):
        rank, at = place(job)
        job.ranks[rank].device_stops = at
        return [rank], []

    def collective(call: Call) -> bool:
        return call.peer is None

    def changed(job: Job, **how):
        # With two members nobody is the minority.
        rank, at = place(job, lambda call: collective(call) and not call.is_awaited and len(job.groups[call.group][1]) > 2)
        calls = job.ranks[rank].calls = list(job.ranks[rank].calls)
        calls[at] = replace(calls[at], **how)
        return [rank], []

    def swapped(job: Job):
        rank, at = place(job, collective)
        calls = job.ranks[rank].calls = list(job.ranks[rank].calls)
        other = next(of for of in range(at + 1, len(calls)) if calls[of].group == calls[at].group and calls[of].elems != calls[at].elems and calls[of].peer is None)
        calls[at], calls[other] = calls[other], calls[at]
        return [rank], []

    for version in ("2.10", "2.7", "2.4"):
        add("a host stops, replicas", "host", 0, host, version)
        add("a host stops, shards", "host", 1, host, version)
    for make in (2, 3, 4):
        for _ in range(2):
            add("a host stops, a grid of 16", "host", make, host)
            add("a device stops, a grid of 16", "device", make, device)
    add("a device stops, replicas", "device", 0, device)
    add("a device stops, replicas, 2.4", "device", 0, device, "2.4")
    add("a device stops, shards", "device", 1, device)
    add("a device stops, shards, again", "device", 1, device)
    for make in (0, 1, 2, 3):
        add("a process is gone with its file", "no file", make, gone)
    for make in (0, 1, 2):
        add("another size", "desynchronized", make, lambda job: changed(job, elems=777))
    for make in (0, 1, 2):
        add("another type", "desynchronized", make, lambda job: changed(job, dtype="Half"))
    for make in (0, 1, 4):
        add("another operation", "desynchronized", make, lambda job: changed(job, kind="broadcast"))
    add("calls swapped, replicas", "desynchronized", 0, swapped)
    add("calls swapped, shards", "desynchronized", 1, swapped)
    add("a host stops, gloo", "host", 0, host, is_gloo=True)
    add("a process is gone, gloo", "no file", 1, gone, is_gloo=True)
    add("another size, gloo", "desynchronized", 0, lambda job: changed(job, elems=777), is_gloo=True)
    assert len(found) == 40, len(found)
    return found


def save(folder: Path, case) -> None:
    _, _, _, job, missing, version = case
    for number in range(len(job.ranks)):
        if number not in missing:
            (folder / f"nccl_trace_rank_{number}").write_bytes(pickle.dumps(job.dump(number, version), protocol=2))


HANGING = ("skips a call", "calls in another order", "holds a lock", "sleeps")
SLOW = ("evaluates", "computes in one call", "loads", "all wait for data")
LIMIT_S, MOST_S = 60, 90


def watched(args, kind: str) -> dict:
    """Runs a program under the watch until it is explained or ends."""
    with tempfile.TemporaryDirectory(prefix="hang_") as folder:
        torchrun = [args.peer_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
        program = [Path(__file__).parent / "peer/hanging.py", kind, str(2 * LIMIT_S)]
        command = [args.paceline, "record", "--watch-hang", str(LIMIT_S), "--", *torchrun, *program]
        own = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=folder, env=own, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        answer, seconds, begun = [], None, Path(folder, "begun")
        for line in process.stdout:
            if "The job hangs" in line:
                seconds = time.time() - float(begun.read_text())
            if seconds is not None:
                answer.append(re.sub(r"/\S*/(?=(bench|torch)/)", "", line.rstrip()))
            if "The program still runs" in line:
                os.killpg(process.pid, signal.SIGKILL)
                break
        code = process.wait(30)
        if seconds is None and (code != 0 or not begun.exists()):
            raise RuntimeError(f"{kind}: the program ended with {code}")
        is_right = seconds is None if kind in SLOW else seconds is not None and seconds < MOST_S and any("ank 1 " in line for line in answer)
        print(f"{kind:24} {'nothing was said' if seconds is None else f'answered after {seconds:.1f} s'}", *answer, sep="\n    ", flush=True)
        return {"program": kind, "is_slow": kind in SLOW, "answer_after_s": seconds, "answer": answer, "is_right": is_right}


def watch(args) -> int:
    kept = json.loads(args.out.read_text()) if args.out.exists() else {}
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(lambda kind: watched(args, kind), HANGING + SLOW))
    write(args.out, kept | {"watch": provenance() | {"limit_s": LIMIT_S, "most_s": MOST_S, "programs": rows}})
    return 0 if all(row["is_right"] for row in rows) else 1


def main() -> int:
    parser = arguments_for(__doc__, "hangs.json", rounds=0, has_peer=True)
    parser.add_argument("--watch", action="store_true", help="programs under `paceline record --watch-hang`")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of faults, from 1")
    parser.add_argument("--seed", type=int, default=63, metavar="N", help="draws ranks and calls (default: 63)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the files stay")
    args = parsed(parser)
    if args.watch:
        return watch(args)
    rows = []
    for number, case in enumerate(cases(args.seed), 1):
        if args.only and number not in args.only:
            continue
        with tempfile.TemporaryDirectory() as kept:
            folder = args.keep or Path(kept)
            folder.mkdir(parents=True, exist_ok=True)
            save(folder, case)
            found = folder / "found.json"
            _, _, errors = ended([args.paceline, "hang", folder, "--json", found], folder, 60, text=True)
            said = json.loads(found.read_text()) if found.exists() else {"error": errors.strip()}
        named = sorted((of["cause"], of["rank"]) for of in said.get("culprits", []))
        is_right = named == [(case[1], rank) for rank in case[2]]
        print(f"{number:2} {case[0]:34} {case[1]:15} {case[2]}  ->  {'named' if is_right else said.get('error') or named}", flush=True)
        rows.append({"fault": case[0], "cause": case[1], "ranks": case[2], "said": named, "is_right": is_right})
    if not args.only:
        kept = json.loads(args.out.read_text()) if args.out.exists() else {}
        write(args.out, {**kept, **provenance(), "named": sum(row["is_right"] for row in rows), "of": len(rows), "faults": rows})
    return 0 if all(row["is_right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
