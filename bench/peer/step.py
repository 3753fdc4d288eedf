"""Our training step in PyTorch, on the CPU: DistributedDataParallel over Gloo, or a sharded form of it.

    .peer/bin/python bench/peer/step.py --model cnn --ranks 2 --seconds 5
    .peer/bin/python bench/peer/step.py --model llama --optimizer adamw --amp bf16
    .peer/bin/python bench/peer/step.py --model mlp --features 2048 2048 2048 2048 1024 --sharding resharded

Each rank is pinned to cores of its own if there are enough. The settings are the fastest that PyTorch offers for this step: fused optimizer (SGD on
sharded parameters has none), channels-last convolutions, gradients that live in the buckets, a static graph. Every step has the same batch.

Prints one line of JSON: the median step of rank 0, samples per second of all ranks together, and the mean over the ranks of the
proportional set size (shared pages are divided among the processes that map them) after the last step.
"""
import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel, loss_parallel, parallelize_module

from models import CLASSES, Block, Cnn, Llama, mlp

Loss = Callable[[Tensor, Tensor], Tensor]
# Height, width and channels of an image, channels of the convolutions, and width of the hidden layer.
CNNS = {"cnn": ((28, 28, 1), (32, 64, 128), 512), "cnn32": ((32, 32, 3), (16, 32), 64)}
LLAMA = {"layers": 4, "width": 256, "heads": 4, "kv_heads": 4, "intermediate": 688, "vocab": 8192, "seq": 128}
MLP_FEATURES = (4096, 4096, 4096, 4096, 2048)  # input, three hidden layers, output
BATCH_SIZE = {"cnn": 64, "cnn32": 64, "mlp": 256, "llama": 4}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time one data-parallel training step of PyTorch.")
    parser.add_argument("--model", choices=list(BATCH_SIZE), default="cnn")
    parser.add_argument("--ranks", type=int, default=2, help="1 trains without a process group (default: 2)")
    parser.add_argument("--threads", type=int, default=1, help="of each rank (default: 1)")
    parser.add_argument("--batch-size", type=int, help="per rank (default: 64 for a cnn, 256 for mlp, 4 for llama)")
    parser.add_argument("--features", type=int, nargs="+", default=MLP_FEATURES, help="of the mlp: input, hidden layers, output")
    parser.add_argument("--seq", type=int, default=LLAMA["seq"], help="tokens of a sample of the llama (default: 128)")
    parser.add_argument("--amp", choices=["off", "bf16"], default="off", help="automatic mixed precision (default: off)")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument("--sharding", choices=["none", "zero1", "kept", "resharded", "tensor"], default="none",
                        help="zero1: ZeroRedundancyOptimizer; kept and resharded: fully_shard, where units stay whole or do not; tensor: parallelize_module, with sequence parallelism (default: none)")  # fmt: skip
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seconds", type=float, default=5, help="time the steps for this long (default: 5)")
    parser.add_argument("--channels-last", action=argparse.BooleanOptionalAction, default=True, help="of a cnn (default: on)")
    parser.set_defaults(warmup_steps=5)
    arguments = parser.parse_args()
    arguments.batch_size = arguments.batch_size or BATCH_SIZE[arguments.model]
    return arguments


def build(arguments: argparse.Namespace) -> tuple[nn.Module, Loss, Tensor, Tensor]:
    """The model, its loss, and a batch of inputs and targets."""
    batch_size, features = arguments.batch_size, arguments.features
    if arguments.model == "mlp":
        return mlp(features), F.mse_loss, *(torch.randn(batch_size, width) for width in (features[0], features[-1]))
    if arguments.model == "llama":
        inputs, targets = (torch.randint(0, LLAMA["vocab"], shape) for shape in ((batch_size, arguments.seq), (batch_size * arguments.seq,)))
        return Llama(**LLAMA | {"seq": arguments.seq}), F.cross_entropy, inputs, targets
    memory_format = torch.channels_last if arguments.channels_last else torch.contiguous_format
    (height, width, depth), channels, hidden = CNNS[arguments.model]
    model = Cnn((height, width, depth), channels, hidden).to(memory_format=memory_format)
    inputs = torch.randn(batch_size, depth, height, width).contiguous(memory_format=memory_format)
    targets = torch.randint(0, CLASSES, (batch_size,))
    return model, F.cross_entropy, inputs, targets


