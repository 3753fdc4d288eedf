"""A pipelined training step of PyTorch on two ranks, on the CPU over Gloo: torch.distributed.pipelining.

    .peer/bin/python bench/peer/pipeline.py --schedule zbv --cut 1 2 4 --batch-size 32

The Llama of `models.py`, pinned ranks of one thread, and 8 micro-batches of a batch that is drawn once. `--cut` says how many blocks lie before each boundary between
stages. Interleaved and V schedules have three boundaries. Prints one line of JSON: the median step of rank 0, with the barriers around it.
"""
import argparse
import json
import statistics

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules

from models import Llama
from step import LLAMA, on_ranks, timed

# The class, and the stages of each rank.
SCHEDULES = {
    "gpipe": (schedules.ScheduleGPipe, ([0], [1])),
    "1f1b": (schedules.Schedule1F1B, ([0], [1])),
    "interleaved_1f1b": (schedules.ScheduleInterleaved1F1B, ([0, 2], [1, 3])),
    "interleaved_zb": (schedules.ScheduleInterleavedZeroBubble, ([0, 2], [1, 3])),
    "zbv": (schedules.ScheduleZBVZeroBubble, ([0, 3], [1, 2])),
}


class Stage(nn.Module):
    """Blocks `begin` to `end` of a Llama."""

    def __init__(self, whole: Llama, begin: int, end: int) -> None:
        super().__init__()
        self.embed = whole.embed if begin == 0 else nn.Identity()
        self.blocks = whole.blocks[begin:end]
        self.head = nn.Sequential(whole.norm, whole.head) if end == LLAMA["layers"] else nn.Identity()
        self.cos, self.sin = whole.cos, whole.sin

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(x)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def train(rank: int, arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    whole = Llama(**LLAMA)
    schedule_class, places = SCHEDULES[arguments.schedule]
    bounds = [0, *arguments.cut, LLAMA["layers"]]
    stages = [PipelineStage(Stage(whole, bounds[at], bounds[at + 1]), at, len(bounds) - 1, torch.device("cpu")) for at in places[rank]]
    schedule = schedule_class(stages[0] if len(stages) == 1 else stages, 8, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([parameter for stage in stages for parameter in stage.submod.parameters()], lr=1e-3, fused=True)
    inputs, targets = (torch.randint(0, LLAMA["vocab"], (arguments.batch_size, LLAMA["seq"])) for _ in range(2))
    first = [inputs] if any(stage.is_first for stage in stages) else []
    is_last = any(stage.is_last for stage in stages)

    def step() -> None:
        dist.barrier()
        schedule.step(*first, **({"target": targets, "losses": []} if is_last else {}))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()

    seconds, _ = timed(step, arguments)
    if rank == 0:
        print(json.dumps({"torch": torch.__version__, "step_ms": statistics.median(seconds) * 1e3, "steps": len(seconds)}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--cut", type=int, nargs="+", default=[3], help="blocks before each boundary (default: 3)")
    parser.add_argument("--batch-size", type=int, default=32, help="of a step (default: 32)")
    parser.add_argument("--seconds", type=float, default=5, help="time steps for this long (default: 5)")
    parser.set_defaults(ranks=2, threads=1, warmup_steps=2)
    on_ranks(train, parser.parse_args())
