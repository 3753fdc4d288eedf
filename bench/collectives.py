"""Compares our all-reduce with PyTorch's over Gloo and with an MPI library's, side by side.

    cargo build --release
    python3 bench/collectives.py --peer-python .peer/bin/python      # all cases: about five minutes
    python3 bench/collectives.py --cases tcp2

Each side measures an all-reduce in place with one thread per rank, pinned if there are enough cores. There is a barrier before each of
`--iterations` calls. The result is the median of the slowest rank's times (Gloo and MPI: the slowest rank's median). Rounds alternate: ours, theirs,
ours, theirs. Each round gives one ratio. In the case `private2` our side uses ordinary memory too.

The case `mpi2` needs `mpicc`. Exits with 1 if something could not be run.
"""
import json
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

from common import ROOT, RUN_SECONDS, Record, aligned, arguments_for, each, machine, parsed, provenance, ranged, run, write

PEERS = ROOT / "bench" / "peer"
MB = 1_000_000
MPIRUN = "mpirun --allow-run-as-root --oversubscribe --bind-to core"


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


def ours(arguments: Namespace, duel: Duel, folder: Path) -> list[float]:
    """Milliseconds by size."""
    megabytes = ",".join(f"{size / MB:g}" for size in duel.sizes)
    pinned = "--pin-cores" if duel.ranks <= machine()["cores"] else ""
    words = f"bench all_reduce --nproc {duel.ranks} --size-mb {megabytes} -w 5 --iters {arguments.iterations} {duel.flags} {pinned} -J rows.json"
    run([arguments.paceline, *words.split()], folder, RUN_SECONDS)
    rows = json.loads((folder / "rows.json").read_text())["results"]
    return [row["in_place"]["time"] / 1e3 for row in sorted(rows, key=lambda row: row["size"])]


def theirs(arguments: Namespace, duel: Duel, folder: Path) -> list[float]:
    options = ["--sizes", ",".join(map(str, duel.sizes)), "--warmup", "5", "--iterations", str(arguments.iterations)]
    command: list[str | Path] = [arguments.peer_python, PEERS / "all_reduce.py", "--ranks", str(duel.ranks), *options]
    if duel.peer == "mpi":
        run(["mpicc", "-O2", PEERS / "mpi_all_reduce.c", "-o", folder / "mpi_all_reduce"], folder, RUN_SECONDS)
        command = [*MPIRUN.split(), "-n", str(duel.ranks), folder / "mpi_all_reduce", *options]
    lines = [json.loads(line) for line in run(command, folder, RUN_SECONDS).splitlines() if line[:1] == "{"]
    return [line["ms"] for line in sorted(lines, key=lambda line: line["bytes"])]


def results_of(arguments: Namespace, name: str, folder: Path) -> list[Record]:
    of = DUELS[name]
    samples = [(ours(arguments, of, folder), theirs(arguments, of, folder)) for _ in range(arguments.rounds)]
    by_size = zip(of.sizes, zip(*(ours for ours, _ in samples)), zip(*(theirs for _, theirs in samples)))
    return [{"case": name, "bytes": size, "ours_ms": ours, "theirs_ms": theirs} for size, ours, theirs in by_size]


def row(of: Record) -> list[str]:
    ratios = [theirs / ours for ours, theirs in zip(of["ours_ms"], of["theirs_ms"])]
    return [of["case"], f"{of['bytes'] / MB:g}", ranged(of["ours_ms"], 3), ranged(of["theirs_ms"], 3), ranged(ratios)]


def main() -> int:
    parser = arguments_for(__doc__, "collectives.json", has_peer=True)
    parser.add_argument("--cases", nargs="+", choices=DUELS, default=DUELS, help="(default: all)")
    parser.add_argument("--iterations", type=int, default=20, help="timed calls of each run (default: 20)")
    arguments = parsed(parser)
    with tempfile.TemporaryDirectory(prefix="collectives_") as folder:
        duels, failures = each(arguments.cases, lambda name: results_of(arguments, name, Path(folder)))
    results = [result for duel in duels for result in duel]
    print(aligned([["case", "MB", "paceline ms", "other ms", "times as fast"], *map(row, results)], left={0}), *failures, sep="\n")
    write(arguments.out, provenance() | {"results": results, "failures": failures})
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
