"""Writes traces of our training step in PyTorch, by PyTorch's own profiler: two ranks on the CPU, over Gloo.

    .peer/bin/python bench/peer/profile_step.py --out torch-traces

Each rank writes OUT/rank_<r>/worker_<r>.<time>.pt.trace.json.gz. One step is skipped, one warms up the
profiler, and the next `--active` steps are recorded, with the shapes of operators and their memory. The
data come from a DataLoader, so loading has its spans too. There is no GPU, so the traces have operators and
collectives of the CPU and no kernels. They test the analysis of such traces.
"""
import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from torch.utils.data import DataLoader, TensorDataset

from step import CLASSES, CNNS, Cnn, pin_to_cores

WAIT_STEPS = 1
WARMUP_STEPS = 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Profile data-parallel training steps of PyTorch on the CPU.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the traces go")
    parser.add_argument("--model", choices=list(CNNS), default="cnn32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank (default: 16)")
    parser.add_argument("--active", type=int, default=3, metavar="N", help="steps that are recorded (default: 3)")
    parser.add_argument("--with-stack", action="store_true", help="record Python's frames too; the files grow tenfold")
    arguments = parser.parse_args()
    if arguments.ranks < 2:
        parser.error("--ranks must be at least 2: a single rank has no collectives to show")
    if arguments.active < 1:
        parser.error("--active must be at least 1")
    return arguments


def train(rank: int, arguments: argparse.Namespace) -> None:
    """Train one rank until the profiler has recorded its steps."""
    torch.manual_seed(rank)
    shape = CNNS[arguments.model]
    model = torch.nn.parallel.DistributedDataParallel(Cnn(shape, CLASSES), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    num_steps = WAIT_STEPS + WARMUP_STEPS + arguments.active
    count = num_steps * arguments.batch_size
    data = TensorDataset(torch.randn(count, *shape.image), torch.randint(0, CLASSES, (count,)))
    handler = tensorboard_trace_handler(
        str(arguments.out / f"rank_{rank}"), worker_name=f"worker_{rank}", use_gzip=True
    )
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=WAIT_STEPS, warmup=WARMUP_STEPS, active=arguments.active, repeat=1),
        on_trace_ready=handler,
        record_shapes=True,
        profile_memory=True,
        with_stack=arguments.with_stack,
    ) as profiler:
        for inputs, targets in DataLoader(data, batch_size=arguments.batch_size):
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()


def run_rank(rank: int, arguments: argparse.Namespace, store_port: int) -> None:
    pin_to_cores(rank, arguments.ranks, 1)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    train(rank, arguments)
    dist.barrier()
    dist.destroy_process_group()
    # As in step.py: the work is done, and PyTorch 2.15 sometimes aborts when the process ends.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    arguments = parse_arguments()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The operating system chooses the port, and this process holds it, so that no other process can take it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(run_rank, (arguments, store.port), arguments.ranks)


if __name__ == "__main__":
    main()
