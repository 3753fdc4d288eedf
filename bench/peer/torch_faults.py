"""Ranks that are killed, stopped or call something else, drawn by seed; or groups made and destroyed. Prints a JSON line for each case.

    python torch_faults.py faults SEED CASES
    python torch_faults.py groups BACKEND NUMBER

The ranks of a case are forks of a process that has imported torch. They end as programs do, through the end of the interpreter.
"""
import datetime
import gc
import json
import os
import random
import re
import select
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401  DDP imports it: once here, instead of on each rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# Of an operation; and how long after the fault each rank may take to name it. A stop is noticed by the limit alone.
LIMIT_S, NAMED_WITHIN_S = 3.0, 1.0
# The end of an interpreter with torch takes a third of a second, and much longer on a busy machine.
END_S = 60


def draw(seed):
    of = random.Random(seed)
    world, fault = of.choice((2, 2, 3, 4)), of.choice(("kill", "kill", "stop", "mismatch", "mismatch"))
    return {"seed": seed, "ranks": world, "program": of.choice(("ddp", "plain")), "fault": fault, "victim": of.randrange(world), "at": of.random()}


def one_operation(of, rank, world):
    """An operation that all ranks draw alike."""
    elems = of.choice((1, 1000, 300_000))
    data, whole = torch.ones(elems), torch.ones(elems * world)
    of.choice(
        (
            lambda: dist.all_reduce(data),
            lambda: [work.wait() for work in [dist.all_reduce(tensor, async_op=True) for tensor in (data, whole)]],
            lambda: dist.broadcast(data, of.randrange(world)),
            lambda: dist.all_gather_single(whole, data),
            lambda: dist.reduce_scatter_single(data, whole),
            lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
            lambda: [work.wait() for work in (dist.isend(data, (rank + 1) % world), dist.irecv(torch.empty_like(data), (rank - 1) % world))],
            dist.barrier,
        )
    )()


def other_call(of):
    """A call that no other rank makes."""
    of.choice((lambda: dist.all_reduce(torch.ones(7)), lambda: dist.all_reduce(torch.ones(5, dtype=torch.int32)), lambda: dist.broadcast(torch.ones(5), 0), dist.barrier))()


def train(case, rank, place, tell):
    """Trains, or runs operations, until something fails."""
    world, of = case["ranks"], random.Random(case["seed"])
    dist.init_process_group("paceline", init_method=f"file://{place}/store", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=LIMIT_S))
    if case["program"] == "ddp":
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), bucket_cap_mb=of.choice((0.2, 25)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrong_step = 1 + int(case["at"] * 20) if case["fault"] == "mismatch" else None
    for step in range(1_000_000):
        if step == wrong_step:
            if rank == case["victim"]:
                tell(fault=time.monotonic())
                other_call(of)
            dist.all_reduce(torch.ones(5))
        if case["program"] == "ddp":
            F.mse_loss(model(torch.randn(8, 256)), torch.zeros(8, 256)).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            one_operation(of, rank, world)
        if step == 0:
            tell(ready=True)


def rank_main(case, rank, place, pipe):
    def tell(**facts):
        os.write(pipe, json.dumps({"rank": rank} | facts).encode() + b"\n")

    try:
        train(case, rank, place, tell)
    except Exception as error:
        tell(error=f"{type(error).__name__}: {error}"[:600], at=time.monotonic())
    sys.exit(0)


class Reports:
    """Lines that the ranks write to a pipe."""

    def __init__(self, pipe):
        self.pipe, self.rest, self.ready, self.errors, self.fault_s = pipe, b"", set(), {}, None

    def read_until(self, is_enough, limit_s=END_S):
        """Reads until there is enough or the pipe ends."""
        deadline, text = time.monotonic() + limit_s, b"."
        while not is_enough() and text and select.select([self.pipe], [], [], max(deadline - time.monotonic(), 0))[0]:
            text = os.read(self.pipe, 1 << 16)
            *lines, self.rest = (self.rest + text).split(b"\n")
            for line in map(json.loads, lines):
                self.ready |= {line["rank"]} if "ready" in line else set()
                self.errors |= {line["rank"]: line} if "error" in line else {}
                self.fault_s = line.get("fault", self.fault_s)


def judged(case, reports, codes):
    """What is wrong with the end of a case. A stopped rank may also be named by what another rank has said about it."""
    victim, fault = case["victim"], case["fault"]
    # A rank may also wait for others that wait for the stopped rank.
    names = {"kill": f"rank {victim} died", "stop": rf"ranks \[[\d, ]*\b{victim}\b", "mismatch": "the ranks disagree"}[fault]
    wrong = [f"rank {rank} ended with {code}" for rank, code in codes.items() if code != (-signal.SIGKILL if (fault, rank) == ("kill", victim) else 0)]
    for rank in codes:
        report, is_victim = reports.errors.get(rank), rank == victim
        if fault == "kill" and is_victim:
            continue
        if report is None or not reports.fault_s:
            wrong.append(f"rank {rank} named nothing")
        elif fault != "stop" or not is_victim:
            took_s = report["at"] - reports.fault_s
            wrong += [f"rank {rank}: {report['error']}"] if not re.search(names, report["error"]) else []
            wrong += [f"rank {rank} took {took_s:.2f} s"] if took_s > NAMED_WITHIN_S + (LIMIT_S if fault == "stop" else 0) else []
    return wrong


def shared_files(pids):
    """Files in shared memory that carry our name or that of one of these processes."""
    return [name for name in os.listdir("/dev/shm") if "paceline" in name or any(f"_{pid}_" in name for pid in pids)]


def exit_code(pid):
    """How a rank has ended. One that has not ended soon is killed."""
    limit = time.monotonic() + 2
    while (status := os.waitpid(pid, os.WNOHANG))[0] == 0:
        time.sleep(0.002)
        if time.monotonic() > limit:
            os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status[1])


