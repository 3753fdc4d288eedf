"""Writes traces in the shape of those of PyTorch's profiler on CUDA, for machines that have no GPU.

    python3 bench/peer/cuda_trace.py --out cuda-traces --ranks 2 --steps 4

These traces are SYNTHETIC: no GPU ran, and the times come from a small simulation with a seed. Only the structure is faithful, as Kineto writes it
(libkineto's output_json.cpp, CuptiActivity.cpp). The simulated program is a training step of DistributedDataParallel: the host runs ahead of the device,
buckets are reduced on stream 20 while stream 7 continues, a collective ends on all ranks at once, and `item()` waits for the device.

Each rank writes OUT/rank_<r>/worker_<r>.<time>.pt.trace.json.gz.
"""
import argparse
import gzip
import json
import random
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BASE_NS = 1_767_189_312_000_000_000
BEGIN_NS = 4_541_015_316_353_111  # on the trace's clock; as far from zero as in real traces
COMPUTE_STREAM, NCCL_STREAM = 7, 20

FUNCTOR = "at::native::{0}<float>, std::array<char*, {1}ul>"
ELEMENTWISE = f"void at::native::vectorized_elementwise_kernel<4, {FUNCTOR} >(int, {FUNCTOR})"
FPROP = "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x64x32_stage3_kernel_cudnn"
DGRAD = "sm80_xmma_dgrad_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize64x64x32_stage4_kernel_cudnn"
WGRAD = "sm80_xmma_wgrad_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x32x16_stage4_kernel_cudnn"
GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64_16x6_nn_align4>(Params)"
NORM = "void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>(cudnnTensorStruct, float const*)"
NORM_BACK = "void cudnn::bn_bw_1C11_singleread<float, 512, true, 1, 2, 0>(float, cudnnTensorStruct)"
FOREACH = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOp>"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def us(ns: int) -> float:
    """Microseconds, with the three digits that Kineto writes."""
    return ns / 1000


# The shortest and the longest time, in nanoseconds.
Times = tuple[int, int]


@dataclass
class Thread:
    """A thread of the host."""

    tid: int
    now_ns: int


