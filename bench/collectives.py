"""Compares collectives with PyTorch's Gloo and an MPI library, side by side, and with their own cost model.

    cargo build --release && cargo build --release --examples -p paceline-collectives
    python3 bench/collectives.py --peer-python .peer/bin/python      # all cases: about ten minutes
    python3 bench/collectives.py --cases tcp2 link

Each side measures an all-reduce in place with one thread per rank, pinned if there are enough cores. There is a
barrier before each of `--iterations` calls. The result is the median of the slowest rank's times (Gloo and MPI:
the slowest rank's median). Rounds alternate: ours, theirs, ours, theirs. Each round gives one ratio. In the case `private2` our side
uses ordinary memory too. The other cases measure only ours: latency, reduce-scatter and all-gather compared with one all-reduce, how
exactly an emulated link keeps its time, and how much it slows down computation that runs at the same time.

Prints one table and writes all values with date, machine and commit to `results/collectives.json`. The case `mpi2` needs `mpicc`.
Exits with 1 if something could not be run.
"""
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from common import ROOT, RUN_SECONDS, Record, RunFailed, aligned, arguments_for, machine, parsed, provenance, ranged, run, write

PEERS = ROOT / "bench" / "peer"
MB = 1_000_000


class Duel(NamedTuple):
    """Ours against a peer."""

    peer: str  # gloo or mpi
    ranks: int
    flags: str
    sizes: tuple[int, ...] = (MB, 10 * MB, 100 * MB)


DUELS = {
    "shm2": Duel("gloo", 2, "--transport shm", (MB, 10 * MB, 100 * MB, 256 * MB)),
    "shm4": Duel("gloo", 4, "--transport shm"),
    "mpi2": Duel("mpi", 2, "--transport shm"),
    "private2": Duel("gloo", 2, "--transport shm --private"),
    "tcp2": Duel("gloo", 2, "--transport tcp"),
    "tcp4": Duel("gloo", 4, "--transport tcp"),
}
LINKS = ("1gbe", "10gbit,50us", "1gbit,1ms")
MPIRUN = "mpirun --allow-run-as-root --oversubscribe --bind-to core"


class Bench:
    """`paceline bench` and the peers, each as one command that gives milliseconds by size."""

    def __init__(self, paceline: Path, python: Path, iterations: int, folder: Path) -> None:
        self.paceline, self.python, self.iterations, self.folder = paceline, python, iterations, folder

    def rows(self, op: str, ranks: int, sizes: tuple[int, ...], flags: str, iterations: int | None = None) -> list[Record]:
        """The rows of one run, in order of size."""
        megabytes = ",".join(f"{size / MB:g}" for size in sizes)
        pinned = "--pin-cores" if ranks <= machine()["cores"] else ""
        words = f"bench {op} --nproc {ranks} --size-mb {megabytes} -w 5 --iters {iterations or self.iterations} {flags} {pinned} -J rows.json"
        run([self.paceline, *words.split()], self.folder, RUN_SECONDS)
        return sorted(json.loads((self.folder / "rows.json").read_text())["results"], key=lambda row: row["size"])

    def ours(self, duel: Duel) -> list[float]:
        return [row["in_place"]["time"] / 1e3 for row in self.rows("all_reduce", duel.ranks, duel.sizes, duel.flags)]

    def theirs(self, duel: Duel) -> list[float]:
        options = shlex.split(f"--sizes {','.join(map(str, duel.sizes))} --warmup 5 --iterations {self.iterations}")
        command: list[str | Path] = [self.python, PEERS / "all_reduce.py", "--ranks", str(duel.ranks), *options]
        if duel.peer == "mpi":
            program = self.folder / "mpi_all_reduce"
            run(["mpicc", "-O2", PEERS / "mpi_all_reduce.c", "-o", program], self.folder, RUN_SECONDS)
            command = [*MPIRUN.split(), "-n", str(duel.ranks), program, *options]
        lines = [json.loads(line) for line in run(command, self.folder, RUN_SECONDS).splitlines() if line[:1] == "{"]
        return [line["ms"] for line in sorted(lines, key=lambda line: line["bytes"])]


