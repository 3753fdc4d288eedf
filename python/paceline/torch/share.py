"""Storage of tensors in memory that the ranks of a host share. Operations use it in place.

A group moves a storage with all tensors on it, and holds it, so that torch gives its address to no other tensor as long as the
group takes it for shared.
"""
import contextlib
import math
import os
import sys

import torch
from torch._C import _storage_Use_Count as use_count

# In bytes. Less is soon copied.
SMALLEST = 256 << 10
# The calls after which a bucket counts as one that stays.
STEADY = 3
# The references to a tensor that only code in C++ has, in `notice`. A tensor that a program in Python has passed on has more.
FROM_CPP = 6
FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_collectives"


class SharedStorages:
    """The storages of this rank that lie in the heap of its group."""

    def __init__(self, group):
        self.group, self.moved, self.calls = group, {}, {}
        # The storages for buffers of FSDP2.
        self.buffers = set()
        # Until the heap has had no room, or there is no heap.
        self.has_room = group.transport() in ("shm", "hybrid")

    def move(self, storage):
        """Moves a storage, with all tensors on it, while nobody uses it. Whether it lies in the heap."""
        if storage._cdata in self.moved or not self.has_room:
            return storage._cdata in self.moved
        self.drop_unused()
        descriptor, size = storage._share_fd_cpu_()
        base = storage.data_ptr()
        place = self.group.adopt((base, size))
        self.has_room = place is not None
        if not self.has_room:
            return False
        # The pages of torch's own file are no longer mapped.
        os.ftruncate(descriptor, 0)
        # From now on, torch does not resize it. Without numpy, a storage that has another address counts as private again.
        with contextlib.suppress(RuntimeError):
            torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        self.moved[storage._cdata] = storage, base, size, place
        return True

    def try_to_move(self, storage):
        """Moves a storage if that is possible. If there is no space in /dev/shm, on its way there, this is the last attempt."""
        try:
            return self.move(storage)
        except RuntimeError:
            self.has_room = False
            return False

    def drop_unused(self):
        """Gives back storages that no tensor uses any longer."""
        for key in [key for key in self.moved if key not in self.buffers and use_count(key) == 1]:
            self.group.give_back(self.moved.pop(key)[-1])

    def places(self, tensors, spans):
        """The spans of memory, at their places in the heap if the storages of these tensors lie there."""
        for tensor in each(tensors):
            storage, base, size, place = self.moved.get(tensor.untyped_storage()._cdata, (None, 0, 0, 0))
            if storage is not None and storage.data_ptr() == base:
                spans = [(at - base + place, length) if base <= at < base + size else (at, length) for at, length in spans]
        return spans

    def notice(self, tensor):
        """Moves the bucket of DDP after some calls. No code in Python has such a tensor, which fills a storage."""
        storage = tensor.untyped_storage()
        if not self.has_room or storage.nbytes() < SMALLEST or tensor.nbytes != storage.nbytes() or sys.getrefcount(tensor) > FROM_CPP:
            return
        key = storage._cdata, storage.data_ptr()
        if key[0] not in self.moved:
            self.calls = self.calls if len(self.calls) < 1000 else {}
            self.calls[key] = self.calls.get(key, 0) + 1
            if self.calls[key] >= STEADY and storage.resizable() and not storage.is_shared():
                del self.calls[key]
                self.try_to_move(storage)

    def tensor(self, count, dtype):
        """A tensor for a buffer of FSDP2: in a storage of the heap that is free, or in a new one."""
        size = count * dtype.itemsize
        free = [self.moved[key][0] for key in self.buffers if size <= self.moved[key][2] <= 2 * size and use_count(key) == 1]
        storage = min(free, key=lambda storage: storage.nbytes(), default=None)
        if storage is None:
            storage = torch.UntypedStorage(size)
            if self.try_to_move(storage):
                self.buffers.add(storage._cdata)
        return torch.empty(0, dtype=dtype).set_(storage, 0, (count,))

    def close(self):
        self.has_room = False
        self.buffers.clear()
        self.drop_unused()


def each(what):
    """The tensors in nested lists and modules."""
    if isinstance(what, torch.Tensor):
        yield what.to_local() if hasattr(what, "to_local") else what
    elif isinstance(what, torch.nn.Module):
        for tensor in (*what.parameters(), *what.buffers()):
            yield from each([tensor, tensor.grad])
    elif isinstance(what, (list, tuple)):
        for inner in what:
            yield from each(inner)
    elif what is not None:
        raise TypeError(f"paceline: a tensor, a module or a list, got {type(what).__name__}")


def look_into_fsdp(membership_of):
    """FSDP2 takes its buffers from the heap of their group, from their second operation on."""
    module = sys.modules[FSDP2]
    if hasattr(module, "paceline"):
        return
    module.paceline = True

    def of_group(call):
        def remember(self, output_tensor, input_tensor, group, *args, **named):
            membership = membership_of(group)
            self.paceline_storages = membership and membership.storages
            return call(self, output_tensor, input_tensor, group, *args, **named)

        return remember

    def allocate(self, size, *, dtype, device):
        storages, count = getattr(self, "paceline_storages", None), math.prod(size)
        is_plain = device.type == "cpu" and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()
        if is_plain and storages is not None and storages.has_room and count * dtype.itemsize >= SMALLEST:
            return storages.tensor(count, dtype).view(size)
        return torch.empty(*size, dtype=dtype, device=device)

    for kind in (module.DefaultAllGather, module.DefaultReduceScatter):
        kind.__call__, kind.allocate = of_group(kind.__call__), allocate


def move_all(what, own):
    """Moves the storages of these tensors, after all have been checked. Returns the bytes that lie in the heap then."""
    storages = {}
    for tensor in each(what):
        storage = tensor.untyped_storage()
        if tensor.device.type == "cpu" and storage.nbytes() > 0:
            storages[storage._cdata] = storage
    for key, storage in storages.items():
        if key not in own.moved and storage.is_shared():
            raise ValueError("paceline.torch.share: a tensor lies in shared memory already, of another group or of torch.multiprocessing")
        if key not in own.moved and not storage.resizable():
            raise ValueError("paceline.torch.share: numpy or another library uses the memory of a tensor; share a clone of it")
    return sum(storage.nbytes() for storage in storages.values() if own.move(storage))
