"""A training step of PyTorch with one fault, or with the change that the trace doctor advises for it.

    .peer/bin/python bench/peer/doctor_step.py --case optimizer --out traces/before
    .peer/bin/python bench/peer/doctor_step.py --case optimizer --followed --out traces/after
    .peer/bin/python bench/peer/doctor_step.py --case optimizer                      # only timed

With --out, each rank writes the trace of `--active` steps to OUT/rank_<r>. Without it, rank 0 prints one line of JSON with the
mean time in milliseconds of a step, or of as many samples as the step with the fault has. There are two ranks over Gloo, with
one thread each, or a single one for cases that are not about ranks.
"""
import argparse
import contextlib
import multiprocessing
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from torch.utils.data import DataLoader, Dataset

CLASSES = 10
# Cases for ranks, and for one rank. Nothing is wrong with the `sound` ones.
RANKS = ["loader", "first_bucket", "small_buckets", "no_sync", "optimizer", "straggler", "busy_core", "exposed"]
ONE_RANK = ["channels_last", "compile", "batch"]
SOUND = ["sound", "sound_cnn", "sound_transformer", "sound_one_rank", "sound_loader"]
LARGER_BATCH = 4
WARMUP = 8


class Samples(Dataset):
    """Samples that come from a slow disk: each takes `wait_ms`, in which nothing is computed."""

    def __init__(self, shape: tuple[int, ...], wait_ms: float) -> None:
        self.shape, self.wait_ms = shape, wait_ms

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.wait_ms > 0:
            time.sleep(self.wait_ms / 1e3)
        return torch.full(self.shape, float(index % 7)), index % CLASSES


class Chain(nn.Module):
    """Element-wise operations that a compiler makes one kernel of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.tanh(x * 1.01 + 0.01) * torch.sigmoid(x)
        return x


def mlp(depth: int, width: int) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, CLASSES))


def cnn(channels: int) -> nn.Module:
    def block(inside: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]

    blocks = [layer for at in range(6) for layer in block(3 if at == 0 else channels)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


class Transformer(nn.Module):
    """Two layers of an encoder, and a mean over the tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(1))


def model_of(case: str) -> tuple[nn.Module, tuple[int, ...], int]:
    """The model of a case, the shape of a sample, and the samples of a step."""
    match case:
        case "channels_last" | "sound_cnn":
            return cnn(32), (3, 32, 32), 8
        case "compile":
            return nn.Sequential(nn.Flatten(), Chain(), nn.Linear(4096, CLASSES)), (4096,), 256
        case "batch":
            return mlp(32, 64), (64,), 8
        case "sound_transformer":
            return Transformer(128), (64, 128), 16
        case "first_bucket" | "exposed":
            return mlp(16, 256), (256,), 256
        case "small_buckets":
            return mlp(64, 64), (64,), 256
        case "sound" | "sound_one_rank" | "sound_loader":
            # Much to compute for each byte that travels.
            return mlp(16, 256), (256,), 1024
        case "no_sync":
            return mlp(16, 256), (256,), 64
        case _:
            return mlp(16, 256), (256,), 32


class Job:
    """The model, its data and its step."""

    def __init__(self, rank: int, world: int, arguments: argparse.Namespace) -> None:
        case, followed = arguments.case, arguments.followed
        self.rank, self.case, self.followed = rank, case, followed
        model, shape, batch = model_of(case)
        # A larger batch does the work of so many steps.
        self.steps_in_one = LARGER_BATCH if case == "batch" and followed else 1
        batch *= self.steps_in_one
        self.is_channels_last = case == "sound_cnn" or (followed and case == "channels_last")
        if self.is_channels_last:
            model = model.to(memory_format=torch.channels_last)
        self.ddp = None
        if world > 1:
            caps = {"first_bucket": 1000, "small_buckets": 0.01}
            cap_mb = arguments.bucket_cap_mb if followed and case in caps else caps.get(case, 1)
            model = self.ddp = DistributedDataParallel(model, bucket_cap_mb=cap_mb)
            if case == "exposed" and followed:
                model.register_comm_hook(None, bf16_compress_hook)
        kind = {"fused": True} if case != "optimizer" or followed else {"foreach": False}
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **kind)
        if followed and case == "compile":
            model = torch.compile(model)
        self.model = model
        workers = {"loader": 4 if followed else 0, "sound_loader": 1}.get(case)
        data = Samples(shape, 1.0 if case == "loader" else 0.0)
        if workers is not None:
            # Forked workers begin at once; spawned ones import torch first.
            how = "fork" if workers > 0 else None
            loader = DataLoader(data, batch_size=batch, num_workers=workers, multiprocessing_context=how)
            self.batches = iter(loader)
        else:
            inputs, targets = torch.randn(batch, *shape), torch.randint(0, CLASSES, (batch,))
            self.batches = iter(lambda: (inputs, targets), None)

    def step(self) -> None:
        inputs, targets = next(self.batches)
        if self.is_channels_last:
            inputs = inputs.to(memory_format=torch.channels_last)
        if self.case == "straggler" and self.rank == 1 and not self.followed:
            time.sleep(0.02)
        for at in range(4 if self.case == "no_sync" else 1):
            skip = self.case == "no_sync" and self.followed and at < 3 and self.ddp is not None
            with self.ddp.no_sync() if skip else contextlib.nullcontext():
                F.cross_entropy(self.model(inputs), targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measured(job: Job, count: int) -> float:
    """The mean step in milliseconds."""
    for _ in range(WARMUP):
        job.step()
    begin = time.perf_counter()
    for _ in range(count):
        job.step()
    return 1e3 * (time.perf_counter() - begin) / count / job.steps_in_one


def keep_busy(core: int) -> None:
    """Another program that uses a core."""
    os.sched_setaffinity(0, {core})
    while True:
        pass


def run_rank(rank: int, world: int, arguments: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    if arguments.case == "busy_core":
        os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    if world > 1:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.manual_seed(7)
    job = Job(rank, world, arguments)
    if arguments.out is None:
        step_ms = measured(job, arguments.steps)
        if rank == 0:
            print(json.dumps({"step_ms": step_ms}), flush=True)
    else:
        folder = str(arguments.out / f"rank_{rank}")
        handler = tensorboard_trace_handler(folder, worker_name=f"worker_{rank}", use_gzip=True)
        plan = schedule(wait=WARMUP, warmup=2, active=arguments.active, repeat=1)
        with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=handler, record_shapes=True) as profiler:
            for _ in range(WARMUP + 2 + arguments.active):
                job.step()
                profiler.step()
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description="A training step with a fault, or without it.")
    parser.add_argument("--case", choices=RANKS + ONE_RANK + SOUND, required=True)
    parser.add_argument("--followed", action="store_true", help="with the change that is advised")
    parser.add_argument("--bucket-cap-mb", type=float, default=1, help="the advised size of a bucket, for cases about buckets")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the traces go (default: only timed)")
    parser.add_argument("--steps", type=int, default=30, help="steps that are timed (default: 30)")
    parser.add_argument("--active", type=int, default=8, help="steps that are recorded (default: 8)")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    world = 1 if arguments.case in [*ONE_RANK, "sound_one_rank"] else 2
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = multiprocessing.get_context("spawn").Process(target=keep_busy, args=(1,), daemon=True)
    if arguments.case == "busy_core" and not arguments.followed:
        other.start()
    mp.spawn(run_rank, (world, arguments, store.port), world)
    if other.is_alive():
        other.kill()


if __name__ == "__main__":
    main()
