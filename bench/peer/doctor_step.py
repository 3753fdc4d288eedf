"""A training step of PyTorch with one fault, or with the change that the trace doctor advises for it.

    .peer/bin/python bench/peer/doctor_step.py --case optimizer --out traces/before
    .peer/bin/python bench/peer/doctor_step.py --case optimizer --followed --out traces/after
    .peer/bin/python bench/peer/doctor_step.py --case optimizer                      # only timed

With --out, each rank writes the trace of `--active` steps to OUT/rank_<r>. Without it, rank 0 prints one line of JSON with the
mean step in milliseconds. On a CPU there are two ranks over Gloo, with one thread each. With --device cuda there is a
rank per card over NCCL, or a single rank without communication.
"""
import argparse
import contextlib
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
# Cases that any machine can show, and those that need a card.
ANYWHERE = ["loader", "first_bucket", "no_sync", "optimizer", "zeroing", "straggler", "exposed", "sound"]
ON_A_CARD = ["host_bound", "synchronizations", "copies", "layout", "tensor_cores", "elementwise", "allocation"]
WARMUP = 8


class Samples(Dataset):
    """Random samples. Each takes `decode_ms` of a core, as decoding an image does."""

    def __init__(self, shape: tuple[int, ...], decode_ms: float) -> None:
        self.shape, self.decode_ms = shape, decode_ms

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        until = time.perf_counter() + self.decode_ms / 1e3
        while time.perf_counter() < until:
            pass
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


class Job:
    """The model, its data and its step."""

    def __init__(self, rank: int, world: int, arguments: argparse.Namespace) -> None:
        case, followed = arguments.case, arguments.followed
        self.rank, self.case, self.followed = rank, case, followed
        on_card = arguments.device == "cuda"
        self.device = torch.device("cuda", rank) if on_card else torch.device("cpu")
        if case == "tensor_cores":
            torch.set_float32_matmul_precision("high" if followed else "highest")
        if case in ("layout",):
            model, shape, batch = cnn(128), (3, 64, 64), 64
            torch.backends.cudnn.allow_tf32 = True
        elif case == "elementwise":
            model, shape, batch = nn.Sequential(nn.Flatten(), Chain(), nn.Linear(4096, CLASSES)), (4096,), 4096
        elif case == "tensor_cores":
            model, shape, batch = mlp(8, 4096), (4096,), 2048
        elif case == "copies":
            model, shape, batch = mlp(2, 16384), (16384,), 2048
        elif on_card:
            model, shape, batch = mlp(48 if case == "host_bound" else 16, 512), (512,), 64 if case == "host_bound" else 8192
        else:
            model, shape, batch = mlp(16, 256), (256,), 32
        model = model.to(self.device)
        if case == "layout" and followed:
            model = model.to(memory_format=torch.channels_last)
        self.ddp = None
        if world > 1:
            caps = {"first_bucket": 5 if followed else 1000}
            model = self.ddp = DistributedDataParallel(model, bucket_cap_mb=caps.get(case, 5))
            if case == "exposed" and followed:
                model.register_comm_hook(None, bf16_compress_hook)
        kind = {"fused": True} if case != "optimizer" or followed else {"foreach": False}
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **kind)
        if followed and case == "host_bound":
            model = torch.compile(model, mode="reduce-overhead")
        if followed and case == "elementwise":
            model = torch.compile(model)
        self.model = model
        workers = 2 if case != "loader" or followed else 0
        pinned = on_card and (case != "copies" or followed)
        data = Samples(shape, 1.0 if case == "loader" else 0.0)
        if case == "loader":
            self.batches = iter(DataLoader(data, batch_size=batch, num_workers=workers, pin_memory=pinned))
        else:
            inputs, targets = torch.randn(batch, *shape), torch.randint(0, CLASSES, (batch,))
            if pinned:
                inputs, targets = inputs.pin_memory(), targets.pin_memory()
            self.batches = iter(lambda: (inputs, targets), None)
        self.non_blocking = pinned

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        loss = F.cross_entropy(self.model(inputs), targets)
        loss.backward()
        if self.case == "synchronizations":
            for parameter in self.model.parameters():
                if parameter.grad is None or self.followed:
                    continue
                parameter.grad.sum().item()

    def step(self) -> None:
        inputs, targets = next(self.batches)
        inputs = inputs.to(self.device, non_blocking=self.non_blocking)
        targets = targets.to(self.device, non_blocking=self.non_blocking)
        if self.case == "layout" and self.followed:
            inputs = inputs.to(memory_format=torch.channels_last)
        if self.case == "straggler" and self.rank == 1 and not self.followed:
            time.sleep(0.02)
        for at in range(4 if self.case == "no_sync" else 1):
            skip = self.case == "no_sync" and self.followed and at < 3 and self.ddp is not None
            with self.ddp.no_sync() if skip else contextlib.nullcontext():
                self.backward(inputs, targets)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.case != "zeroing" or self.followed)
        if self.case == "allocation" and not self.followed:
            torch.cuda.empty_cache()


def measured(job: Job, count: int) -> float:
    """The mean step in milliseconds. There are no waits between steps, and the last one ends when the device has."""
    finish = torch.cuda.synchronize if job.device.type == "cuda" else lambda: None
    for _ in range(WARMUP):
        job.step()
    finish()
    begin = time.perf_counter()
    for _ in range(count):
        job.step()
    finish()
    return 1e3 * (time.perf_counter() - begin) / count


def run_rank(rank: int, world: int, arguments: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    if world > 1:
        backend = "nccl" if arguments.device == "cuda" else "gloo"
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    if arguments.device == "cuda":
        torch.cuda.set_device(rank)
    torch.manual_seed(7)
    job = Job(rank, world, arguments)
    if arguments.out is None:
        step_ms = measured(job, arguments.steps)
        if rank == 0:
            print(json.dumps({"step_ms": step_ms}), flush=True)
    else:
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if arguments.device == "cuda" else [])
        folder = str(arguments.out / f"rank_{rank}")
        handler = tensorboard_trace_handler(folder, worker_name=f"worker_{rank}", use_gzip=True)
        plan = schedule(wait=WARMUP, warmup=2, active=arguments.active, repeat=1)
        with profile(activities=activities, schedule=plan, on_trace_ready=handler, record_shapes=True) as profiler:
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
    parser.add_argument("--case", choices=ANYWHERE + ON_A_CARD, required=True)
    parser.add_argument("--followed", action="store_true", help="with the change that is advised")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the traces go (default: only timed)")
    parser.add_argument("--steps", type=int, default=30, help="steps that are timed (default: 30)")
    parser.add_argument("--active", type=int, default=6, help="steps that are recorded (default: 6)")
    arguments = parser.parse_args()
    if arguments.case in ON_A_CARD and arguments.device == "cpu":
        parser.error(f"--case {arguments.case} needs --device cuda")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    world = torch.cuda.device_count() if arguments.device == "cuda" else 2
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(run_rank, (world, arguments, store.port), world)


if __name__ == "__main__":
    main()