class Rank:
    """One rank's host, its two streams, and its file."""

    def __init__(self, rank: int, world_size: int, layers: int, seed: int) -> None:
        self.rank, self.world_size, self.layers = rank, world_size, layers
        self.random = random.Random(seed * 1000 + rank)
        self.pid = 71_300 + 7 * rank
        begin_ns = BEGIN_NS + rank * 23_417
        self.main = Thread(self.pid, begin_ns)
        self.backward = Thread(self.pid + 311, begin_ns)
        self.loader = Thread(self.pid + 98, begin_ns)
        self.free_ns = {COMPUTE_STREAM: begin_ns, NCCL_STREAM: begin_ns}
        self.external_id = self.correlation = self.sequence = self.flow = self.python_id = self.collective = 0
        self.allocated = 92_274_688
        self.events: list[dict[str, Any]] = []
        self.slowness = 1.0 + 0.12 * rank  # the last rank is the slowest
        for thread, name in [(self.main, "python"), (self.backward, "pt_autograd_0"), (self.loader, "pin_memory")]:
            self.metadata(self.pid, thread.tid, "thread_name", name=f"thread ({name})")
        self.metadata(self.pid, 0, "process_name", name="python")
        self.metadata(self.pid, 0, "process_labels", labels="CPU")
        self.metadata(self.rank, 0, "process_labels", labels=f"GPU {self.rank}")
        for stream in self.free_ns:
            self.metadata(self.rank, stream, "thread_name", name=f"stream {stream} ")

    # --- Writing the file ---------------------------------------------------------------------------------

    def trace(self) -> dict[str, Any]:
        """The whole file."""
        end_ns = max(self.main.now_ns, *self.free_ns.values())
        begin, profiler = us(BEGIN_NS), "PyTorch Profiler"
        span = {"ph": "X", "cat": "Trace", "ts": begin, "dur": us(end_ns - BEGIN_NS), "pid": "Spans", "tid": profiler, "name": f"{profiler} (0)"}
        marks = [span | {"args": {"Op count": 0}},
                 {"name": f"Iteration Start: {profiler}", "ph": "i", "s": "g", "pid": "Traces", "tid": f"Trace {profiler}", "ts": begin},
                 {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": us(end_ns)}]
        group = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "pg_size": self.world_size, "ranks": list(range(self.world_size))}
        info = {"backend": "nccl", "rank": self.rank, "world_size": self.world_size, "pg_count": 1, "pg_config": [group], "nccl_version": "2.27.5"}
        device = {"id": self.rank, "name": "synthetic", "totalGlobalMem": 85899345920, "computeMajor": 8, "computeMinor": 0, "maxThreadsPerBlock": 1024,
                  "maxThreadsPerMultiprocessor": 2048, "regsPerBlock": 65536, "warpSize": 32, "sharedMemPerBlock": 49152, "numSms": 108}
        versions = {"cupti_version": 26, "cuda_runtime_version": 12080, "cuda_driver_version": 12080}
        recorded = {"profile_memory": 1, "record_shapes": 1, "with_stack": 1, "trace_id": "0" * 32, "distributedInfo": info, "displayTimeUnit": "ms"}
        head = {"schemaVersion": 1, "deviceProperties": [device]} | versions | recorded | {"baseTimeNanoseconds": BASE_NS}
        return head | {"traceEvents": self.events + marks, "traceName": "synthetic"}

    def metadata(self, pid: int, tid: int, kind: str, **args: str) -> None:
        self.events.append({"name": kind, "ph": "M", "ts": us(BEGIN_NS), "pid": pid, "tid": tid, "args": args})

    def complete(self, cat: str, name: str, pid: int, tid: int, begin_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        times = {"ts": us(begin_ns), "dur": us(end_ns - begin_ns)}
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **times, "args": args})

    def arrow(self, phase: str, cat: str, id: int, pid: int, tid: int, at_ns: int) -> None:
        end = {"bp": "e"} if phase == "f" else {}
        self.events.append({"ph": phase, "id": id, "pid": pid, "tid": tid, "ts": us(at_ns), "cat": cat, "name": cat, **end})

    def memory(self, delta: int) -> None:
        self.allocated += delta
        args = {"Total Reserved": 148897792, "Total Allocated": self.allocated, "Bytes": delta, "Device Id": self.rank, "Device Type": 1,
                "Addr": 140_100_000_000_000 + self.allocated}
        self.events.append({"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": self.pid, "tid": self.main.tid,
                            "ts": us(self.main.now_ns), "args": args})

    # --- Simulation ---------------------------------------------------------------------------------------

    def some_ns(self, least_ns: int, most_ns: int) -> int:
        return int(self.random.randint(least_ns, most_ns) * self.slowness) if most_ns else 0

    def next_ids(self) -> dict[str, Any]:
        """The numbers of the next operator or annotation."""
        self.external_id += 1
        return {"External id": self.external_id, "Ev Idx": self.external_id}

    @contextmanager
    def within(self, thread: Thread, cat: str, name: str, args: dict[str, Any], before: Times = (0, 0), after: Times = (0, 0)) -> Iterator[dict[str, Any]]:
        """An event around all that the thread does in the `with` block, and the shortest and longest time that it takes itself before and after that."""
        begin_ns = thread.now_ns
        thread.now_ns += self.some_ns(*before)
        yield args
        thread.now_ns += self.some_ns(*after)
        self.complete(cat, name, self.pid, thread.tid, begin_ns, thread.now_ns, args)

    def operator(self, thread: Thread, names: list[str], *kernels: tuple[str, int, int], dims: list[list[int]], sequence: int | None = None) -> None:
        """Nested operators, the innermost of which launches kernels: name, shortest and longest time."""
        if not names:
            for name, *times in kernels:
                self.launch(thread, name, self.some_ns(*times))
            return
        args = self.next_ids() | {"Record function id": 0, "Input Dims": dims, "Input type": ["float"] * len(dims)}
        if sequence is not None:
            args |= {"Sequence number": sequence, "Fwd thread id": int(thread is self.backward)}
        with self.within(thread, "cpu_op", names[0], args, (400, 2500), (200, 1500)):
            self.operator(thread, names[1:], *kernels, dims=dims)

    def call(self, thread: Thread, name: str, length_ns: int, cat: str = "cuda_runtime") -> int:
        """A call of the CUDA runtime; its correlation number."""
        self.correlation += 1
        with self.within(thread, cat, name, {"cbid": 211, "correlation": self.correlation, "External id": self.external_id}):
            thread.now_ns += length_ns
        return self.correlation

    def submit(self, thread: Thread, name: str, length_ns: int, cat: str = "cuda_runtime") -> None:
        """A call that gives the device work, to which an arrow leads."""
        begin_ns = thread.now_ns
        self.call(thread, name, length_ns, cat)
        self.arrow("s", "ac2g", self.correlation, self.pid, thread.tid, begin_ns)

    def device(self, cat: str, name: str, stream: int, begin_ns: int, end_ns: int, more: dict[str, Any]) -> None:
        args = {"External id": self.external_id, "device": self.rank, "context": 1, "stream": stream, "correlation": self.correlation} | more
        self.complete(cat, name, self.rank, stream, begin_ns, end_ns, args)
        self.arrow("f", "ac2g", self.correlation, self.rank, stream, begin_ns)

    def on_stream(self, thread: Thread, stream: int, length_ns: int) -> tuple[int, int]:
        """The time at which something that is launched now will run: after everything in its stream."""
        begin_ns = max(thread.now_ns + self.some_ns(1800, 4200), self.free_ns[stream] + self.some_ns(700, 1600))
        self.free_ns[stream] = begin_ns + length_ns
        return begin_ns, begin_ns + length_ns

    def launch(self, thread: Thread, name: str, length_ns: int) -> None:
        if name == GEMM:
            self.submit(thread, "cuLaunchKernel", self.some_ns(2500, 5200), cat="cuda_driver")
        else:
            self.submit(thread, "cudaLaunchKernel", self.some_ns(2800, 7000))
        grid = [self.random.randint(1, 2048), 1, 1]
        more = {"queued": 0, "registers per thread": 64, "shared memory": 0, "blocks per SM": grid[0] / 108,
                "warps per SM": grid[0] / 27, "grid": grid, "block": [128, 1, 1], "est. achieved occupancy %": 31}
        self.device("kernel", name, COMPUTE_STREAM, *self.on_stream(thread, COMPUTE_STREAM, length_ns), more)

    def moved(self, thread: Thread, cat: str, name: str, num_bytes: int, length_ns: int) -> None:
        more = {"bytes": num_bytes, "memory bandwidth (GB/s)": num_bytes / length_ns}
        self.device(cat, name, COMPUTE_STREAM, *self.on_stream(thread, COMPUTE_STREAM, length_ns), more)

    def copy(self, thread: Thread, name: str, num_bytes: int, gb_per_s: float) -> None:
        self.submit(thread, "cudaMemcpyAsync", self.some_ns(6000, 14000))
        self.moved(thread, "gpu_memcpy", name, num_bytes, max(self.some_ns(900, 1400), int(num_bytes / gb_per_s)))

    def stream_waits(self, thread: Thread, waiting: int, for_stream: int) -> None:
        """Makes the stream `waiting` begin nothing new before everything now in `for_stream` is done."""
        recorded = self.call(thread, "cudaEventRecord", self.some_ns(900, 2000))
        begin_ns = thread.now_ns
        self.call(thread, "cudaStreamWaitEvent", self.some_ns(700, 1600))
        more = {"cuda_sync_kind": "Stream Wait Event", "wait_on_stream": for_stream, "wait_on_cuda_event_record_corr_id": recorded, "wait_on_cuda_event_id": 11}
        self.device("cuda_sync", "Stream Wait Event", waiting, begin_ns, begin_ns + self.some_ns(300, 900), more)
        self.free_ns[waiting] = max(self.free_ns[waiting], self.free_ns[for_stream])

    def host_waits(self, thread: Thread) -> None:
        """The host waits for the compute stream."""
        begin_ns = thread.now_ns
        end_ns = max(begin_ns, self.free_ns[COMPUTE_STREAM]) + self.some_ns(2000, 5000)
        self.call(thread, "cudaStreamSynchronize", end_ns - begin_ns)
        self.device("cuda_sync", "Stream Sync", COMPUTE_STREAM, begin_ns + 500, end_ns - 300, {"cuda_sync_kind": "Stream Sync"})

    def all_reduce(self, thread: Thread, elems: int) -> Generator[int, int, None]:
        """Yields the time when this rank has begun, and is sent the time when all ranks have ended."""
        self.collective += 1
        more = {
            "Collective name": "allreduce", "In msg nelems": elems, "Out msg nelems": elems, "Group size": self.world_size, "dtype": "Float",
            "In split size": "[]", "Out split size": "[]", "Process Group Name": "0", "Process Group Description": "default_pg",
            "Process Group Ranks": str(list(range(self.world_size))), "Seq": self.collective,
        }
        ids, name = self.next_ids(), "nccl:all_reduce"
        with (self.within(thread, "user_annotation", name, ids, (2000, 5000), (500, 1500)),
              self.within(thread, "cpu_op", "record_param_comms", ids | more, (500, 1500), (800, 2000))):
            self.stream_waits(thread, NCCL_STREAM, COMPUTE_STREAM)
            self.submit(thread, "cudaLaunchKernelExC", self.some_ns(5000, 9000))
            start_ns, _ = self.on_stream(thread, NCCL_STREAM, 0)
            self.free_ns[NCCL_STREAM] = end_ns = yield start_ns
            args = more | {"queued": 0, "registers per thread": 96, "shared memory": 82240, "grid": [24, 1, 1], "block": [512, 1, 1]}
            self.device("kernel", ALL_REDUCE, NCCL_STREAM, start_ns, end_ns, args)
            self.complete("gpu_user_annotation", name, self.rank, NCCL_STREAM, start_ns, end_ns, {"External id": ids["External id"]})

    @contextmanager
    def frame(self, name: str, parent: int | None = None, before: Times = (0, 0), after: Times = (0, 0)) -> Iterator[None]:
        """A Python frame on the main thread."""
        with self.within(self.main, "python_function", name, {"Python parent id": parent}, before) as args:
            yield
            self.main.now_ns += self.some_ns(*after)
            self.python_id += 1
            args |= {"Python id": self.python_id, "Ev Idx": self.external_id}

    def step(self, number: int) -> Generator[int | None, int, None]:
        """One training step, which yields at every collective, and nothing when it is done."""
        device_begin_ns, ids = max(self.main.now_ns, self.free_ns[COMPUTE_STREAM]), self.next_ids()
        with self.within(self.main, "user_annotation", f"ProfilerStep#{number}", ids):
            self.load_batch(ids)
            first_sequence = self.sequence
            forward_times = self.forward_pass(ids)
            with self.frame("torch/_tensor.py(570): backward", None, (9000, 15_000)):
                yield from self.backward_pass(first_sequence, forward_times)
                self.main.now_ns = self.backward.now_ns + self.some_ns(3000, 9000)
            self.optimize(ids)
            self.read_loss()
        end_ns = self.free_ns[COMPUTE_STREAM]
        self.complete("gpu_user_annotation", f"ProfilerStep#{number}", self.rank, COMPUTE_STREAM, device_begin_ns, end_ns, {"External id": ids["External id"]})
        self.main.now_ns += self.some_ns(1000, 3000)
        yield None

    def load_batch(self, ids: dict[str, Any]) -> None:
        self.loader.now_ns = self.main.now_ns
        with self.within(self.main, "user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", ids, (30_000, 90_000)):
            self.operator(self.loader, ["aten::pin_memory", "aten::_pin_memory"], dims=[[64, 3, 32, 32]])
        for shape, size in [([64, 3, 32, 32], 786_432), ([64], 512)]:
            with self.within(self.main, "cpu_op", "aten::to", {"Input Dims": [shape]}, (3000, 6000), (500, 1500)) as args:
                self.copy(self.main, "Memcpy HtoD (Pinned -> Device)", size, 22.0)
                args |= self.next_ids()
            self.memory(size)

    def forward_pass(self, ids: dict[str, Any]) -> list[int]:
        """The time at which each operator that has a backward pass began."""
        main, times = self.main, []
        convolution = ["aten::conv2d", "aten::convolution", "aten::_convolution", "aten::cudnn_convolution"]
        block = [
            (convolution, (FPROP, 22_000, 61_000)),
            (["aten::batch_norm", "aten::_batch_norm_impl_index", "aten::cudnn_batch_norm"], (NORM, 9000, 18_000)),
            (["aten::relu", "aten::clamp_min"], (ELEMENTWISE.format("clamp_min_functor", 2), 4000, 7000)),
        ]

        def operator(names: list[str], kernel: tuple[str, int, int], dims: list[list[int]]) -> None:
            times.append(main.now_ns)
            self.operator(main, names, kernel, dims=dims, sequence=self.sequence)
            self.sequence += 1

        with (self.frame("train.py(41): forward", after=(500, 1500)),
              self.within(main, "user_annotation", "DistributedDataParallel.forward", ids, (4000, 8000), (1000, 3000))):
            for layer in range(self.layers):
                with self.frame(f"nn.Module: Block_{layer}", self.python_id or None, (1500, 4000)):
                    for names, kernel in block:
                        operator(names, kernel, [[64, 32, 32, 32], [32, 32, 3, 3]])
                        main.now_ns += self.some_ns(500, 2500)
                    self.memory(8_388_608)
            operator(["aten::linear", "aten::addmm"], (GEMM, 7000, 11_000), [[64, 2048], [2048, 10]])
            main.now_ns += self.some_ns(1000, 3000)
            softmax = (ELEMENTWISE.format("log_softmax_functor", 2), 2500, 4500)
            self.operator(main, ["aten::cross_entropy_loss", "aten::nll_loss_nd"], softmax, dims=[[64, 10], [64]])
        return times

    def backward_pass(self, first_sequence: int, forward_times: list[int]) -> Generator[int, int, None]:
        """On a thread of its own, for which the main thread waits."""
        main, backward = self.main, self.backward
        backward.now_ns = main.now_ns
        kernels = {
            "AddmmBackward0": [(GEMM, 6000, 9000), (GEMM, 6000, 9000)],
            "ReluBackward0": [(ELEMENTWISE.format("threshold_functor", 3), 5000, 8000)],
            "CudnnBatchNormBackward0": [(NORM_BACK, 14_000, 26_000)],
            "ConvolutionBackward0": [(DGRAD, 30_000, 70_000), (WGRAD, 34_000, 82_000)],
        }
        names = ["AddmmBackward0"] + ["ReluBackward0", "CudnnBatchNormBackward0", "ConvolutionBackward0"] * self.layers
        for at, (name, sequence) in enumerate(zip(names, range(self.sequence - 1, first_sequence - 1, -1))):
            self.flow += 1
            self.arrow("s", "fwdbwd", self.flow, self.pid, main.tid, forward_times[sequence - first_sequence])
            self.arrow("f", "fwdbwd", self.flow, self.pid, backward.tid, backward.now_ns)
            inner = "aten::convolution_backward" if name == "ConvolutionBackward0" else f"aten::{name[:4].lower()}"
            outer = f"autograd::engine::evaluate_function: {name}"
            self.operator(backward, [outer, name, inner], *kernels[name], dims=[[64, 32, 32, 32]], sequence=sequence)
            backward.now_ns += self.some_ns(800, 2600)
            if name == "ConvolutionBackward0" and at % 6 == 3 or at == len(names) - 1:
                yield from self.all_reduce(backward, 262_144 + 4096 * at)
                backward.now_ns += self.some_ns(1000, 3000)
        self.stream_waits(backward, COMPUTE_STREAM, NCCL_STREAM)

    def optimize(self, ids: dict[str, Any]) -> None:
        with (self.frame("torch/optim/sgd.py(121): step", after=(500, 1000)),
              self.within(self.main, "user_annotation", "Optimizer.step#SGD.step", ids, (5000, 9000), (1000, 2000))):
            for _ in range(3):
                self.operator(self.main, ["aten::_foreach_add_"], (FOREACH, 6000, 12_000), dims=[[32, 32, 3, 3]])
                self.main.now_ns += self.some_ns(800, 2000)
            self.submit(self.main, "cudaMemsetAsync", self.some_ns(3000, 6000))
            self.moved(self.main, "gpu_memset", "Memset (Device)", 65_536, self.some_ns(1000, 1700))

    def read_loss(self) -> None:
        with self.within(self.main, "cpu_op", "aten::item", self.next_ids() | {"Input Dims": [[]]}, (1000, 2000), (500, 900)):
            self.copy(self.main, "Memcpy DtoH (Device -> Pageable)", 4, 10.0)
            self.main.now_ns += self.some_ns(300, 900)
            self.host_waits(self.main)
        self.memory(-self.layers * 8_388_608 - 786_432 - 512)
        self.main.now_ns += self.some_ns(4000, 12_000)


def run_step(ranks: list[Rank], number: int) -> None:
    """One step of all ranks. Each rank continues after a collective when all have begun it."""
    runs, end_ns = [rank.step(number) for rank in ranks], None
    while None not in (starts := [run.send(end_ns) for run in runs]):
        end_ns = max(starts) + ranks[0].random.randint(90_000, 160_000)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write synthetic traces in the shape of PyTorch's on CUDA.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the traces go")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--layers", type=int, default=6, help="blocks of convolution, norm and ReLU (default: 6)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if min(arguments.ranks, arguments.steps, arguments.layers) < 1:
        parser.error("--ranks, --steps and --layers must be at least 1")
    ranks = [Rank(rank, arguments.ranks, arguments.layers, arguments.seed) for rank in range(arguments.ranks)]
    for number in range(10, 10 + arguments.steps):
        run_step(ranks, number)
    for rank in ranks:
        folder = arguments.out / f"rank_{rank.rank}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"worker_{rank.rank}.{BASE_NS + rank.rank}.pt.trace.json.gz"
        # Without a name and a time, so that the same arguments give the same bytes.
        with open(path, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
            packed.write(json.dumps(rank.trace()).encode())


if __name__ == "__main__":
    main()
