"""The backend: the meaning of torch's tensors and options for the collectives of paceline.

Operations of a group run in the order of their calls, in the background. An operation for which the caller waits at once
runs on the caller's thread if nothing else is queued. Messages between two ranks wait for nobody else.
"""
import atexit
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from .. import _native
from . import flight
from .figures import figures_of, report
from .share import FSDP2, SharedStorages, look_into_fsdp, move_all
from .work import Received, Work, done, failure, look_into_futures

OP = dist.ReduceOp
DTYPES = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8"}
REDUCTIONS = {OP.SUM: "sum", OP.AVG: "mean", OP.MIN: "min", OP.MAX: "max", OP.PRODUCT: "product"}
# For types and reductions that paceline does not have: each rank gathers the tensors and combines them in rank order.
COMBINE = {
    OP.SUM: torch.add,
    OP.PRODUCT: torch.mul,
    OP.MIN: torch.minimum,
    OP.MAX: torch.maximum,
    OP.BAND: torch.bitwise_and,
    OP.BOR: torch.bitwise_or,
    OP.BXOR: torch.bitwise_xor,
}
NOTHING = (0, 0)
# Tags of a program have 32 bits; those of a monitored barrier begin here.
MONITORED = 1 << 40
# torch holds only the C++ half of a backend if it wraps it (TORCH_DISTRIBUTED_DEBUG=DETAIL).
MEMBERSHIPS = set()


def span(tensor):
    """The address and the bytes of a tensor that can be sent as it lies."""
    if tensor.device.type != "cpu":
        raise ValueError(f"paceline: a tensor on {tensor.device}, and this backend moves tensors of processors; use cpu:paceline,cuda:nccl")
    if tensor.layout is not torch.strided:
        raise ValueError("paceline: a sparse tensor, and only all_reduce of its sum takes one")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError("Tensors must be contiguous")
    return tensor.data_ptr(), tensor.nbytes


def dtype_of(tensor):
    """The type as which the elements travel: bytes, if paceline does not have it."""
    return DTYPES.get(tensor.dtype, "u8")


def one(tensors):
    if len(tensors) != 1:
        raise ValueError(f"paceline: one tensor per rank, got {len(tensors)}")
    return tensors[0]


def copy_out(parts, outputs):
    """Copies the parts of a result to the tensors of the caller."""

    def finish():
        with torch.no_grad():
            for output, part in zip(outputs, parts, strict=True):
                output.copy_(part.view_as(output))

    return finish


def flat(tensors):
    """The elements of several tensors, one after the other."""
    with torch.no_grad():
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


