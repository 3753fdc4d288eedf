"""Compares collectives with PyTorch's Gloo and an MPI library, side by side, and with their own cost model.

    cargo build --release && cargo build --release --examples -p paceline-collectives
    python3 bench/collectives.py --peer-python .peer/bin/python      # all cases: about ten minutes
    python3 bench/collectives.py --cases tcp2 link

Each side measures an all-reduce in place with one thread per rank, pinned if there are enough cores. There is a
barrier before each of `--iterations` calls. The result is the median of the slowest rank's times (Gloo and MPI:
the slowest rank's median). Rounds alternate: ours, theirs, ours, theirs. Each round gives one ratio, and the median
of the ratios is compared with a bar, the goal for this ratio. In the case `private` our side uses ordinary memory
too. The other cases measure only ours: latency, reduce-scatter and all-gather compared with one all-reduce, how
exactly an emulated link keeps its time, and how much it slows down computation that runs at the same time.

Prints one table and writes every sample with date, machine, versions and commands to
`results/collectives.json`. Run it from the root of the repository; only the standard library is needed
(and `mpicc` for the case `mpi2`). Exits with 0 if everything was measured, whether or not a bar was met, with 1 if
something could not be run, and with 2 on a wrong argument.
"""
import argparse
import datetime
import json
import shlex
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from common import ROOT, Record, RunFailed, commit, machine, run, shown

PEERS = ROOT / "bench" / "peer"
RUN_SECONDS = 300
KB, MB = 1_000, 1_000_000


@dataclass(frozen=True)
class Duel:
    """Ours against a peer. `bars` has the required ratio of times (theirs / ours) for each size in bytes."""

    name: str
    peer: str  # gloo or mpi
    ranks: int
    flags: str
    bars: dict[int, float]


DUELS = (
    Duel("shm2", "gloo", 2, "--transport shm", {MB: 10, 10 * MB: 10, 100 * MB: 6, 256 * MB: 6}),
    Duel("shm4", "gloo", 4, "--transport shm", {MB: 5, 10 * MB: 2.5, 100 * MB: 2.5}),
    Duel("mpi2", "mpi", 2, "--transport shm", {MB: 1.4, 10 * MB: 1.4, 100 * MB: 1.4}),
    Duel("private2", "gloo", 2, "--transport shm --private", {MB: 4, 10 * MB: 4, 100 * MB: 4}),
    Duel("tcp2", "gloo", 2, "--transport tcp", {MB: 1.5, 10 * MB: 1.5, 100 * MB: 1.2}),
    # At 100 MB: at most 1.1 times the peer's time.
    Duel("tcp4", "gloo", 4, "--transport tcp", {MB: 1.2, 10 * MB: 1.2, 100 * MB: 1 / 1.1}),
)
MAX_LATENCY_US = 3.0
MAX_PARTS = 1.15
MAX_LINK_ERROR = 0.05
MAX_BESIDE = 0.01
LINKS = ("1gbe", "10gbit,50us", "1gbit,1ms")
ALONE = ("latency", "parts", "link", "beside")
NAMES = tuple(duel.name for duel in DUELS) + ALONE


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare collectives with their peers, interleaved.")
    parser.add_argument("--paceline", type=Path, default=Path("target/release/paceline"), metavar="PATH")
    parser.add_argument("--peer-python", type=Path, default=Path(".peer/bin/python"), metavar="PATH")
    parser.add_argument("--cases", nargs="+", choices=NAMES, default=NAMES, help="(default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side (default: 5)")
    parser.add_argument("--iterations", type=int, default=20, help="timed calls of each run (default: 20)")
    parser.add_argument("--out", type=Path, default=Path("results/collectives.json"), metavar="FILE")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.iterations < 1:
        parser.error("--rounds and --iterations must be at least 1")
    if not arguments.paceline.is_file():
        parser.error(f"--paceline {arguments.paceline}: no such file; `cargo build --release` makes it")
    needs_python = any(duel.peer == "gloo" and duel.name in arguments.cases for duel in DUELS)
    if needs_python and not arguments.peer_python.is_file():
        parser.error(f"--peer-python {arguments.peer_python}: no such file; bench/README.md says how to set it up")
    return arguments


