"""A PyTorch program that trains for some steps, and then hangs or is slow. `torchrun --nproc-per-node 3 hanging.py KIND SECONDS`.

Rank 1 differs from the others in step 32. When it begins to, it writes the time to `begun`. A slow program is slow for SECONDS, and ends.
"""
import hashlib
import sys
import threading
import time

import torch
import torch.distributed as dist


class Slow(torch.utils.data.Dataset):
    """Each sample takes its worker some seconds of arithmetic."""

    def __len__(self):
        return 2

    def __getitem__(self, at):
        compute(SECONDS / 2)
        return torch.zeros(64)


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))


def one_long_call(seconds):
    rounds = 200_000
    begin = time.monotonic()
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", rounds)
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", int(rounds * seconds / (time.monotonic() - begin)))


def differ(kind, one, groups):
    """What rank 1 does in that step."""
    if kind == "calls in another order":
        dist.all_reduce(one, group=groups[1])
        dist.all_reduce(one, group=groups[0])
    elif kind == "holds a lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif kind == "sleeps":
        time.sleep(100_000)
    elif kind == "evaluates":
        compute(SECONDS)
    elif kind == "computes in one call":
        one_long_call(SECONDS)
    elif kind == "loads":
        list(torch.utils.data.DataLoader(Slow(), num_workers=1))


KIND, SECONDS = sys.argv[1], float(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
groups = [dist.new_group([0, 1, 2]) for _ in range(2)]
for step in range(40):
    loss = model(torch.randn(8, 64)).sum()
    loss.backward()
    one = loss.detach().clone()
    is_other = dist.get_rank() == 1
    if step == 32:
        if is_other:
            with open("begun", "w") as file:
                file.write(str(time.time()))
            differ(KIND, one, groups)
        elif KIND == "calls in another order":
            dist.all_reduce(one, group=groups[0])
            dist.all_reduce(one, group=groups[1])
        if KIND == "all wait for data":
            time.sleep(SECONDS)
    if not (step == 32 and is_other and KIND == "skips a call"):
        dist.all_reduce(one)
    if step % 8 == 0:
        dist.barrier()
dist.destroy_process_group()
