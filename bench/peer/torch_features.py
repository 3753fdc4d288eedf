"""Features of PyTorch on processes, once with each backend, in turn: do they run, and do they give the same numbers?

    python torch_features.py BACKEND,BACKEND RANKS [FEATURE ...]    # prints a JSON line for each feature

Two ranks give the same bits in any order of their sums. With more, numbers may differ by their rounding.
"""
import datetime
import json
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

CPU = torch.device("cpu")
STEPS = 6


def mlp(seed=0, width=48):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))


def batch(rank, step, samples=16):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(samples, 32, generator=generator), torch.randn(samples, 8, generator=generator)


def mesh(*sizes, **named):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, **named)


def train(model, rank, optimizer=None, steps=STEPS):
    optimizer = optimizer or optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        inputs, targets = batch(rank, step)
        loss = F.mse_loss(model(inputs).float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(rank, on, wrap=lambda layer: layer, **how):
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(wrap(layer), mesh=on, **how)
    return train(fully_shard(model, mesh=on, **how), rank)


def fsdp2_bf16(rank, world):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return sharded(rank, mesh(world), mp_policy=policy)


def fsdp1(rank, world):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return train(FullyShardedDataParallel(mlp(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=CPU), rank)


def zero1(rank, world):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=optim.AdamW, lr=1e-2)
    losses = train(model, rank, optimizer)
    optimizer.consolidate_state_dict(to=0)
    return losses


def hooked(rank, state, hook):
    model = DDP(mlp())
    model.register_comm_hook(state, hook)
    return train(model, rank, optim.SGD(model.parameters(), lr=1e-2))


def bf16_hook(rank, world):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return hooked(rank, None, bf16_compress_hook)


def power_sgd_hook(rank, world):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    return hooked(rank, power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), power.powerSGD_hook)


def join(rank, world):
    model = DDP(mlp())
    with model.join():
        return train(model, rank, steps=4 + rank)[:4]


def compiled(rank, world):
    return train(torch.compile(DDP(mlp()), backend="aot_eager"), rank)


