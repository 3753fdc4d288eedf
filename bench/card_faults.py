"""Which fault shows how, on cards: each of some faults is planted once, in kernels, products, streams, graphs and NCCL, and the tests must see it.

    python3 bench/card_faults.py           # builds a copy of the working tree once, then runs tests of it for each fault

A copy of the tracked files gets a switch around each fault: waits that are left out, memory that is used too early, accesses beyond an end,
barriers that are missing, factors that are transposed or have another leading dimension, captures of what changes from step to step, and other
orders of sums. For each one the tests run on the emulated card, in several orders of its work if they pass at first, and must fail.

The exit code is 1 if a fault stays unseen. Needs Git, Cargo, and the run-time compiler of the vendor (see docs/devices.md).
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, aligned, arguments_for, provenance, write
from mutants import SWITCH, cargo_test, copy_tree, is_off, replace

COMPILES = "let text = [source.preludes.concat().as_str(), source.text].concat();"
# The compiler of kernels is told which fault is wanted.
COMPILES_FAULTS = ('let fault = format!("#define FAULT {}\\n", std::env::var("' + SWITCH + '").unwrap_or_else(|_| "-1".to_owned()));'
                   "let text = [fault.as_str(), source.preludes.concat().as_str(), source.text].concat();")


@dataclass
class Fault:
    """A fault, and the tests that must see it."""

    of: str
    what: str
    file: str
    sound: str  # the only text of this form in the file, or the first one behind `after`
    faulty: str  # what stands in its place; in Rust, SOUND is whether the fault is off
    tests: str
    after: str = ""


MEMORY = "-p paceline-memory --test card"
GROUPS = "-p paceline-collectives --test card"
KERNELS = "-p paceline-kernels --test card"
PRODUCTS = "-p paceline-kernels --test card_products"
ATTENTION = "-p paceline-kernels --test card_attention"
GRAPH = "-p paceline-memory --test graph"
GRAPHS = "-p paceline-strategies --test card_graphs"
BOUND = "if (i >= n) return;"

FAULTS = [
    Fault("wait", "a stream, for another one", "memory/src/queues/card.rs", "self.stream.wait(done).map_err(words)?,",
          "if SOUND { self.stream.wait(done).map_err(words)? },", MEMORY),
    Fault("wait", "a stream, for work of the host", "memory/src/queues/card.rs", "None if event.block() == EventState::Complete => {}",
          "None if !SOUND || event.block() == EventState::Complete => {}", MEMORY),
    Fault("wait", "work behind work that waits for the host", "memory/src/queues/card.rs", "if self.is_up_to_date() &&",
          "if (!SOUND || self.is_up_to_date()) &&", MEMORY),
    Fault("wait", "a query, for the work", "memory/src/queues/card.rs", "Ok(false) => return false,",
          "Ok(false) if SOUND => return false, Ok(false) => self.queue.settle_to(self),", MEMORY),
    Fault("wait", "an operation, for the kernels before", "collectives/src/worker.rs", "of.ready.block();", "if SOUND { of.ready.block(); }", GROUPS),
    Fault("wait", "whoever waits for an operation, for NCCL", "collectives/src/nccl/mod.rs", "if is_done().map_err(|reason| context.on_card(reason))? {",
          "if !SOUND || is_done().map_err(|reason| context.on_card(reason))? {", GROUPS),
    Fault("wait", "a graph's own stream, for what the graph sends", "collectives/src/worker.rs", "home.wait_for(stream)?;",
          "if SOUND { home.wait_for(stream)?; }", GROUPS),
    Fault("wait", "what a graph sends, for the kernels before", "collectives/src/nccl/graph.rs", "stream.wait_for(&home)?;",
          "if SOUND { stream.wait_for(&home)?; }", GROUPS),
    Fault("wait", "the host, for a graph", "collectives/src/nccl/graph.rs", "EventState::Pending => Ok(false),", "EventState::Pending => Ok(!SOUND),", GROUPS),
    Fault("reuse", "memory that another stream still uses", "memory/src/buffers/allocator.rs", "if others.is_empty() {", "if others.is_empty() || !SOUND {",
          MEMORY, after="let others = uses.not_before(home.stream());"),
    Fault("reuse", "parts of two ranks at one place", "collectives/src/nccl/moves.rs", "parts + (rank * len) as u64;",
          "parts + (rank * len) as u64 / if SOUND { 1 } else { 2 };", GROUPS),
    Fault("bounds", "operations on four elements", "cuda/src/numbers.cuh", "i < n; i += blockDim.x", "i <= last; i += blockDim.x", KERNELS),
    Fault("bounds", "a bias that is added", "kernels/src/card/products.cu", BOUND, "", PRODUCTS, after="void add_bias("),
    Fault("bounds", "sums of parts", "kernels/src/card/products.cu", "if (i < n) sums[i] =", "sums[i] =", PRODUCTS, after="void add_parts("),
    Fault("bounds", "attention behind the end of a sequence", "kernels/src/attention/card.cu", "if (token >= spec.seq) continue;", "", ATTENTION,
          after="void attention_forward("),
    Fault("bounds", "the reduction of ranks", "collectives/src/nccl/reduce.cu", "if (i >= elems) return;", "", GROUPS),
    Fault("barrier", "sums of a block", "kernels/src/card/reduce.cuh", "__syncthreads();", "", KERNELS, after="of_warps[threadIdx.x / 32] = x;"),
    Fault("barrier", "sums of rows", "kernels/src/card/products.cu", "__syncthreads();", "", PRODUCTS, after="void sum_rows("),
    Fault("barrier", "sums of channels", "kernels/src/card/conv2d.cu", "__syncthreads();", "", PRODUCTS),
    Fault("barrier", "a tile of a convolution, before it is read", "kernels/src/card/conv.cuh", "__syncthreads();", "", PRODUCTS,
          after="b_loader.store_to(tiles.b);"),
    Fault("barrier", "a tile of a convolution, before it is overwritten", "kernels/src/card/conv.cuh", "__syncthreads();", "", PRODUCTS,
          after="tiles.multiply(i0, j0, is_live, sums);"),
    Fault("barrier", "what tensor cores have convolved", "kernels/src/card/conv.cuh", "__syncthreads();", "", PRODUCTS, after="= sums[j][k];"),
    Fault("barrier", "keys and values of attention", "kernels/src/attention/card.cu", "__syncthreads();", "", ATTENTION,
          after="(const Real*)0, (Real)1, v);"),
    Fault("barrier", "keys and values of attention in 16 bits", "kernels/src/attention/card_halves.cu", "__syncthreads_or(has_infinite)",
          "has_infinite", ATTENTION, after="(const f32*)0, 1.0f, v);"),
    Fault("barrier", "sums of losses", "kernels/src/linear_cross_entropy/card.cu", "__syncthreads();", "", PRODUCTS,
          after="for (u32 half = 128; half > 0; half /= 2) {"),
    Fault("transposition", "of a factor", "kernels/src/card/products.rs", "is_transposed: !is_transposed }",
          "is_transposed: if SOUND { !is_transposed } else { is_transposed } }", PRODUCTS),
    Fault("transposition", "factors that change places", "cuda/src/matmul.rs", "[(TRANSPOSE_A, &matmul.b), (TRANSPOSE_B, &matmul.a)] {",
          "(if SOUND { [(TRANSPOSE_A, &matmul.b), (TRANSPOSE_B, &matmul.a)] } else { [(TRANSPOSE_A, &matmul.a), (TRANSPOSE_B, &matmul.b)] }) {",
          PRODUCTS),
    Fault("transposition", "of a factor on tensor cores", "kernels/src/attention/card_halves.cu", "load_transposed(y,", "load_matrices(y,", ATTENTION),
    Fault("leading dimension", "of a transposed factor", "kernels/src/card/products.rs", "if self.is_transposed { self.rows }",
          "if self.is_transposed == SOUND { self.rows }", PRODUCTS),
    Fault("leading dimension", "one element too short", "cuda/src/matmul.rs", "factor.stride as i64,", "factor.stride as i64 - i64::from(!(SOUND)),",
          PRODUCTS),
    Fault("order", "ranks one after the other", "collectives/src/nccl/reduce.cu",
          "rank + 1 == ranks ? __popc(rank) : __ffs(rank + 1) - 1;", "rank > 0;", GROUPS),
    Fault("capture", "uses that a launch does not queue", "memory/src/graph.rs", "memory.clone().queue_use(range.clone(), *access, op, event)?;",
          "if SOUND { memory.clone().queue_use(range.clone(), *access, op, event)?; }", GRAPH),
    Fault("capture", "memory of a graph that others get", "memory/src/buffers/heap.rs", "chunk.graph_pool == self.graph_pool);",
          "chunk.graph_pool == self.graph_pool || !(SOUND));", GRAPH),
    Fault("capture", "memory that is asked for", "memory/src/graph.rs", "phase: GraphPhase::New }",
          "phase: if SOUND { GraphPhase::New } else { GraphPhase::Warm } }", GRAPHS),
    Fault("capture", "the learning rate as an argument", "model/src/optimizer.rs", "let of = |count| numbers.map(",
          "let of = |count| numbers.filter(|_| SOUND).map(", GRAPHS),
    Fault("capture", "the scale of the loss as an argument", "strategies/src/graphs.rs", "count, loss_scale, is_shared };",
          "count, loss_scale: if SOUND { loss_scale } else { 1.0 }, is_shared };", GRAPHS),
    Fault("capture", "samples that stay elsewhere", "strategies/src/graphs.rs", "to.copy_from(from)?;", "if SOUND { to.copy_from(from)?; }", GRAPHS),
    Fault("barrier", "keys of attention in 16 bits, before they are overwritten", "kernels/src/attention/card_halves.cu", "__syncthreads();", "",
          ATTENTION, after="halves_forward("),
    Fault("bounds", "eight numbers at the end of a head", "kernels/src/attention/card_halves.cu", "count == 8 && ", "", ATTENTION,
          after="__device__ Octet(const S* from, u32 count) {"),
    Fault("reuse", "sums that the queries' kernel has not stored", "kernels/src/attention/card_halves.cu",
          "if (is_there && blockIdx.y == 0) products[of_query] = sum;", "", ATTENTION),
    Fault("reuse", "rotated queries that are not stored", "kernels/src/attention/card_halves.cu",
          "x.store(copy + token * copy_stride + c, there);", "", ATTENTION),
    Fault("capture", "graphs that ranks do not compare", "collectives/src/nccl/graph.rs", "launch.min(3) as usize;",
          "launch.min(if SOUND { 3 } else { 0 }) as usize;", GROUPS),
    Fault("rounding", "halfway cases of bf16", "cuda/src/numbers.cuh", "0x7fffu + ((bits >> 16) & 1u)", "0x8000u", KERNELS),
]


def planted(number: int, fault: Fault) -> str:
    """The sound and the faulty text, one of which counts."""
    if fault.file.endswith(".rs"):
        return fault.faulty.replace("SOUND", is_off(number))
    return f"\n#if FAULT == {number}\n{fault.faulty}\n#else\n{fault.sound}\n#endif\n"


def run(target: Path, tests: str, number: int | None, seed: int) -> str | None:
    """What a test that failed has said; `None` if all passed."""
    with tempfile.TemporaryDirectory(prefix="card_faults_") as cache:
        code, output, errors = cargo_test(target, tests, number, PACELINE_EMULATED_SEED=str(seed), RUST_BACKTRACE="0", XDG_CACHE_HOME=cache)
    if code == 0 and "skipped: " in output:
        raise SystemExit(f"error: {output}")
    if code == 0:
        return None
    lines = (output + errors).splitlines()
    said = [after.strip() for line, after in zip(lines, lines[1:]) if re.search(r"panicked at", line)]
    return said[0] if said else " | ".join(lines[-3:])


def main() -> int:
    parser = arguments_for(__doc__, "card_faults.json", rounds=0, has_program=False)
    parser.add_argument("--target-dir", type=Path, default=ROOT / "target/card_faults", metavar="DIR", help="where the copy is built")
    parser.add_argument("--faults", type=int, nargs="+", metavar="NUMBER", help="only these; the others keep what --out says of them")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="orders of the emulated card's work for each fault (default: 5)")
    args = parser.parse_args()
    begin, record = time.monotonic(), provenance() | {"faults": []}
    wanted = [number - 1 for number in args.faults or range(1, len(FAULTS) + 1)]
    if any(number not in range(len(FAULTS)) for number in wanted):
        parser.error(f"--faults: numbers are from 1 to {len(FAULTS)}")
    known = json.loads(args.out.read_text())["faults"] if args.faults else []
    if args.faults and len(known) != len(FAULTS):
        parser.error(f"--faults: {args.out} is not about these faults")
    target = Path(os.path.abspath(args.target_dir))
    copy_tree(target / "tree")
    places = [(fault.file, fault.after, fault.sound, planted(number, fault)) for number, fault in enumerate(FAULTS)]
    replace(target / "tree", [*places, ("cuda/src/compiler.rs", "", COMPILES, COMPILES_FAULTS)])
    for tests in sorted({FAULTS[number].tests for number in wanted}):
        subprocess.run(["cargo", "test", "--no-run", "--target-dir", str(target), *tests.split()], cwd=target / "tree", check=True)
        if said := run(target, tests, None, 0):
            raise SystemExit(f"error: without a fault, cargo test {tests} fails: {said}")
    for number, fault in enumerate(FAULTS):
        if number not in wanted:
            record["faults"].append(known[number])
            continue
        said = next(((words, seed) for seed in range(args.seeds) if (words := run(target, fault.tests, number, seed))), None)
        record["faults"].append({"of": fault.of, "what": fault.what, "file": fault.file, "tests": fault.tests,
                                 "seed": said and said[1], "words": said and said[0]})
        print(f"{number + 1:>2} of {len(FAULTS)}  {fault.of}, {fault.what}: {said[0][:120] if said else 'NOTHING'}", flush=True)
    write(args.out, record)
    rows = [[of["of"], of["what"], "NOTHING" if of["words"] is None else str(of["seed"]), (of["words"] or "")[:90]] for of in record["faults"]]
    print(aligned([["of", "what", "seen with seed", "how"], *rows], left={0, 1, 3}))
    unseen = [of for of in record["faults"] if of["words"] is None]
    print(f"{len(FAULTS)} faults, {len(unseen)} stay unseen; {time.monotonic() - begin:.0f} s")
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
