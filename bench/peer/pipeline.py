"""A pipelined training step of PyTorch, on the CPU over Gloo: torch.distributed.pipelining.

    .peer/bin/python bench/peer/pipeline.py --schedule 1f1b --cut 3 --batch-size 32 --micro-batches 8

The Llama of `llama.py`. `--cut` says how many blocks lie before each boundary between stages; the first stage has the embedding,
the last one norm and head. Schedules with two stages on a rank take three numbers. Each rank has one thread, and is pinned to
its own core if there are enough. The batch is drawn once and reused.

Prints one line of JSON: the median step of rank 0, barriers around it included, and samples per second.
"""
import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules

from llama import Llama
from step import LLAMA, on_ranks

SCHEDULES = {  # the class, and the stages of a rank
    "gpipe": (schedules.ScheduleGPipe, 1),
    "1f1b": (schedules.Schedule1F1B, 1),
    "looped_bfs": (schedules.ScheduleLoopedBFS, 2),
    "interleaved_1f1b": (schedules.ScheduleInterleaved1F1B, 2),
    "interleaved_zb": (schedules.ScheduleInterleavedZeroBubble, 2),
    "zbv": (schedules.ScheduleZBVZeroBubble, 2),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time one pipelined training step of PyTorch.")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cut", type=int, nargs="+", default=[3], help="blocks before each boundary (default: 3)")
    parser.add_argument("--batch-size", type=int, default=32, help="of a step (default: 32)")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--warmup-steps", type=int, default=2)
    parser.set_defaults(threads=1)
    return parser.parse_args()


class Stage(nn.Module):
    """Blocks `begin` to `end` of a Llama."""

    def __init__(self, whole: Llama, begin: int, end: int, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embed = whole.embed if is_first else None
        self.blocks = whole.blocks[begin:end]
        self.norm, self.head = (whole.norm, whole.head) if is_last else (None, None)
        self.register_buffer("cos", whole.cos)
        self.register_buffer("sin", whole.sin)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x if self.head is None else self.head(self.norm(x))


def stages_of(rank: int, ranks: int, chunks: int, is_v: bool) -> list[int]:
    if chunks == 1:
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if is_v else [rank, rank + ranks]


def train(rank: int, arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    whole = Llama(**LLAMA)
    schedule_class, chunks = SCHEDULES[arguments.schedule]
    bounds = [0, *arguments.cut, LLAMA["layers"]]
    count = arguments.ranks * chunks
    if len(bounds) != count + 1:
        raise SystemExit(f"{arguments.schedule} has {count} stages: give {count - 1} numbers to --cut")
    stages = [
        PipelineStage(
            Stage(whole, bounds[at], bounds[at + 1], at == 0, at == count - 1), at, count, torch.device("cpu")
        )
        for at in stages_of(rank, arguments.ranks, chunks, arguments.schedule == "zbv")
    ]

    def loss_of(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    schedule = schedule_class(stages[0] if chunks == 1 else stages, arguments.micro_batches, loss_fn=loss_of)
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    inputs = torch.randint(0, LLAMA["vocab"], (arguments.batch_size, LLAMA["seq"]))
    targets = torch.randint(0, LLAMA["vocab"], (arguments.batch_size, LLAMA["seq"]))
    is_first, is_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)

    def step() -> None:
        losses: list[Tensor] = []
        schedule.step(*([inputs] if is_first else []), **({"target": targets, "losses": losses} if is_last else {}))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(arguments.warmup_steps):
        step()
    times, goes_on, begin = [], torch.ones(1), time.perf_counter()
    while goes_on.item() > 0:
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        times.append(time.perf_counter() - start)
        goes_on.fill_(float(time.perf_counter() - begin < arguments.seconds))
        dist.broadcast(goes_on, 0)
    if rank == 0:
        step_ms = statistics.median(times) * 1e3
        samples_per_s = arguments.batch_size / step_ms * 1e3
        record = {"torch": torch.__version__, "step_ms": step_ms, "samples_per_s": samples_per_s, "steps": len(times)}
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    on_ranks(train, parse_arguments())