def tensor_parallel(rank, world):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = mlp()
    parallelize_module(model, mesh(world), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(model, 0)


def functional(rank, world):
    from torch.distributed import _functional_collectives as collectives

    group, mine = dist.group.WORLD, torch.arange(24.0) * (rank + 1)
    results = [
        collectives.all_reduce(mine, "sum", group),
        collectives.all_gather_tensor(mine, 0, group),
        collectives.reduce_scatter_tensor(mine, "sum", 0, group),
        collectives.all_to_all_single(mine, None, None, group),
        collectives.broadcast(mine, 1, group),
        *collectives.all_reduce_coalesced([mine, mine + 1], "sum", group),
        *collectives.all_gather_into_tensor_coalesced([mine, mine + 1], group),
        *collectives.reduce_scatter_tensor_coalesced([mine, mine + 1], "sum", [0, 0], group),
    ]
    return torch.cat(results).tolist()


def autograd(rank, world):
    from torch.distributed.nn import functional as differentiable

    group, mine = dist.group.WORLD, torch.arange(12.0).add(rank).requires_grad_()
    differentiable.all_reduce(mine * 2, group=group).sum().backward()
    torch.cat(differentiable.all_gather(mine * 2, group=group)).sum().backward()
    differentiable.reduce_scatter(torch.empty(12 // world), list((mine * mine).chunk(world)), group=group).sum().backward()
    (differentiable.all_to_all_single(torch.empty(12), mine * mine, group=group) * (rank + 1)).sum().backward()
    return mine.grad.tolist()


def pipeline(rank, world, name="Schedule1F1B", stages_of_rank=1):
    from torch.distributed import pipelining

    torch.manual_seed(0)
    num_stages, model = world * stages_of_rank, nn.Sequential(*(nn.Linear(32, 32) for _ in range(24)))
    layers = len(model) // num_stages
    stages = [pipelining.PipelineStage(model[at * layers : (at + 1) * layers], at, num_stages, CPU) for at in range(rank, num_stages, world)]
    schedule = getattr(pipelining, name)(stages if stages_of_rank > 1 else stages[0], 4, loss_fn=F.mse_loss)
    optimizer = optim.SGD(model.parameters(), lr=1e-2)
    means = torch.zeros(4)
    for step in range(4):
        inputs, losses = batch(0, step)[0], []
        schedule.step(*([inputs] if rank == 0 else []), **({"target": inputs.square(), "losses": losses} if rank == world - 1 else {}))
        means[step] = sum(loss.item() for loss in losses) / 4
        optimizer.step()
        optimizer.zero_grad()
    dist.broadcast(means, world - 1)
    return means.tolist()


def checkpoint(rank, world):
    from torch.distributed import checkpoint as saved
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    on, models = mesh(world), [mlp(seed) for seed in (0, 1)]
    models = [fully_shard(model, mesh=on) for model in models]
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder, 0)
        saved.save(get_model_state_dict(models[0]), checkpoint_id=folder[0])
        state = get_model_state_dict(models[1])
        saved.load(state, checkpoint_id=folder[0])
        dist.barrier()
    set_model_state_dict(models[1], state)
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return [(one.to_local() - other.to_local()).abs().sum().item() for one, other in pairs]


def objects(rank, world):
    every = [None] * world
    dist.all_gather_object(every, {"rank": rank})
    sent, share, gathered = [{"one": 1} if rank == 0 else None], [None], [None] * world if rank == 0 else None
    dist.broadcast_object_list(sent, 0)
    dist.scatter_object_list(share, list(range(10, 10 + world)) if rank == 0 else None, 0)
    dist.gather_object(rank, gathered, 0)
    if rank == 0:
        dist.send_object_list([7], 1)
    elif rank == 1:
        dist.recv_object_list(share, 0)
    return [len(every), share[0], sent[0]["one"]]


def messages(rank, world):
    after, before, mine, theirs = (rank + 1) % world, (rank - 1) % world, torch.full((1000,), float(rank)), torch.empty(1000)
    for _ in range(20):
        for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, theirs, before)]):
            request.wait()
    if rank == 0:
        dist.send(mine + 5, 1, tag=5)
        dist.send(mine + 6, 1, tag=6)
    if rank != 1:
        return [theirs[0].item()]
    first, second, third = torch.empty(1000), torch.empty(1000), theirs.clone()
    late = dist.irecv(second, 0, tag=6)
    dist.irecv(first, 0, tag=5).wait()
    late.wait()
    return [third[0].item(), first[0].item(), second[0].item()]


def any_source(rank, world):
    got = torch.empty(4)
    if rank == 0:
        dist.send(torch.full((4,), 3.0), 1)
    return [float(dist.recv(got)), got[0].item()] if rank == 1 else [0.0, 3.0]


def reductions(rank, world):
    results = []
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for op in ("SUM", "PRODUCT", "MIN", "MAX"):
            tensor = torch.arange(1, 6).to(dtype) + rank
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
            results += tensor.tolist()
    for op in ("BAND", "BOR", "BXOR"):
        tensor = torch.arange(1, 6) + rank
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        results += tensor.tolist()
    tensor = torch.complex(torch.arange(3.0), torch.ones(3) * rank)
    dist.all_reduce(tensor)
    return results + torch.view_as_real(tensor).flatten().tolist()


def monitored_barrier(rank, world):
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=20))
    dist.barrier()
    return [1]


def split(rank, world):
    group = dist.split_group(split_ranks=[[1, 0], list(range(2, world))][: world - 1])
    total = torch.arange(4.0) + rank
    dist.all_reduce(total, group=group)
    return total.tolist() + dist.get_process_group_ranks(group)


def activations(rank, world):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return train(DDP(checkpoint_wrapper(mlp())), rank)