def run(case):
    (pipe, write), place, pids, begin = os.pipe(), tempfile.mkdtemp(), {}, time.monotonic()
    for rank in range(case["ranks"]):
        pids[rank] = os.fork()
        if pids[rank] == 0:
            os.close(pipe)
            rank_main(case, rank, place, write)
    os.close(write)
    reports, fault, others = Reports(pipe), case["fault"], set(pids)
    reports.read_until(lambda: reports.ready == set(pids), 4 * END_S)
    if fault != "mismatch":
        others = others - {case["victim"]}
        time.sleep(case["at"] / 4)
        reports.fault_s = time.monotonic()
        os.kill(pids[case["victim"]], signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    reports.read_until(lambda: others <= set(reports.errors))
    if fault == "stop":
        os.kill(pids[case["victim"]], signal.SIGCONT)
    reports.read_until(lambda: False)
    codes = {rank: exit_code(pid) for rank, pid in pids.items()}
    os.close(pipe)
    Path(place, "store").unlink(missing_ok=True)
    os.rmdir(place)
    times = [report["at"] - (reports.fault_s or 0) for rank, report in reports.errors.items() if rank in others]
    wrong = judged(case, reports, codes) + [f"left: {name}" for name in shared_files(pids.values())]
    return case | {"named_within_s": round(max(times, default=0), 3), "wrong": wrong, "took_s": round(time.monotonic() - begin, 2)}


def resources():
    memory = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    counts = {name: len(os.listdir(folder)) for name, folder in (("descriptors", "/proc/self/fd"), ("threads", "/proc/self/task"))}
    kilobytes = {name: int(memory[key].split()[0]) for name, key in (("private_kb", "RssAnon"), ("shared_kb", "RssShmem"))}
    return counts | {"mappings": len(Path("/proc/self/maps").read_text().splitlines()), "in_dev_shm": len(shared_files({os.getpid()}))} | kilobytes


def make_groups(rank, place, backend, number):
    """Makes and destroys groups, and counts what this process has after a tenth of them and at the end."""
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
    data, counted = torch.ones(1000), []
    for at in range(number):
        group = dist.new_group(backend=backend)
        dist.all_reduce(data, group=group)
        for work in (dist.all_reduce(data, group=group, async_op=True), dist.isend(data, 1 - rank, group), dist.irecv(torch.empty(1000), 1 - rank, group)):
            work.wait()
        dist.destroy_process_group(group)
        if at + 1 in (number // 10, number):
            # Threads that have ended are gone a little later.
            time.sleep(1)
            counted.append(resources())
    figures = {"backend": backend, "rank": rank, "groups": number, "after_a_tenth": counted[0], "at_the_end": counted[-1]}
    os.write(1, json.dumps(figures).encode() + b"\n")
    dist.destroy_process_group()


def main(part, first, number="0"):
    torch.set_num_threads(1)
    if part == "groups":
        with tempfile.TemporaryDirectory() as place:
            torch.multiprocessing.spawn(make_groups, (place, first, int(number)), 2)
        return
    dist.Backend._ensure_backend_registered("paceline")
    # The end of a rank need not look through all of torch.
    gc.freeze()
    for seed in range(int(first), int(first) + int(number)):
        print(json.dumps(run(draw(seed))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
