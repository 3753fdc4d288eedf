"""A pipelined training step of PyTorch on two ranks, on the CPU over Gloo: torch.distributed.pipelining.

    .peer/bin/python bench/peer/pipeline.py --schedule zbv --cut 1 2 4 --batch-size 32
    .peer/bin/python bench/peer/pipeline.py --schedule 1f1b --ranks 4 --sleep 8 16 --link 5 --profile traces

The Llama of `models.py`, pinned ranks of one thread, and 8 micro-batches of a batch that is drawn once. `--cut` says how many blocks lie before each boundary between
stages. Interleaved and V schedules have three boundaries. Prints one line of JSON: the median step of rank 0, with the barriers around it.

With `--sleep`, stages sleep instead of computing, so that there can be more of them than cores. `--slow`, `--late` and `--link` plant faults. `--profile` writes a trace
of some steps for each rank.
"""
import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules

from models import Llama
from step import LLAMA, on_ranks, timed

# The class, and the stages of each rank: one, one in each of two loops, or one on the way to the last rank and one on the way back.
SCHEDULES = {
    "gpipe": (schedules.ScheduleGPipe, "line"),
    "1f1b": (schedules.Schedule1F1B, "line"),
    "looped_bfs": (schedules.ScheduleLoopedBFS, "loop"),
    "interleaved_1f1b": (schedules.ScheduleInterleaved1F1B, "loop"),
    "interleaved_zb": (schedules.ScheduleInterleavedZeroBubble, "loop"),
    "zbv": (schedules.ScheduleZBVZeroBubble, "v"),
    "dualpipev": (schedules.ScheduleDualPipeV, "v"),
}
PROFILED_STEPS = 9


class Stage(nn.Module):
    """Blocks `begin` to `end` of a Llama."""

    def __init__(self, whole: Llama, begin: int, end: int, is_last: bool) -> None:
        super().__init__()
        self.embed = whole.embed if begin == 0 else nn.Identity()
        self.blocks = whole.blocks[begin:end]
        self.head = nn.Sequential(whole.norm, whole.head) if is_last else nn.Identity()
        self.cos, self.sin = whole.cos, whole.sin

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(x)


