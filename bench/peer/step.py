"""Our training step in PyTorch, on the CPU: DistributedDataParallel over Gloo, or a sharded form of it.

    .peer/bin/python bench/peer/step.py --model cnn --ranks 2 --seconds 5
    .peer/bin/python bench/peer/step.py --model llama --optimizer adamw --amp bf16
    .peer/bin/python bench/peer/step.py --model mlp --features 2048 2048 2048 2048 1024 --sharding resharded

Each rank has one thread (or `--threads`), and is pinned to its own cores if there are enough. The settings are the
fastest that PyTorch offers for this step: fused optimizer (SGD on sharded parameters has none), channels-last convolutions, gradients that live
in the buckets, a static graph. The batch is drawn once and reused in every step, so no time goes into
loading data.

Prints one line of JSON: median and 99th percentile of the step time of rank 0, samples per second of
all ranks together, and the mean over the ranks of the proportional set size (resident memory, shared
pages divided among the processes that map them) after the last step.
"""
import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from llama import Block, Llama

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class CnnShape:
    image: tuple[int, int, int]  # channels, height, width
    channels: tuple[int, ...]
    hidden: int


CNNS = {
    "cnn": CnnShape(image=(1, 28, 28), channels=(32, 64, 128), hidden=512),
    "cnn32": CnnShape(image=(3, 32, 32), channels=(16, 32), hidden=64),
}
CLASSES = 10
LLAMA = {"layers": 4, "width": 256, "heads": 4, "kv_heads": 4, "intermediate": 688, "vocab": 8192, "seq": 128}
MLP_FEATURES = (4096, 4096, 4096, 4096, 2048)  # input, three hidden layers, output
BATCH_SIZE = {"cnn": 64, "cnn32": 64, "mlp": 256, "llama": 4}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time one data-parallel training step of PyTorch.")
    parser.add_argument("--model", choices=list(BATCH_SIZE), default="cnn")
    parser.add_argument("--ranks", type=int, default=2, help="1 trains without a process group (default: 2)")
    parser.add_argument("--threads", type=int, default=1, help="of each rank (default: 1)")
    parser.add_argument("--batch-size", type=int, help="per rank (default: 64 for a cnn, 256 for mlp, 4 for llama)")
    parser.add_argument(
        "--features", type=int, nargs="+", default=MLP_FEATURES, help="of the mlp: input, hidden layers, output"
    )
    for flag, default in LLAMA.items():
        name = f"--{flag.replace('_', '-')}"
        parser.add_argument(name, type=int, default=default, help=f"of the llama (default: {default})")
    parser.add_argument("--amp", choices=["off", "bf16"], default="off", help="automatic mixed precision (default: off)")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument(
        "--sharding",
        choices=["none", "zero1", "kept", "resharded"],
        default="none",
        help="zero1: ZeroRedundancyOptimizer; kept and resharded: fully_shard, each layer with parameters (of a llama each block) "
        "a unit, which stays whole after the forward pass or does not (default: none)",
    )
    parser.add_argument("--bucket-cap-mb", type=float, metavar="MIB", help="of DistributedDataParallel (default: PyTorch's)")
    parser.add_argument("--profile", metavar="DIR", help="record ten steps after the warm-up, and write a trace of each rank there")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seconds", type=float, default=5, help="time the steps for this long (default: 5)")
    parser.add_argument("--warmup-steps", type=int, default=5, help="steps before the timed ones (default: 5)")
    parser.add_argument(
        "--channels-last",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="memory format of a cnn; the mlp has none (default: on)",
    )
    arguments = parser.parse_args()
    if arguments.ranks < 1 or arguments.threads < 1:
        parser.error("--ranks and --threads must be at least 1")
    if arguments.warmup_steps < 0:
        parser.error("--warmup-steps must not be negative")
    if arguments.ranks == 1 and arguments.sharding != "none":
        parser.error("--sharding needs at least 2 ranks")
    arguments.batch_size = arguments.batch_size or BATCH_SIZE[arguments.model]
    return arguments


