"""PyTorch's all-reduce over Gloo on the CPU: one process of one thread per rank, in place.

    python bench/peer/all_reduce.py --ranks 2 --sizes 1000000,10000000

Ranks meet at a barrier before every all-reduce. Prints one line of JSON per size: the largest of the
ranks' medians.
"""
import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist

from step import on_ranks


def measure(rank: int, ranks: int, size: int, warmup: int, iterations: int) -> float:
    """The largest of the ranks' medians, in seconds."""
    data = torch.empty(size // 4)
    seconds: list[float] = []
    for _ in range(warmup + iterations):
        data.fill_(rank + 1.0)
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(data)
        seconds.append(time.perf_counter() - begin)
    if not bool((data == ranks * (ranks + 1) / 2).all()):
        raise RuntimeError(f"the all-reduce of {size} bytes gave a wrong sum on rank {rank}")
    medians = [0.0] * ranks
    dist.all_gather_object(medians, statistics.median(seconds[warmup:]))
    return max(medians)


def all_sizes(rank: int, arguments: argparse.Namespace) -> None:
    for size in map(int, arguments.sizes.split(",")):
        seconds = measure(rank, arguments.ranks, size, arguments.warmup, arguments.iterations)
        if rank == 0:
            found = {"side": "torch-gloo", "version": torch.__version__, "ranks": arguments.ranks, "bytes": size, "ms": round(seconds * 1e3, 5)}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="(default: 2)")
    parser.add_argument("--sizes", default="1000000,10000000,100000000", help="bytes, whole numbers of floats")
    parser.add_argument("--warmup", type=int, default=5, help="untimed all-reduces per size (default: 5)")
    parser.add_argument("--iterations", type=int, default=20, help="timed all-reduces per size (default: 20)")
    parser.set_defaults(threads=1)
    on_ranks(all_sizes, parser.parse_args())
