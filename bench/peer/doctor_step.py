"""A training step of PyTorch with one fault, or with the change that the trace doctor advises for it.

    .peer/bin/python bench/peer/doctor_step.py --case optimizer --followed --out traces/after

With --out, each rank writes the trace of 8 steps to OUT/rank_<r>. Without it, rank 0 prints one line of JSON with the mean time in milliseconds of a step, or of
as many samples as the step with the fault has. There are two ranks over Gloo with one thread each, or one for cases that are not about ranks.
"""
import argparse
import contextlib
import functools
import itertools
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from torch.utils.data import DataLoader, default_collate

from models import CLASSES, mlp
from step import on_ranks

# Nothing is wrong with the `sound` cases.
RANKS = ["loader", "first_bucket", "small_buckets", "no_sync", "optimizer", "straggler", "busy_core", "exposed", "sound", "sound_cnn", "sound_transformer", "sound_loader"]
ONE_RANK = ["channels_last", "compile", "batch", "attention", "host_work", "item", "sound_one_rank"]
LARGER_BATCH = 4
WARMUP, ACTIVE = 8, 8


def load(shape: tuple[int, ...], wait_ms: float, indices: list[int]) -> tuple[Tensor, Tensor]:
    """A batch from a slow disk: each sample takes `wait_ms`, in which nothing is computed."""
    time.sleep(wait_ms * len(indices) / 1e3)
    return default_collate([(torch.full(shape, float(index % 7)), index % CLASSES) for index in indices])


class Chain(nn.Module):
    """Element-wise operations that a compiler makes one kernel of."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.tanh(x * 1.01 + 0.01) * torch.sigmoid(x)
        return x


class Attention(nn.Module):
    """Self-attention by hand, or by the fused operator."""

    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.is_fused = is_fused
        self.project = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        if self.is_fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = torch.softmax(q @ k.transpose(-2, -1) / 4, -1) @ v
        return x + mixed.transpose(1, 2).flatten(2)


class Mean(nn.Module):
    """The mean over the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def augmented(shape: tuple[int, ...], indices: list[int]) -> tuple[Tensor, Tensor]:
    """A batch whose samples are made noisy, shifted and flipped one by one."""
    samples = [torch.full(shape, float(index % 7)) for index in indices]
    for sample in samples:
        for at in range(4):
            sample.add_(torch.randn(shape)).copy_(sample.roll(at).flip(-1))
    return torch.stack(samples), torch.tensor([index % CLASSES for index in indices])


def model_of(case: str, followed: bool) -> tuple[nn.Module, tuple[int, ...], int]:
    """The model of a case, the shape of a sample, and the samples of a step."""
    match case:
        case "channels_last" | "sound_cnn":
            channels = itertools.pairwise([3] + 6 * [32])
            layers = [layer for a, b in channels for layer in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())]
            return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)), (3, 32, 32), 8
        case "sound_transformer":
            layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
            return nn.Sequential(nn.TransformerEncoder(layer, 2), Mean(), nn.Linear(128, CLASSES)), (64, 128), 16
        case "attention":
            blocks = [Attention(followed), Attention(followed)]
            return nn.Sequential(*blocks, Mean(), nn.Linear(64, CLASSES)), (512, 64), 8
        case "compile":
            return nn.Sequential(Chain(), nn.Linear(4096, CLASSES)), (4096,), 256
    # Layers, their width, and the samples of a step. The sound ones have much to compute for each byte that travels.
    mlps = {"batch": (32, 64, 8), "small_buckets": (64, 64, 256), "first_bucket": (16, 256, 256), "exposed": (16, 256, 256), "no_sync": (16, 256, 64)}
    mlps |= {"item": (4, 64, 1024), "host_work": (8, 256, 256)}
    mlps |= dict.fromkeys(("sound", "sound_one_rank", "sound_loader"), (16, 256, 1024))
    layers, width, batch = mlps.get(case, (16, 256, 32))
    return mlp([width] * (layers + 1) + [CLASSES]), (width,), batch