class Cnn(nn.Module):
    """3x3 convolution, ReLU and 2x2 max-pool for each of `channels`, then two linear layers."""

    def __init__(self, shape: CnnShape, classes: int) -> None:
        super().__init__()
        c_in, height, width = shape.image
        self.convs = nn.ModuleList()
        for c_out in shape.channels:
            self.convs.append(nn.Conv2d(c_in, c_out, 3, padding=1))
            c_in, height, width = c_out, height // 2, width // 2
        self.fc1 = nn.Linear(c_in * height * width, shape.hidden)
        self.fc2 = nn.Linear(shape.hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.max_pool2d(F.relu(conv(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def mlp(features: Sequence[int]) -> nn.Sequential:
    """Linear layers, with a ReLU between every two of them."""
    layers = []
    for num_in, num_out in zip(features, features[1:]):
        layers += [nn.Linear(num_in, num_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def build(arguments: argparse.Namespace) -> tuple[nn.Module, Loss, Tensor, Tensor]:
    """The model, its loss, and a batch of inputs and targets."""
    batch_size, features = arguments.batch_size, arguments.features
    if arguments.model == "mlp":
        inputs = torch.randn(batch_size, features[0])
        targets = torch.randn(batch_size, features[-1])
        return mlp(features), F.mse_loss, inputs, targets
    if arguments.model == "llama":
        model = Llama(**{key: getattr(arguments, key) for key in LLAMA})
        inputs = torch.randint(0, arguments.vocab, (batch_size, arguments.seq))
        targets = torch.randint(0, arguments.vocab, (batch_size * arguments.seq,))
        return model, F.cross_entropy, inputs, targets
    memory_format = torch.channels_last if arguments.channels_last else torch.contiguous_format
    shape = CNNS[arguments.model]
    model = Cnn(shape, CLASSES).to(memory_format=memory_format)
    inputs = torch.randn(batch_size, *shape.image).contiguous(memory_format=memory_format)
    targets = torch.randint(0, CLASSES, (batch_size,))
    return model, F.cross_entropy, inputs, targets


def distributed(model: nn.Module, sharding: str, bucket_cap_mb: float | None) -> nn.Module:
    """The model on several ranks."""
    if sharding in ("none", "zero1"):
        settings = {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": bucket_cap_mb}
        return nn.parallel.DistributedDataParallel(model, **settings)
    is_llama = isinstance(model, Llama)
    units = (Block,) if is_llama else (nn.Linear, nn.Conv2d)
    for unit in [module for module in model.modules() if isinstance(module, units)]:
        fully_shard(unit, reshard_after_forward=sharding == "resharded")
    return fully_shard(model, reshard_after_forward=sharding == "resharded")


def optimizer_of(model: nn.Module, arguments: argparse.Namespace) -> torch.optim.Optimizer:
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[arguments.optimizer]
    if arguments.sharding == "zero1":
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, lr=arguments.lr, fused=True)
    # Sharded parameters have no fused SGD.
    fused = arguments.optimizer == "adamw" or arguments.sharding == "none"
    return kind(model.parameters(), lr=arguments.lr, fused=fused)


def pin_to_cores(rank: int, num_ranks: int, num_threads: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= num_ranks * num_threads:
        os.sched_setaffinity(0, cores[rank * num_threads : (rank + 1) * num_threads])


def proportional_set_bytes() -> int:
    with open("/proc/self/smaps_rollup") as rollup:
        for line in rollup:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/smaps_rollup has no line `Pss:`")


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile by nearest rank: the smallest value that at least `percent` of the values do not exceed."""
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1]


def record(step: Callable[[], Tensor], path: str) -> None:
    """Write a trace of ten steps, with the shapes of the operators' inputs. One more step warms up the profiler."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=10, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(path),
        record_shapes=True,
    ) as profiler:
        for _ in range(11):
            step()
            profiler.step()


def train(rank: int, arguments: argparse.Namespace) -> None:
    """Train one rank, whose process group exists if there are several. Rank 0 prints what came."""
    num_ranks = arguments.ranks
    torch.manual_seed(rank)  # each rank has its own batch; DistributedDataParallel sends the weights of rank 0 to all ranks
    model, loss_function, inputs, targets = build(arguments)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    if num_ranks > 1:
        model = distributed(model, arguments.sharding, arguments.bucket_cap_mb)
    optimizer = optimizer_of(model, arguments)

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.amp == "bf16"):
            loss = loss_function(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    for _ in range(arguments.warmup_steps):
        step()

    if arguments.profile:
        record(step, f"{arguments.profile}/rank_{rank}/worker_{rank}.pt.trace.json")

    # Ranks that disagree about the end would wait for each other forever, so rank 0 decides.
    step_seconds: list[float] = []
    go_on = torch.ones(1)
    begin = time.perf_counter()
    while go_on.item():
        step_begin = time.perf_counter()
        loss = step()
        step_seconds.append(time.perf_counter() - step_begin)
        go_on.fill_(time.perf_counter() - begin < arguments.seconds)
        if num_ranks > 1:
            dist.broadcast(go_on, src=0)

    # Every rank reads its memory usage before any rank can leave, since the gather below waits for all ranks.
    resident_bytes = [proportional_set_bytes()] * num_ranks
    if num_ranks > 1:
        dist.all_gather_object(resident_bytes, resident_bytes[rank])
    median_seconds = statistics.median(step_seconds)
    summary = {
        "torch": torch.__version__,
        "model": arguments.model,
        "sharding": arguments.sharding,
        "amp": arguments.amp,
        "ranks": num_ranks,
        "params": num_params,
        "batch_size": arguments.batch_size,
        "step_ms": round(median_seconds * 1e3, 4),
        "step_ms_p99": round(percentile(step_seconds, 99) * 1e3, 4),
        "samples_per_s": round(num_ranks * arguments.batch_size / median_seconds, 2),
        "steps": len(step_seconds),
        "loss": round(loss.item(), 5),
        "resident_bytes": round(statistics.mean(resident_bytes)),
    }
    if rank == 0:
        print(json.dumps(summary), flush=True)


Work = Callable[[int, argparse.Namespace], None]


def run_rank(rank: int, work: Work, arguments: argparse.Namespace, store_port: int | None = None) -> None:
    pin_to_cores(rank, arguments.ranks, arguments.threads)
    torch.set_num_threads(arguments.threads)
    if store_port is not None:
        store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    work(rank, arguments)
    if store_port is not None:
        dist.barrier()
        dist.destroy_process_group()
        # PyTorch 2.15 sometimes aborts when the process ends, after Python is gone: "terminate called
        # without an active exception", the sign of a C++ thread destroyed while it runs. The work is
        # done here, so leave without running any destructor.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def on_ranks(work: Work, arguments: argparse.Namespace) -> None:
    """Does the work of each rank, in a process of its own if there are several."""
    if arguments.ranks == 1:
        run_rank(0, work, arguments)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The operating system chooses the port, and this process holds it, so that no other process can take it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(run_rank, (work, arguments, store.port), arguments.ranks)


if __name__ == "__main__":
    on_ranks(train, parse_arguments())
