"""Operations and steps of PyTorch on processes with two backends, in turn in the same processes.

    python torch_collectives.py BACKENDS operations|steps|bits SECONDS RANKS    # prints a JSON line for each case
"""
import json
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

# Calls of one backend before it is the other's turn.
BURST = 4


def in_turn(cases, seconds, warm=3):
    """Times `cases`, one for each backend, in turn for some seconds: the same number of calls on all ranks."""
    times = {name: [] for name in cases}
    end, go, rounds = time.perf_counter() + seconds, torch.ones(1), 0
    while go.item() > 0:
        for name, call in cases.items():
            for _ in range(BURST):
                dist.barrier()
                begin = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - begin)
        rounds += 1
        go.fill_(float(time.perf_counter() < end or rounds <= warm))
        dist.broadcast(go, 0)
    figures = {}
    for name, all_times in times.items():
        ordered = sorted(all_times[warm * BURST :])
        figures[name] = {"median_us": statistics.median(ordered) * 1e6, "p10_us": ordered[len(ordered) // 10] * 1e6, "calls": len(ordered)}
    return figures


def operations(rank, groups, seconds):
    for size, is_shared in ((4, False), (4 << 10, False), (1 << 20, False), (10 << 20, False), (100 << 20, False), (10 << 20, True), (100 << 20, True)):
        tensor = torch.ones(max(size // 4, 1))
        if is_shared:
            import paceline.torch

            paceline.torch.share(tensor, groups["paceline"])
        yield f"all_reduce of {size} bytes{', shared' * is_shared}", in_turn({name: lambda group=group: dist.all_reduce(tensor, dist.ReduceOp.MAX, group) for name, group in groups.items()}, seconds)
    part = torch.ones((16 << 20) // dist.get_world_size())
    whole = torch.ones(part.numel() * dist.get_world_size())
    other = torch.empty_like(whole)

    def message(group):
        if rank == 0:
            dist.send(whole, 1, group)
        elif rank == 1:
            dist.recv(other, 0, group)

    calls = {
        "all_gather": lambda group: dist.all_gather_single(whole, part, group),
        "reduce_scatter": lambda group: dist.reduce_scatter_single(part, whole, group=group),
        "broadcast": lambda group: dist.broadcast(whole, 0, group),
        "all_to_all": lambda group: dist.all_to_all_single(other, whole, group=group),
        "send and recv": message,
    }
    for case, call in calls.items():
        yield f"{case} of {whole.nbytes} bytes", in_turn({name: lambda group=group: call(group) for name, group in groups.items()}, seconds)


def layers(width, depth=4):
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 32 * 32, 10))


def fsdp2(model, group):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ddp(model, group):
    return DDP(model, process_group=group, gradient_as_bucket_view=True, static_graph=True)


def steps(rank, groups, seconds):
    cases = {
        "ddp, mlp of 4.2 M, batch 16": (lambda: layers(1024), ddp, (16, 1024)),
        "ddp, cnn, batch 8": (convolutions, ddp, (8, 3, 32, 32)),
        "ddp, cnn, batch 64": (convolutions, ddp, (64, 3, 32, 32)),
        "fsdp2, mlp of 4.2 M, batch 16": (lambda: layers(1024), fsdp2, (16, 1024)),
    }
    for case, (build, spread, shape) in cases.items():
        losses, calls = {}, {}
        for name, group in groups.items():
            torch.manual_seed(0)
            model = spread(build(), group)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            inputs = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
            losses[name] = []

            def step(model=model, optimizer=optimizer, inputs=inputs, own=losses[name]):
                loss = model(inputs).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                own.append(loss.item())

            calls[name] = step
        figures = in_turn(calls, seconds)
        yield case, figures | {"same_losses": len({json.dumps(own) for own in losses.values()}) == 1}


def bits(rank, groups, seconds):
    """Whether the bits of a run depend on the sizes of buckets."""
    for name, group in groups.items():
        weights = []
        for cap_mb in (25, 0.02):
            torch.manual_seed(0)
            model = layers(64, 6)
            spread, generator = DDP(model, process_group=group, bucket_cap_mb=cap_mb), torch.Generator().manual_seed(rank)
            optimizer = torch.optim.SGD(spread.parameters(), lr=0.1)
            for _ in range(30):
                F.mse_loss(spread(torch.randn(8, 64, generator=generator)), torch.randn(8, 64, generator=generator)).backward()
                optimizer.step()
                optimizer.zero_grad()
            weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        yield f"{name}, {dist.get_world_size()} ranks", {"weights": weights[0].numel(), "differ": int((weights[0] != weights[1]).sum())}


def rank_main(rank, world, place, backends, part, seconds):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= world:
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/{world}", rank=rank, world_size=world)
    groups = {name: dist.new_group(backend=name.split("#")[0]) for name in backends}
    if "paceline#private" in groups:
        # No storage moves to shared memory.
        from paceline.torch.backend import membership_of

        membership_of(groups["paceline#private"]).storages.has_room = False
    for case, figures in {"operations": operations, "steps": steps, "bits": bits}[part](rank, groups, seconds):
        if rank == 0:
            print(json.dumps({"case": case} | figures), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    backends, part, seconds, ranks = sys.argv[1].split(","), sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
    with tempfile.TemporaryDirectory() as folder:
        for world in (3, 4) if part == "bits" else (ranks,):
            torch.multiprocessing.spawn(rank_main, (world, folder, backends, part, seconds), world)