def result(case: str, size: int, text: str, values: object) -> Record:
    return {"case": case, "bytes": size, "text": text, "values": values}


def duel(bench: Bench, name: str, rounds: int) -> list[Record]:
    of = DUELS[name]
    samples = [(bench.ours(of), bench.theirs(of)) for _ in range(rounds)]
    results = []
    for at, size in enumerate(of.sizes):
        ours, theirs = [one[at] for one, _ in samples], [other[at] for _, other in samples]
        ratios = [their / our for our, their in zip(ours, theirs)]
        text = f"{ranged(ours, 3)} ms against {ranged(theirs, 3)} ms: {ranged(ratios)} times as fast"
        results.append(result(name, size, text, {"ours_ms": ours, "theirs_ms": theirs}))
    return results


def latency(bench: Bench, name: str, rounds: int) -> list[Record]:
    times = [bench.rows("all_reduce", 2, (4096,), "--transport shm", 1000)[0]["in_place"]["time"] for _ in range(rounds)]
    return [result(name, 4096, f"{ranged(times)} us", times)]


def parts(bench: Bench, name: str, rounds: int) -> list[Record]:
    sizes, samples = (MB, 10 * MB, 100 * MB), []
    for _ in range(rounds):
        times = [bench.rows(op, 2, sizes, "--transport shm") for op in ("all_reduce", "reduce_scatter", "all_gather")]
        samples.append([[row["in_place"]["time"] for row in rows] for rows in times])
    ratios = [[(scatter[at] + gather[at]) / whole[at] for whole, scatter, gather in samples] for at in range(len(sizes))]
    return [result(name, size, f"reduce-scatter + all-gather take {ranged(of)} of one all-reduce", of) for size, of in zip(sizes, ratios)]


def link(bench: Bench, name: str, _rounds: int) -> list[Record]:
    results = []
    for of in LINKS:
        for transport in ("shm", "tcp"):
            for row in bench.rows("all_reduce", 2, (MB, 10 * MB), f"--transport {transport} --link {of}", 10):
                measured, formula = row["in_place"]["time"], row["predicted_us"]
                text = f"{of} over {transport}: {measured / 1e3:.3f} ms, formula {formula / 1e3:.3f} ms ({measured / formula - 1:+.2%})"
                results.append(result(name, row["size"], text, {"measured_us": measured, "formula_us": formula}))
    return results


def beside(bench: Bench, name: str, _rounds: int) -> list[Record]:
    example = bench.paceline.parent / "examples" / "beside"
    line = run([bench.paceline, "launch", "-n", "2", "--", example], bench.folder, RUN_SECONDS)
    sample = json.loads(line.removeprefix("[rank 0] "))
    return [result(name, 4096, f"compute beside an emulated operation takes {sample['cost']:+.2%}", sample)]


def main() -> int:
    parser = arguments_for(__doc__, "collectives.json", has_peer=True)
    measures = dict.fromkeys(DUELS, duel) | {"latency": latency, "parts": parts, "link": link, "beside": beside}
    parser.add_argument("--cases", nargs="+", choices=measures, default=measures, help="(default: all)")
    parser.add_argument("--iterations", type=int, default=20, help="timed calls of each run (default: 20)")
    arguments = parsed(parser)
    results: list[Record] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="collectives_") as folder:
        bench = Bench(arguments.paceline, arguments.peer_python, arguments.iterations, Path(folder))
        for name in arguments.cases:
            try:
                results += measures[name](bench, name, arguments.rounds)
            except RunFailed as error:
                failures.append(f"{name} could not be run: {error}")
    rows = [[of["case"], f"{of['bytes'] / MB:g} MB", of["text"]] for of in results]
    print(aligned([["case", "size", ""], *rows], left={0, 2}))
    print("\n".join(failures))
    write(arguments.out, provenance() | {"results": results, "failures": failures})
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