def divided(model: nn.Module, ranks: int) -> nn.Module:
    """Layers divided by outputs and by inputs in turn. The Llama's rows are divided between them, and its logits by words."""
    mesh = init_device_mesh("cpu", (ranks,))
    if not isinstance(model, Llama):
        linear = [name for name, module in model.named_children() if isinstance(module, nn.Linear)]
        styles = (ColwiseParallel, RowwiseParallel)
        return parallelize_module(model, mesh, {name: styles[at % 2]() for at, name in enumerate(linear)})
    rows = Shard(1)
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False),
    }
    for at, block in enumerate(model.blocks):
        norms, columns = ("norm1", "norm2"), ("q", "k", "v", "gate", "up")
        plan |= {f"blocks.{at}.{name}": SequenceParallel(use_local_output=False) for name in norms}
        plan |= {f"blocks.{at}.{name}": ColwiseParallel(input_layouts=Replicate()) for name in columns}
        plan |= {f"blocks.{at}.{name}": RowwiseParallel(output_layouts=rows) for name in ("o", "down")}
        block.heads, block.kv_heads = block.heads // ranks, block.kv_heads // ranks
    model = parallelize_module(model, mesh, plan)
    for block in model.blocks:
        for norm in (block.norm1, block.norm2):
            # Gathered once, for all projections that read it.
            norm.register_forward_hook(lambda _module, _inputs, output: output.redistribute(placements=[Replicate()]))
    return model


def distributed(model: nn.Module, sharding: str, ranks: int) -> nn.Module:
    """The model on several ranks."""
    if sharding == "tensor":
        return divided(model, ranks)
    if sharding in ("none", "zero1"):
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    units = Block if isinstance(model, Llama) else (nn.Linear, nn.Conv2d)
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
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def timed(step: Callable[[], Tensor | None], arguments: argparse.Namespace) -> tuple[list[float], Tensor | None]:
    """The seconds of each step, and the result of the last one. Ranks that disagree about the end would wait for each other forever, so rank 0 decides."""
    for _ in range(arguments.warmup_steps):
        step()
    step_seconds: list[float] = []
    go_on, begin = torch.ones(1), time.perf_counter()
    while go_on.item():
        step_begin = time.perf_counter()
        result = step()
        step_seconds.append(time.perf_counter() - step_begin)
        go_on.fill_(time.perf_counter() - begin < arguments.seconds)
        if arguments.ranks > 1:
            dist.broadcast(go_on, src=0)
    return step_seconds, result


def train(rank: int, arguments: argparse.Namespace) -> None:
    """Train one rank, whose process group exists if there are several. Rank 0 prints what came."""
    num_ranks = arguments.ranks
    is_tensor = arguments.sharding == "tensor"
    # Each rank has its own batch, unless all compute the same one; DistributedDataParallel sends the weights of rank 0 to all ranks.
    torch.manual_seed(0 if is_tensor else rank)
    model, loss_function, inputs, targets = build(arguments)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    if num_ranks > 1:
        model = distributed(model, arguments.sharding, num_ranks)
    optimizer = optimizer_of(model, arguments)

    def step() -> Tensor:
        with loss_parallel() if is_tensor and arguments.model == "llama" else nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=arguments.amp == "bf16"):
                loss = loss_function(model(inputs), targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step_seconds, loss = timed(step, arguments)
    # Every rank reads its memory usage before any rank can leave, since the gather below waits for all ranks.
    resident_bytes = [proportional_set_bytes()] * num_ranks
    if num_ranks > 1:
        dist.all_gather_object(resident_bytes, resident_bytes[rank])
    median_seconds = statistics.median(step_seconds)
    summary = {
        **{key: getattr(arguments, key) for key in ("model", "sharding", "amp", "ranks", "batch_size")},
        "torch": torch.__version__, "params": num_params, "step_ms": round(median_seconds * 1e3, 4),
        "samples_per_s": round((1 if is_tensor else num_ranks) * arguments.batch_size / median_seconds, 2), "steps": len(step_seconds), "loss": round(loss.item(), 5),
        "resident_bytes": round(statistics.mean(resident_bytes)),
    }
    if rank == 0:
        print(json.dumps(summary), flush=True)


Work = Callable[[int, argparse.Namespace], None]


def run_rank(rank: int, work: Work, arguments: argparse.Namespace, pinned: bool, store_port: int | None = None) -> None:
    if pinned:
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


def on_ranks(work: Work, arguments: argparse.Namespace, pinned: bool = True) -> None:
    """Does the work of each rank, in a process of its own if there are several."""
    if arguments.ranks == 1:
        run_rank(0, work, arguments, pinned)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The operating system chooses the port, and this process holds it, so that no other process can take it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(run_rank, (work, arguments, pinned, store.port), arguments.ranks)


if __name__ == "__main__":
    on_ranks(train, parse_arguments())