class Job:
    """The model, its data and its step."""

    def __init__(self, rank: int, arguments: argparse.Namespace) -> None:
        case, followed = arguments.case, arguments.followed
        self.rank, self.case, self.followed = rank, case, followed
        model, shape, batch = model_of(case, followed)
        self.correct: Tensor | int = 0
        # A larger batch does the work of so many steps.
        self.steps_in_one = LARGER_BATCH if case == "batch" and followed else 1
        batch *= self.steps_in_one
        self.is_channels_last = case == "sound_cnn" or (followed and case == "channels_last")
        if self.is_channels_last:
            model = model.to(memory_format=torch.channels_last)
        if arguments.ranks > 1:
            caps = {"first_bucket": 1000, "small_buckets": 0.01}
            model = DistributedDataParallel(model, bucket_cap_mb=arguments.bucket_cap_mb if followed else caps.get(case, 1))
            if case == "exposed" and followed:
                model.register_comm_hook(None, bf16_compress_hook)
        kind = {"fused": True} if case != "optimizer" or followed else {"foreach": False}
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **kind)
        self.model = torch.compile(model) if followed and case == "compile" else model
        self.batches = itertools.repeat((torch.randn(batch, *shape), torch.randint(0, CLASSES, (batch,))))
        if case == "host_work":
            workers = 1 if followed else 0
            how = {"num_workers": workers, "multiprocessing_context": "fork" if workers > 0 else None}
            self.batches = iter(DataLoader(range(1 << 20), batch, collate_fn=functools.partial(augmented, shape), **how))
        elif "loader" in case:
            workers = 1 if case == "sound_loader" else 4 if followed else 0
            # Forked workers begin at once; spawned ones import torch first.
            how = {"num_workers": workers, "multiprocessing_context": "fork" if workers > 0 else None}
            self.batches = iter(DataLoader(range(1 << 20), batch, collate_fn=functools.partial(load, shape, 1.0 if case == "loader" else 0.0), **how))

    def step(self) -> None:
        inputs, targets = next(self.batches)
        if self.is_channels_last:
            inputs = inputs.to(memory_format=torch.channels_last)
        if self.case == "straggler" and self.rank == 1 and not self.followed:
            time.sleep(0.02)
        passes = 4 if self.case == "no_sync" else 1
        for at in range(passes):
            with self.model.no_sync() if self.followed and at + 1 < passes else contextlib.nullcontext():
                outputs = self.model(inputs)
                F.cross_entropy(outputs, targets).backward()
        if self.case == "item":
            one_by_one = zip(outputs, targets)
            self.correct += (outputs.argmax(1) == targets).sum() if self.followed else sum(a.argmax().item() == b.item() for a, b in one_by_one)
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(rank: int, arguments: argparse.Namespace) -> None:
    torch.manual_seed(7)
    job = Job(rank, arguments)
    if arguments.out is None:
        for _ in range(WARMUP):
            job.step()
        begin = time.perf_counter()
        for _ in range(arguments.steps):
            job.step()
        if rank == 0:
            print(json.dumps({"step_ms": 1e3 * (time.perf_counter() - begin) / arguments.steps / job.steps_in_one}), flush=True)
        return
    handler = tensorboard_trace_handler(str(arguments.out / f"rank_{rank}"), worker_name=f"worker_{rank}", use_gzip=True)
    plan = schedule(wait=WARMUP, warmup=2, active=ACTIVE, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=handler, record_shapes=True) as profiler:
        for _ in range(WARMUP + 2 + ACTIVE):
            job.step()
            profiler.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=RANKS + ONE_RANK, required=True)
    parser.add_argument("--followed", action="store_true", help="with the change that is advised")
    parser.add_argument("--bucket-cap-mb", type=float, default=1, help="the advised size of a bucket, for cases about buckets")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the traces go (default: only timed)")
    parser.add_argument("--steps", type=int, default=30, help="steps that are timed (default: 30)")
    arguments = parser.parse_args()
    arguments.threads, arguments.ranks = 1, 1 if arguments.case in ONE_RANK else 2
    on_ranks(train, arguments, pinned=arguments.case == "busy_core")