class Paceline(c10d.Backend):
    """A rank's membership in a group."""

    # torch looks for each of these on the object, which asks torch, and so on without end.
    supports_coalescing = supports_shrinking = supports_reconfigure = supports_window = _supports_time_estimate = False
    supports_splitting = True

    def __init__(self, store, rank, size, limit, names=(), name=""):
        super().__init__(rank, size)
        self.group_rank, self.group_size, self.limit_s, self.sequence = rank, size, limit.total_seconds(), 0
        self.name, self.names, self.last = name, list(names) or list(range(size)), None
        self.barriers, keys = 0, []

        def exchange(name, text):
            every = [f"paceline/{name}/{peer}" for peer in range(size)]
            store.set(every[rank], text)
            keys.append(every[rank])
            return [text.decode() for text in store.multi_get(every)]

        self.group = _native.Group((rank, size, list(names)), self.limit_s, torch.get_num_threads(), server_of(store), exchange)
        # A later group may meet in the same place. All ranks have read these.
        for key in keys:
            try:
                store.delete_key(key)
            except (RuntimeError, NotImplementedError):
                break
        self.storages = SharedStorages(self.group)
        MEMBERSHIPS.add(self)

    # How an operation goes.

    def _run(self, kind, dtype, send, recv, outputs, keep, opts, *, op="sum", root=0, counts=None, finish=None, name=None, shown=None):
        self.sequence += 1
        entry = flight.note(self, kind, keep, outputs, self.sequence)
        if self.storages.moved:
            send, recv = self.storages.places((keep, outputs), (send, recv))
        blocks = not getattr(opts, "asyncOp", True) and not torch.autograd._profiler_enabled()
        if shown is None:
            shown = list(keep[:1]) if isinstance(keep, tuple) else [keep] if keep is not None else []
        finish = self._traced(name or kind, shown, finish)
        args = (kind, dtype, op, root), (send, recv, counts), ((keep, outputs), finish), blocks, self._limit(opts)
        native = self._try(entry, self.group.run, *args)
        self.last = native or self.last
        return native and Work(native, outputs)

    def _try(self, entry, call, *args):
        try:
            entry["work"] = call(*args)
            return entry["work"]
        except (RuntimeError, TimeoutError) as error:
            entry["error"] = str(error)
            raise failure(error) from None

    def _traced(self, name, inputs, finish=None):
        """The same `finish`, which also ends an event of the profiler with the shapes of `inputs`. It is called on another thread. False: no event."""
        if inputs is False or not torch.autograd._profiler_enabled():
            return finish
        event = torch._C._autograd._record_function_with_args_enter(f"{self.getBackendName()}:{name}", *inputs)
        ended = torch.futures.Future()
        # The future brings the profiler's state to the thread that ends the event.
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(event, ended)

        def finish_and_end():
            if finish is not None:
                finish()
            ended.set_result(None)

        return finish_and_end

    def _limit(self, opts):
        timeout = getattr(opts, "timeout", None)
        seconds = timeout.total_seconds() if timeout is not None else 0
        return seconds if seconds > 0 else self.limit_s

    def _reduce(self, kind, input, output, outputs, opts, root=0, shown=None):
        """A reduction of `input`, with the result in `output`."""
        op = opts.reduceOp.op
        if input.is_complex() and op in (OP.SUM, OP.AVG):
            input, output = torch.view_as_real(input), torch.view_as_real(output)
        name, dtype = REDUCTIONS.get(op), DTYPES.get(input.dtype)
        if name and dtype:
            return self._run(kind, dtype, span(input), span(output), outputs, (input, output), opts, op=name, root=root, shown=shown)
        combine = COMBINE.get(op)
        if combine is None or (input.is_complex() and op != OP.PRODUCT):
            raise ValueError(f"paceline: there is no reduction {op.name} of {input.dtype}")
        parts = input.new_empty((self.group_size, *input.shape))

        def finish():
            with torch.no_grad():
                total = parts[0]
                for part in parts[1:]:
                    total = combine(total, part).to(input.dtype)
                if kind == "reduce_scatter":
                    output.copy_(total.reshape(self.group_size, -1)[self.group_rank].view_as(output))
                elif kind == "all_reduce" or self.group_rank == root:
                    output.copy_(total)

        return self._run("all_gather", "u8", span(input), span(parts), outputs, (input, parts), opts, finish=finish, name=kind, shown=shown)

    # Operations of the whole group.

    def allreduce(self, tensors, opts=None):
        tensor = one(tensors)
        if tensor.is_sparse:
            return self.allreduce_sparse(tensors, opts)
        self.storages.notice(tensor)
        return self._reduce("all_reduce", tensor, tensor, tensors, opts)

    def allreduce_sparse(self, tensors, opts=None):
        """The sum of sparse tensors, which may have different numbers of elements. Returns when it is there."""
        if opts.reduceOp.op != OP.SUM:
            raise ValueError(f"paceline: sparse tensors are summed, and {opts.reduceOp.op.name} is another reduction")
        tensor = one(tensors).coalesce()
        counts = torch.zeros(self.group_size, dtype=torch.int64)
        self._gather_now(torch.tensor([tensor._nnz()]), counts, opts)
        indices, values = tensor.indices(), tensor.values()
        most = int(counts.max())
        own_indices, own_values = indices.new_zeros((most, indices.size(0))), values.new_zeros((most, *values.shape[1:]))
        own_indices[: indices.size(1)], own_values[: values.size(0)] = indices.t(), values
        all_indices, all_values = (own.new_empty((self.group_size, *own.shape)) for own in (own_indices, own_values))
        self._gather_now(own_indices, all_indices, opts)
        self._gather_now(own_values, all_values, opts)
        is_there = torch.arange(most) < counts[:, None]
        total = torch.sparse_coo_tensor(all_indices[is_there].t(), all_values[is_there], tensor.shape).coalesce()
        one(tensors).copy_(total)
        return done(tensors)

    def _gather_now(self, input, output, opts):
        work = self._run("all_gather", "u8", span(input), span(output), None, (input, output), opts)
        if work is not None:
            work.wait()

    def allreduce_coalesced(self, tensors, opts=None):
        # Operations end in their order, and one that fails breaks the group: the last work stands for all.
        works = [self._reduce("all_reduce", tensor, tensor, tensors, opts, shown=tensor is tensors[-1] and tensors) for tensor in tensors]
        return works[-1] if works else done(tensors)

    def reduce(self, tensors, opts=None):
        tensor = one(tensors)
        return self._reduce("reduce", tensor, tensor, tensors, opts, root=opts.rootRank)

    def broadcast(self, tensors, opts=None):
        tensor = one(tensors)
        memory = span(tensor)
        return self._run("broadcast", dtype_of(tensor), memory, memory, tensors, tensor, opts, root=opts.rootRank)

    def all_gather_single(self, output, input, opts=None):
        if output.dtype != input.dtype:
            raise ValueError("output tensor must have the same type as input tensor")
        if output.numel() != input.numel() * self.group_size:
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        if FSDP2 in sys.modules:
            look_into_fsdp(membership_of)
        return self._run("all_gather", dtype_of(input), span(input), span(output), output, input, opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        works = [self.all_gather_single(output, input, opts) for output, input in zip(outputs, inputs, strict=True)]
        return works[-1] if works else done(outputs)

    def allgather(self, outputs, inputs, opts=None, shown=None):
        outputs, input = self._one_each(outputs), one(inputs).contiguous()
        parts = input.new_empty((self.group_size, *input.shape))
        finish = copy_out(parts, outputs)
        if any(output.numel() != input.numel() or output.dtype != input.dtype for output in outputs):
            raise ValueError("paceline: all_gather needs outputs like the input")
        return self._run("all_gather", dtype_of(input), span(input), span(parts), [outputs], (input, parts), opts, finish=finish, shown=shown)

    def allgather_coalesced(self, output_lists, inputs, opts=None):
        # output_lists[rank][i] belongs to inputs[i].
        rows = [[row[at] for row in output_lists] for at in range(len(inputs))]
        works = [self.allgather([row], [input], opts, input is inputs[-1] and inputs) for row, input in zip(rows, inputs, strict=True)]
        return works[-1] if works else done(output_lists)

    def reduce_scatter_single(self, output, input, opts=None):
        if input.numel() != output.numel() * self.group_size:
            raise ValueError("input tensor must be the same size as output size times world size")
        if input.dtype != output.dtype:
            raise ValueError("input tensor must have the same type as output tensor")
        return self._reduce("reduce_scatter", input, output, output, opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        works = [self.reduce_scatter_single(output, input, opts) for output, input in zip(outputs, inputs, strict=True)]
        return works[-1] if works else done(outputs)

    def reduce_scatter(self, outputs, inputs, opts=None):
        return self.reduce_scatter_single(one(outputs), flat(self._one_each(inputs)), opts)

    def all_to_all_single(self, output, input, output_splits, input_splits, opts=None):
        dtype = dtype_of(input)
        counts = [self._counts(input, input_splits, dtype), self._counts(output, output_splits, dtype)]
        return self._run("all_to_all", dtype, span(input), span(output), output, input, opts, counts=counts)

    def _counts(self, tensor, splits, dtype):
        """Elements for each rank, as they travel."""
        rows = tensor.size(0) if tensor.dim() else 1
        if not splits:
            if rows % self.group_size:
                raise ValueError("Tensor's dim 0 does not divide equally across group size")
            splits = [rows // self.group_size] * self.group_size
        if len(splits) != self.group_size:
            raise ValueError("Number of tensor splits not equal to group size")
        if sum(splits) != rows:
            raise ValueError("Split sizes doesn't match total dim 0 size")
        width = tensor.numel() // rows if rows else 0
        return [split * width * (tensor.element_size() if tensor.dtype not in DTYPES else 1) for split in splits]

    def alltoall(self, outputs, inputs, opts=None):
        if len(outputs) != self.group_size or len(inputs) != self.group_size:
            raise ValueError(f"paceline: all_to_all needs {self.group_size} inputs and outputs")
        input, output = flat(inputs), flat(outputs)
        size = 1 if input.dtype in DTYPES else input.element_size()
        counts = [[tensor.numel() * size for tensor in tensors] for tensors in (inputs, outputs)]
        finish = copy_out(output.split([tensor.numel() for tensor in outputs]), outputs)
        return self._run("all_to_all", dtype_of(input), span(input), span(output), outputs, (input, output), opts, counts=counts, finish=finish)

    def gather(self, outputs, inputs, opts=None):
        input = one(inputs).contiguous()
        recv, finish, parts = NOTHING, None, None
        if self.group_rank == opts.rootRank:
            parts = input.new_empty((self.group_size, *input.shape))
            recv, finish = span(parts), copy_out(parts, self._one_each(outputs))
        return self._run("gather", dtype_of(input), span(input), recv, outputs, (input, parts), opts, root=opts.rootRank, finish=finish)

    def scatter(self, outputs, inputs, opts=None):
        output = one(outputs)
        input = flat(self._one_each(inputs)) if self.group_rank == opts.rootRank else None
        send = NOTHING if input is None else span(input)
        return self._run("scatter", dtype_of(output), send, span(output), outputs, input, opts, root=opts.rootRank)

    def _one_each(self, lists):
        tensors = one(lists)
        if len(tensors) != self.group_size:
            raise ValueError(f"paceline: a tensor for each of {self.group_size} ranks, got {len(tensors)}")
        return tensors

    def barrier(self, opts=None):
        work = self._run("barrier", "u8", NOTHING, NOTHING, [], None, opts)
        return done([]) if work is None else work

    def monitored_barrier(self, opts, wait_all_ranks=False):
        """A barrier by messages with rank 0, which names the ranks that do not come, in Gloo's words. The group goes on afterwards."""
        self.barriers += 1
        token, end = torch.zeros(1, dtype=torch.uint8), time.monotonic() + (opts.timeout.total_seconds() if opts.timeout >= timedelta(0) else self.limit_s)

        def missing(peer, is_send):
            """The error of a message to or from a rank."""
            try:
                way = is_send, peer, MONITORED + self.barriers
                self.group.post(way, ("u8", span(token)), (token, None), max(end - time.monotonic(), 0.0)).wait()
            except (RuntimeError, TimeoutError) as error:
                return error

        if self.group_rank != 0:
            if error := missing(0, True) or missing(0, False):
                but = "successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
                raise failure(f"Rank {self.group_rank} {but}: {error}")
            return
        errors = {}
        for peer in range(1, self.group_size):
            if (wait_all_ranks or not errors) and (error := missing(peer, False)):
                errors[str(peer)] = error
        if errors:
            first = next(iter(errors.values()))
            late = "Rank 0 timed out in monitoredBarrier: " if isinstance(first, TimeoutError) else ""
            raise failure(f"{late}Rank{'s'[: len(errors) - 1]} {', '.join(errors)} failed to pass monitoredBarrier: {first}")
        for peer in range(1, self.group_size):
            missing(peer, True)

    # Messages.

    def _post(self, is_send, tensors, peer, tag):
        tensor = one(tensors)
        name, way = ("send", "->") if is_send else ("recv", "<-")
        entry = flight.note(self, f"{name} {self.group_rank}{way}{'' if peer is None else peer}", tensor, tensor, 0)
        finish = self._traced(name if peer is not None else "recvAnySource", tensors)
        args = (is_send, peer, tag), (dtype_of(tensor), span(tensor)), (tensor, finish), self.limit_s
        return Work(self._try(entry, self.group.post, *args), tensors if is_send else Received(tensors))

    def send(self, tensors, to, tag):
        return self._post(True, tensors, to, tag)

    def recv(self, tensors, source, tag):
        return self._post(False, tensors, source, tag)

    def recv_anysource(self, tensors, tag):
        return self._post(False, tensors, None, tag)

    # The group itself.

    @property
    def options(self):
        return c10d.Backend.Options("paceline", timedelta(seconds=self.limit_s))

    def split(self, store, ranks, opts):
        return Paceline(store, ranks.index(self.group_rank), len(ranks), opts._timeout, [self.names[rank] for rank in ranks], opts.group_name)

    # Ranks outside of a new group take no part in it.
    def perform_nocolor_split(self, device): ...

    def getBackendName(self):
        return "paceline"

    def _get_sequence_number_for_group(self):
        return self.sequence

    def _set_sequence_number_for_group(self):
        self.sequence = 0

    def set_timeout(self, timeout):
        self.limit_s = timeout.total_seconds()

    def shutdown(self):
        self._leave(False)

    def abort(self):
        self._leave(True)

    def _leave(self, at_once):
        if self in MEMBERSHIPS:
            MEMBERSHIPS.discard(self)
            report(self)
            self.storages.close()
            self.group.close(at_once)


def server_of(store):
    """The host and port of the server below torch's store, if it has one: the way there shows this host's address."""
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return (host, port) if host and port else None


def close_in_child():
    """Peers notice the death of this process only if no child, such as a worker of a data loader, has copies of its sockets."""
    for membership in MEMBERSHIPS:
        membership.group.close_in_child()


def report_all(process):
    for membership in MEMBERSHIPS if os.getpid() == process else ():
        report(membership)


def create(options, _):
    return Paceline(options.store, options.group_rank, options.group_size, options.timeout, options.global_ranks_in_group, options.group_id)


def membership_of(group):
    """This rank's membership in a group of torch.distributed, or None if another backend serves it."""
    name = (group or dist.group.WORLD).group_name
    return next((membership for membership in MEMBERSHIPS if membership.name == name), None)


def own_membership(group):
    membership = membership_of(group)
    if membership is None:
        raise ValueError("paceline: this is no group of the backend paceline")
    return membership


def look_into_splits():
    """A rank outside of a split gets no group. torch crashes when a backend in Python says so."""
    split_group = c10d.ProcessGroup.split_group

    def split_group_of_members(group, ranks, *args, **named):
        if membership_of(group) is not None:
            if len(group._device_types) > 1:
                raise ValueError("paceline: split_group takes no group with several backends; use new_group")
            if group.rank() not in ranks:
                return None
        return split_group(group, ranks, *args, **named)

    c10d.ProcessGroup.split_group = split_group_of_members


def share(what, group=None):
    """Moves the storage of a tensor, of a module's parameters, buffers and gradients, or of a list of these into memory that the
    ranks of a host share. All tensors on it stay. Returns the bytes that lie there then: 0 if the ranks of the group share no memory."""
    membership = own_membership(group)
    if membership.last is not None:
        Work(membership.last, None).wait()
    return move_all(what, membership.storages)


def figures(group=None):
    """What the operations of a group have done on this rank so far, by their names."""
    return figures_of(own_membership(group))


def register():
    """Makes the backend known to torch.distributed. torch calls this by the entry point."""
    if "PACELINE" not in dist.Backend._plugins:
        look_into_futures()
        look_into_splits()
        atexit.register(_native.leave)
        # Called before that.
        atexit.register(report_all, os.getpid())
        os.register_at_fork(after_in_child=close_in_child)
        dist.Backend.register_backend("paceline", create, extended_api=True, devices=["cpu"])