class Bench:
    """`paceline bench` and the peers, each as one command that gives milliseconds by size."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.paceline = arguments.paceline.absolute()
        self.python = arguments.peer_python.absolute()
        self.iterations = arguments.iterations
        self.folder = folder
        self.commands: list[str] = []

    def say(self, command: list[str | Path]) -> None:
        text = shlex.join(shown(Path(part)) if isinstance(part, Path) else part for part in command)
        if text not in self.commands:
            self.commands.append(text)

    def rows(self, op: str, ranks: int, sizes: list[int], flags: str, iterations: int | None = None) -> list[Record]:
        """The rows of one run, in order of size."""
        report = self.folder / "rows.json"
        megabytes = ",".join(f"{size / MB:g}" for size in sizes)
        command: list[str | Path] = [
            self.paceline,
            *shlex.split(f"bench {op} --nproc {ranks} --size-mb {megabytes} -w 5 --iters {iterations or self.iterations}"),
            *shlex.split(flags),
        ]
        if ranks <= machine()["cores"]:
            command.append("--pin-cores")
        self.say(command)
        run([*command, "-J", report], self.folder, RUN_SECONDS)
        rows = json.loads(report.read_text())["results"]
        if len(rows) != len(sizes):
            raise RunFailed(f"{shlex.join(map(str, command))} gave {len(rows)} rows for {len(sizes)} sizes")
        return sorted(rows, key=lambda row: row["size"])

    def ours(self, duel: Duel) -> dict[int, float]:
        rows = self.rows("all_reduce", duel.ranks, list(duel.bars), duel.flags)
        return {row["size"]: row["in_place"]["time"] / 1e3 for row in rows}

    def theirs(self, duel: Duel) -> dict[int, float]:
        sizes = ",".join(map(str, duel.bars))
        options = shlex.split(f"--sizes {sizes} --warmup 5 --iterations {self.iterations}")
        if duel.peer == "gloo":
            command: list[str | Path] = [self.python, PEERS / "all_reduce.py", "--ranks", str(duel.ranks), *options]
        else:
            program = self.folder / "mpi_all_reduce"
            if not program.exists():
                run(["mpicc", "-O2", PEERS / "mpi_all_reduce.c", "-o", program], self.folder, RUN_SECONDS)
            launcher = f"mpirun --allow-run-as-root --oversubscribe --bind-to core -n {duel.ranks}"
            command = [*shlex.split(launcher), program, *options]
        self.say(command)
        lines = [json.loads(line) for line in run(command, self.folder, RUN_SECONDS).splitlines() if line[:1] == "{"]
        return {line["bytes"]: line["ms"] for line in lines}


def duel(bench: Bench, case: Duel, rounds: int) -> list[Record]:
    samples = []
    for _ in range(rounds):
        samples.append((bench.ours(case), bench.theirs(case)))
    results = []
    for size, bar in case.bars.items():
        ours, theirs = [one[size] for one, _ in samples], [other[size] for _, other in samples]
        ratios = [their / our for our, their in zip(ours, theirs)]
        ratio = statistics.median(ratios)
        results.append({
            "case": case.name, "peer": case.peer, "ranks": case.ranks, "bytes": size,
            "ours_ms": ours, "theirs_ms": theirs, "ratios": ratios, "ratio": ratio, "bar": bar, "met": ratio >= bar,
            "text": f"{statistics.median(ours):.3f} ms against {statistics.median(theirs):.3f} ms: "
                    f"{ratio:.2f}x ({min(ratios):.2f}-{max(ratios):.2f}), bar {bar:.3g}x",
        })
    return results


def latency(bench: Bench, rounds: int) -> list[Record]:
    times = [bench.rows("all_reduce", 2, [4096], "--transport shm", 1000)[0]["in_place"]["time"] for _ in range(rounds)]
    time = statistics.median(times)
    return [{
        "case": "latency", "ranks": 2, "bytes": 4096, "ours_us": times, "bar": MAX_LATENCY_US, "met": time <= MAX_LATENCY_US,
        "text": f"{time:.2f} us ({min(times):.2f}-{max(times):.2f}), bar {MAX_LATENCY_US:g} us",
    }]


def parts(bench: Bench, rounds: int) -> list[Record]:
    sizes = [MB, 10 * MB, 100 * MB]
    samples = []
    for _ in range(rounds):
        times = [bench.rows(op, 2, sizes, "--transport shm") for op in ("all_reduce", "reduce_scatter", "all_gather")]
        samples.append([[row["in_place"]["time"] for row in rows] for rows in times])
    results = []
    for index, size in enumerate(sizes):
        ratios = [(scatter[index] + gather[index]) / whole[index] for whole, scatter, gather in samples]
        ratio = statistics.median(ratios)
        results.append({
            "case": "parts", "ranks": 2, "bytes": size, "samples_us": [[part[index] for part in one] for one in samples],
            "ratios": ratios, "ratio": ratio, "bar": MAX_PARTS, "met": ratio <= MAX_PARTS,
            "text": f"reduce-scatter + all-gather take {ratio:.2f}x of one all-reduce "
                    f"({min(ratios):.2f}-{max(ratios):.2f}), bar {MAX_PARTS:g}x",
        })
    return results


def link(bench: Bench, _rounds: int) -> list[Record]:
    results = []
    for name in LINKS:
        for transport in ("shm", "tcp"):
            flags = f"--transport {transport} --link {name}"
            for row in bench.rows("all_reduce", 2, [MB, 10 * MB], flags, 10):
                error = row["in_place"]["time"] / row["predicted_us"] - 1
                results.append({
                    "case": "link", "link": name, "transport": transport, "bytes": row["size"],
                    "measured_us": row["in_place"]["time"], "formula_us": row["predicted_us"],
                    "bar": MAX_LINK_ERROR, "met": abs(error) <= MAX_LINK_ERROR or row["predicted_us"] < 1000,
                    "text": f"{name} over {transport}: {row['in_place']['time'] / 1e3:.3f} ms, formula "
                            f"{row['predicted_us'] / 1e3:.3f} ms ({error:+.2%})",
                })
    return results


def beside(bench: Bench, _rounds: int) -> list[Record]:
    example = bench.paceline.parent / "examples" / "beside"
    command: list[str | Path] = [bench.paceline, "launch", "-n", "2", "--", example]
    bench.say(command)
    sample = json.loads(run(command, bench.folder, RUN_SECONDS))
    return [{
        "case": "beside", "bytes": 4096, "sample": sample, "bar": MAX_BESIDE, "met": sample["cost"] <= MAX_BESIDE,
        "text": f"compute beside an emulated operation takes {sample['cost']:+.2%}, bar {MAX_BESIDE:.0%}",
    }]


def main() -> int:
    arguments = parse_arguments()
    results: list[Record] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="collectives_") as folder:
        bench = Bench(arguments, Path(folder))
        cases = {case.name: (lambda rounds, case=case: duel(bench, case, rounds)) for case in DUELS}
        alone = {"latency": latency, "parts": parts, "link": link, "beside": beside}
        cases |= {name: (lambda rounds, measure=measure: measure(bench, rounds)) for name, measure in alone.items()}
        for name in arguments.cases:
            try:
                for result in cases[name](arguments.rounds):
                    size = f"{result['bytes'] / MB:g} MB" if result["bytes"] >= MB else f"{result['bytes']} B"
                    print(f"{name:9} {size:>7}  {'met   ' if result['met'] else 'MISSED'}  {result['text']}", flush=True)
                    results.append(result)
            except (RunFailed, OSError, ValueError, KeyError) as error:
                failures.append(f"{name}: {error}")
                print(f"{name:9} could not be run: {error}", file=sys.stderr, flush=True)
        record = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "commit": commit(),
            "machine": machine(),
            "rounds": arguments.rounds,
            "iterations": arguments.iterations,
            "commands": bench.commands,
            "duels": [asdict(case) for case in DUELS if case.name in arguments.cases],
            "results": results,
            "failures": failures,
        }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"raw records: {arguments.out}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