class Nap(torch.autograd.Function):
    """Sleeps in both passes."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient.clone(), None, None


class SleepingStage(nn.Module):
    """A stage that only takes time. In every fourth step it is late, once, by `late_ms`."""

    def __init__(self, sleep_ms: list[float], late_ms: float) -> None:
        super().__init__()
        self.seconds, self.late_s, self.calls = [ms / 1e3 for ms in sleep_ms], late_ms / 1e3, 0
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        # Shapes are tried out before the first step. The third micro-batch of a step is late.
        is_late = self.training and torch.is_grad_enabled() and self.calls % 32 == 2
        self.calls += 1
        return Nap.apply(x * self.scale, self.seconds[0] + is_late * self.late_s, self.seconds[1])


class SlowReceive:
    """A message on a link with a delay: it is here so many seconds after it has left, which the sender writes down in `left`."""

    def __init__(self, work: dist.Work, left: np.ndarray, seconds: float) -> None:
        self.work, self.left, self.seconds = work, left, seconds

    def wait(self) -> None:
        while not self.left[0]:
            time.sleep(1e-4)
        time.sleep(max(0.0, self.left[0] + self.seconds - time.monotonic()))
        self.work.wait()


def slow_down_link(rank: int, seconds: float, left: np.ndarray) -> None:
    """Delays all messages. `left` has the time of each message, by sender and receiver, and is shared by the ranks."""
    send, receive = dist.isend, dist.irecv
    sent, received = ([itertools.count() for _ in left] for _ in range(2))

    def slow_send(tensor: Tensor, *, group_dst: int, **named: Any) -> dist.Work:
        left[rank, group_dst, next(sent[group_dst])] = time.monotonic()
        return send(tensor, group_dst=group_dst, **named)

    def slow_receive(tensor: Tensor, *, group_src: int, **named: Any) -> SlowReceive:
        at = next(received[group_src])
        return SlowReceive(receive(tensor, group_src=group_src, **named), left[group_src, rank, at : at + 1], seconds)

    dist.isend = dist.distributed_c10d.isend = slow_send
    dist.irecv = dist.distributed_c10d.irecv = slow_receive


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def train(rank: int, arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    schedule_class, order = SCHEDULES[arguments.schedule]
    num_stages = arguments.ranks * (1 if order == "line" else 2)
    places = {"line": [rank], "loop": [rank, arguments.ranks + rank], "v": [rank, num_stages - 1 - rank]}[order]
    if arguments.sleep:
        modules = {at: sleeping(rank, at, num_stages, arguments) for at in places}
        loss = weighted_sum
    else:
        whole, bounds = Llama(**LLAMA), [0, *arguments.cut, LLAMA["layers"]]
        modules, loss = {at: Stage(whole, bounds[at], bounds[at + 1], at + 1 == num_stages) for at in places}, loss_of
    stages = [PipelineStage(module, at, num_stages, torch.device("cpu")) for at, module in modules.items()]
    schedule = schedule_class(stages[0] if len(stages) == 1 else stages, 8, loss_fn=loss)
    if arguments.link:
        slow_down_link(rank, arguments.link / 1e3, arguments.left.numpy())
    optimizer = torch.optim.AdamW([parameter for stage in stages for parameter in stage.submod.parameters()], lr=1e-3, fused=True)
    if arguments.sleep:
        inputs, targets = torch.randn(arguments.batch_size, 1024), torch.randn(arguments.batch_size, 1024)
    else:
        inputs, targets = (torch.randint(0, LLAMA["vocab"], (arguments.batch_size, LLAMA["seq"])) for _ in range(2))
    first = [inputs] if any(stage.is_first for stage in stages) else []
    is_last = any(stage.is_last for stage in stages)

    def step() -> None:
        dist.barrier()
        schedule.step(*first, **({"target": targets, "losses": []} if is_last else {}))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()

    if arguments.profile:
        profiled(step, rank, arguments)
        return
    seconds, _ = timed(step, arguments)
    if rank == 0:
        print(json.dumps({"torch": torch.__version__, "step_ms": statistics.median(seconds) * 1e3, "steps": len(seconds)}), flush=True)


def sleeping(rank: int, at: int, num_stages: int, arguments: argparse.Namespace) -> SleepingStage:
    """The share of a rank's sleep in a stage. Costs are those of a whole rank, whatever the number of its stages."""
    chunks = num_stages // arguments.ranks
    slow = arguments.slow[1] if arguments.slow and arguments.slow[0] == rank else 1.0
    late_ms = arguments.late[1] if arguments.late and arguments.late[0] == rank and at == rank else 0.0
    return SleepingStage([slow * ms / chunks for ms in arguments.sleep], late_ms)


def weighted_sum(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output * targets).sum()


def profiled(step: Callable[[], None], rank: int, arguments: argparse.Namespace) -> None:
    """Writes a trace of some steps."""
    arguments.profile.mkdir(parents=True, exist_ok=True)
    for _ in range(arguments.warmup_steps):
        step()
    plan = torch.profiler.schedule(wait=0, warmup=1, active=PROFILED_STEPS, repeat=1)
    path = str(arguments.profile / f"rank_{rank}.json")
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, schedule=plan, on_trace_ready=lambda of: of.export_chrome_trace(path), record_shapes=True) as profiler:
        for _ in range(1 + PROFILED_STEPS):
            step()
            profiler.step()
    dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--cut", type=int, nargs="+", default=[3], help="blocks before each boundary (default: 3)")
    parser.add_argument("--batch-size", type=int, default=32, help="of a step (default: 32)")
    parser.add_argument("--seconds", type=float, default=5, help="time steps for this long (default: 5)")
    parser.add_argument("--ranks", type=int, default=2, help="more than two with --sleep (default: 2)")
    parser.add_argument("--sleep", type=float, nargs=2, metavar=("FORWARD", "BACKWARD"), help="milliseconds of a rank's passes of a micro-batch, instead of the Llama")
    parser.add_argument("--slow", type=float, nargs=2, metavar=("RANK", "TIMES"), help="a rank sleeps so many times as long")
    parser.add_argument("--late", type=float, nargs=2, metavar=("RANK", "MS"), help="in every fourth step, a pass of a rank is late")
    parser.add_argument("--link", type=float, default=0, metavar="MS", help="each message is there so much later")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write a trace of some steps for each rank")
    parser.set_defaults(threads=1, warmup_steps=2)
    arguments = parser.parse_args()
    arguments.left = torch.zeros(arguments.ranks, arguments.ranks, 4096, dtype=torch.float64).share_memory_()
    on_ranks(train, arguments)
