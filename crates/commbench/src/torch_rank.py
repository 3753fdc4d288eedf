"""A rank of torch.distributed that `paceline bench --against torch` measures: with the buffers, calls, barriers and checks of a rank of paceline.

`paceline` passes the job as JSON. Rank 0 appends a line of JSON for each size to the file that the job names.
"""

import json
import os
import sys
import time
from datetime import timedelta

# Python puts the current folder first, which may have a torch.py.
sys.path[:] = [path for path in sys.path if path]
job = json.loads(sys.argv[1])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if job["processors"]:
    os.sched_setaffinity(0, job["processors"][rank])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

TYPES = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8}
REDUCTIONS = {
    "sum": (dist.ReduceOp.SUM, torch.sum), "prod": (dist.ReduceOp.PRODUCT, torch.prod), "min": (dist.ReduceOp.MIN, torch.amin), "max": (dist.ReduceOp.MAX, torch.amax),
}  # fmt: skip
# As in pattern.rs: inputs repeat after a prime number of elements, and their reductions are exact in every type.
PERIOD = 1021

op, root, is_cuda = job["op"], job["root"], job["backend"] == "nccl"
dtype, device = TYPES[job["dtype"]], torch.device("cuda", rank if job["card"] is None else job["card"]) if is_cuda else torch.device("cpu")
reduction, reduce = REDUCTIONS[job["redop"]]


def values(of: int) -> torch.Tensor:
    """The input of a rank, which repeats."""
    at = torch.arange(PERIOD)
    mixed = at * 31 + of * 17 + at * of * 7
    if op in ("all_reduce", "reduce_scatter", "reduce") and job["redop"] in ("sum", "prod"):
        return mixed % 2 if job["redop"] == "sum" else 1 + ((at + of) % 64 == 0).long()
    return (mixed + at * (of // 128)) % 128


def repeated(of: torch.Tensor, length: int, start: int = 0) -> torch.Tensor:
    return of.roll(-start).to(dtype).to(device).repeat(length // PERIOD + 1)[:length]


def exchange(a: torch.Tensor, b: torch.Tensor):
    """The call, in place if it can be; its input; and the parts of its result, each with the values to find and the first of them."""
    share, before, after = b.numel() // world, (rank - 1) % world, (rank + 1) % world
    shares = [b[at * share : (at + 1) * share] for at in range(world)]
    own, is_root, inputs = shares[rank], rank == root, [values(of) for of in range(world)]
    reduced, each = reduce(torch.stack(inputs), dim=0), list(zip(shares, inputs, [0] * world))
    peers = [dist.P2POp(dist.isend, a, after), dist.P2POp(dist.irecv, b, before)] if op == "send_recv" else []
    return {
        "all_reduce": (lambda: dist.all_reduce(b, reduction), b, [(b, reduced, 0)]),
        "reduce": (lambda: dist.reduce(b, root, reduction), b, [(b, reduced, 0)] * is_root),
        "broadcast": (lambda: dist.broadcast(b, root), b, [(b, inputs[root], 0)]),
        "all_gather": (lambda: dist.all_gather_into_tensor(b, own), own, each),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(own, b, reduction), b, [(own, reduced, rank * share)]),
        "gather": (lambda: dist.gather(own, shares if is_root else None, root), own, each * is_root),
        "scatter": (lambda: dist.scatter(own, shares if is_root else None, root), b, [(own, inputs[root], rank * share)]),
        "all_to_all": (lambda: dist.all_to_all_single(b, a), a, [(part, of, rank * share) for part, of, _ in each]),
        "send_recv": (lambda: [work.wait() for work in dist.batch_isend_irecv(peers)], a, [(b, inputs[before], 0)]),
    }[op]


def called(call, times: int) -> int:
    """The nanoseconds of some calls after a barrier."""
    synchronize = torch.cuda.synchronize if is_cuda else lambda: None
    dist.barrier()
    synchronize()
    begin = time.perf_counter_ns()
    for _ in range(times):
        call()
    synchronize()
    return time.perf_counter_ns() - begin


def measured(a: torch.Tensor, b: torch.Tensor) -> float:
    """The median in milliseconds of the slowest rank's times. Checks the result of one more call."""
    call, source, result = exchange(a, b)
    source.copy_(repeated(values(rank), source.numel()))
    for _ in range(job["warmup_iters"]):
        called(call, 1)
    times = torch.tensor([called(call, job["agg_iters"]) for _ in range(job["iters"])], device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    if job["check"]:
        source.copy_(repeated(values(rank), source.numel()))
        called(call, 1)
        if wrong := sum(int((part != repeated(of, part.numel(), start)).sum()) for part, of, start in result):
            sys.exit(f"{op} of {b.numel()} elements over {job['backend']} gave {wrong} wrong elements")
    return int(times.sort().values[(job["iters"] + 1) // 2 - 1]) / job["agg_iters"] / 1e6


torch.set_num_threads(1)
if is_cuda:
    torch.cuda.set_device(device)
timeout = timedelta(seconds=job["timeout_s"])
dist.init_process_group(job["backend"], store=dist.FileStore(job["store"], world), rank=rank, world_size=world, timeout=timeout)
buffers = [torch.zeros(max(job["elements"]), dtype=dtype, device=device) for _ in range(2)]
with open(job["lines"], "a") as lines:
    for elements in job["elements"]:
        ms = measured(*(buffer[:elements] for buffer in buffers))
        if rank == 0:
            line = {"side": "torch", "op": op, "ranks": world, "bytes": elements * buffers[0].element_size(), "ms": ms}
            print(json.dumps(line), file=lines, flush=True)
dist.destroy_process_group()