FEATURES = {
    "ddp": lambda rank, world: train(DDP(mlp()), rank),
    "ddp, find_unused_parameters": lambda rank, world: train(DDP(mlp(), find_unused_parameters=True), rank),
    "ddp, static_graph and views": lambda rank, world: train(DDP(mlp(), static_graph=True, gradient_as_bucket_view=True), rank),
    "ddp, bf16_compress_hook": bf16_hook,
    "ddp, powerSGD_hook": power_sgd_hook,
    "ddp, join": join,
    "ddp, torch.compile": compiled,
    "ddp, activation checkpointing": activations,
    "fsdp2": lambda rank, world: sharded(rank, mesh(world)),
    "fsdp2, reshard_after_forward=False": lambda rank, world: sharded(rank, mesh(world), reshard_after_forward=False),
    "fsdp2, bf16": fsdp2_bf16,
    "fsdp2, hsdp": lambda rank, world: sharded(rank, mesh(*((2, 2) if world == 4 else (1, world)), mesh_dim_names=("replicas", "shards"))),
    "fsdp1": fsdp1,
    "ZeroRedundancyOptimizer": zero1,
    "tensor parallel (DTensor)": tensor_parallel,
    "functional collectives": functional,
    "distributed.nn": autograd,
    "pipeline, GPipe": lambda rank, world: pipeline(rank, world, "ScheduleGPipe"),
    "pipeline, 1F1B": pipeline,
    "pipeline, interleaved": lambda rank, world: pipeline(rank, world, "ScheduleInterleaved1F1B", 2),
    "distributed checkpoint": checkpoint,
    "object collectives": objects,
    "messages, batched and with tags": messages,
    "receive from any source": any_source,
    "reductions of all types": reductions,
    "monitored_barrier": monitored_barrier,
    "split_group": split,
}


def outcome(feature, rank, world):
    try:
        return feature(rank, world)
    except Exception as error:
        return "".join(traceback.format_exception_only(error)).strip()[:300]


def numbers(outcome):
    """All numbers of an outcome. An error has none."""
    return [number for part in outcome for number in numbers(part)] if isinstance(outcome, list) else [float(outcome)] * (not isinstance(outcome, str))


def difference(results):
    """The largest difference between the backends, relative to the number."""
    one, other = (numbers(both) for both in results)
    return max((abs(a - b) / max(abs(a), abs(b), 1e-6) for a, b in zip(one, other, strict=True)), default=0.0) if len(one) == len(other) else None


def rank_main(rank, place, backends, names, world):
    torch.set_num_threads(1)
    outcomes = dist.FileStore(f"{place}/outcomes", world)
    # Gloo ends the process if the last reference to a group goes on a thread of that group, as after powerSGD_hook.
    kept = []
    for at, name in enumerate(names):
        for backend in backends:
            limit = datetime.timedelta(seconds=60)
            dist.init_process_group(backend, init_method=f"file://{place}/{at}-{backend}", rank=rank, world_size=world, timeout=limit)
            kept.append(dist.group.WORLD)
            outcomes.set(f"{at} {backend} {rank}", json.dumps(outcome(FEATURES[name], rank, world)))
            dist.destroy_process_group()
        if rank == 0:
            results = {backend: [json.loads(outcomes.get(f"{at} {backend} {of}")) for of in range(world)] for backend in backends}
            failed = {backend: [error for error in both if isinstance(error, str)] for backend, both in results.items()}
            differ = difference(results.values())
            # 16-bit floats are added up as such by Gloo, and in f32 here.
            most = 0 if world == 2 else 0.05 if "bf16" in name else 1e-4
            same = differ is not None and differ <= most and not any(failed.values())
            print(json.dumps({"feature": name, "failed": {backend: errors for backend, errors in failed.items() if errors}, "differ": differ, "same": same}), flush=True)


if __name__ == "__main__":
    world, chosen = int(sys.argv[2]), sys.argv[3:] or list(FEATURES)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (folder, sys.argv[1].split(","), chosen, world), world)
