"""Measures what communication costs a step: overlapped with the backward pass, on shared memory, and as predicted. No peer takes part.

    cargo build --release
    python3 bench/overlap.py                    # all parts: about half an hour, most of it the MLP's
    python3 bench/overlap.py --parts overlap sync

`overlap`: the CNN on an emulated link on which communication takes 60 % of the step without communication. It
trains in turn without communication, with `simple_ddp`, with `ddp`, and with `ddp` with the buckets that its own
advice names, if it names any. No implementation can be faster than T_ideal: the step without communication, plus
what is left of the link's queue after the backward pass if every bucket starts as soon as its gradients are final and takes two
latencies plus its bytes over the bandwidth. Both come from the run without communication of the same round. If this run is no faster
than `simple_ddp`, the round was disturbed, and is left out. The hidden part is (T_simple - T_ddp) / (T_simple - T_ideal). The residual is
the part of a step that its anatomy does not account for, in the worst run of a round. The first row says whether communication was near 60 % in
the rounds too; if it was not, the speed of the machine has changed, and the other rows do not answer the question.

`sync`: what `ddp` adds to a step on shared memory, from alternating blocks of steps in one run. A value far below zero is
suspicious too, because synchronization cannot make a step much faster.

`predict`: the step time that `paceline predict` predicts, divided by the step time that it measures, on links on which communication takes
much less time than the backward pass, about the same time, and much more.

There are 2 ranks of 1 thread, each pinned to its own core (if 4 ranks are stated, they take turns). Two cores must be free of other work: ranks that
wait for each other leave their cores to other work now and then, ranks that never wait do not, so it slows down a run without communication more.

Prints one table and writes all values with date, machine and commit to `results/overlap.json`. Exits with 1 if something could not be run.
"""
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common import RUN_SECONDS, Record, RunFailed, aligned, arguments_for, parsed, provenance, ranged, run, train, write

ELEMENT_BYTES = 4  # gradients are f32
STEPS_PER_EPOCH = 64  # 8192 synthetic images for 2 ranks with batches of 64
LATENCY_US = 50
SHARE = 0.60  # communication, as a part of the step without communication
CNN = "--model cnn --nproc 2 --threads 1 --pin-cores --batch-size 64 --lr 0.01 --warmup-steps 10"
# Of a study: the model, the ranks, steps of a run, and the links.
STUDIES = [
    ("cnn", "2 --pin-cores", 100, "25gbit,50us 1.5gbit,50us 0.5gbit,50us"),
    ("mlp", "2 --pin-cores", 20, "25gbit,50us 4gbit,50us 2gbit,50us"),
    ("cnn", "4", 100, "25gbit,50us 1.5gbit,50us 0.5gbit,50us"),
]
Values = dict[tuple[str, str], list[float]]
"""The values of a measure, one of each round, by case and measure."""


class Link(NamedTuple):
    """An emulated link. `gbit` is rounded, so that the command and the formula use the same link."""

    gbit: float

    @classmethod
    def that_takes(cls, ms: float, num_bytes: int) -> "Link":
        seconds_of_bytes = (ms * 1e3 - 2 * LATENCY_US) / 1e6
        if seconds_of_bytes <= 0:
            raise RunFailed(f"no link takes {ms:.3f} ms: its latency alone is longer")
        return cls(float(f"{num_bytes * 8 / seconds_of_bytes / 1e9:.4g}"))

    def all_reduce_ms(self, num_bytes: int) -> float:
        """Between 2 ranks, each half is sent once in each direction: two latencies, and all bytes once."""
        return 2 * LATENCY_US / 1e3 + num_bytes * 8 / (self.gbit * 1e6)

    def __str__(self) -> str:
        return f"{self.gbit:g}gbit,{LATENCY_US}us"


def ideal_ms(alone: Record, buckets: Sequence[Record], link: Link) -> float:
    """The step of a run without communication, plus the part of its gradients' queue that is left after backward."""
    anatomy = alone["anatomy"]
    ready_ms: dict[str, float] = {}  # by unit: when the last of its gradients is final
    for line in anatomy["ready"]:
        unit = line["param"].rsplit(".", 1)[0]
        ready_ms[unit] = max(ready_ms.get(unit, 0), line["ready_ms"])
    done_ms = 0.0
    for bucket in buckets:
        bucket_ready_ms = max(ready_ms[unit] for unit in bucket["units"])
        done_ms = max(done_ms, bucket_ready_ms) + link.all_reduce_ms(bucket["bytes"])
    return alone["step_ms_median"] + max(0.0, done_ms - anatomy["backward_end_ms"])


def overlap(paceline: Path, flags: str, rounds: int) -> Values:
    alone = train(paceline, f"{flags} --strategy no_sync")
    num_bytes = alone["params"] * ELEMENT_BYTES
    link = Link.that_takes(SHARE * alone["step_ms_median"], num_bytes)
    ddp = f"--strategy ddp --link {link}"
    advice = train(paceline, f"{flags} {ddp}")["advice"] or ""
    kinds = {"ddp, default buckets": ddp}
    if advised := re.search(r"--bucket-cap-mb ([0-9.]+) --first-bucket-mb ([0-9.]+)", advice):
        kinds["ddp, {} MB, first {}".format(*advised.groups())] = f"{ddp} {advised.group()}"
    found: Values = {}
    for _ in range(rounds):
        alone = train(paceline, f"{flags} --strategy no_sync")
        simple = train(paceline, f"{flags} --strategy simple_ddp --link {link}")
        runs = {kind: train(paceline, f"{flags} {how}") for kind, how in kinds.items()}
        simple_ms = simple["step_ms_median"]
        ideal = {kind: ideal_ms(alone, one["anatomy"]["buckets"], link) for kind, one in runs.items()}
        if simple_ms <= max(ideal.values()):
            # Something else slowed down the run without communication, so there is no ideal to compare with.
            print("overlap: simple_ddp was faster than the ideal: the round was disturbed, and is left out", file=sys.stderr)
            continue
        shares = link.all_reduce_ms(num_bytes) / alone["step_ms_median"]
        found.setdefault((f"link {link}", "its time over the step without"), []).append(shares)
        for kind, one in runs.items():
            ddp_ms = one["step_ms_median"]
            found.setdefault((kind, "hidden part of what can be"), []).append((simple_ms - ddp_ms) / (simple_ms - ideal[kind]))
            found.setdefault((kind, "times faster than simple_ddp"), []).append(simple_ms / ddp_ms)
        residual = max(one["rest_ms"] / one["wall_ms"] for one in (alone, simple, *runs.values()))
        found.setdefault(("all runs", "largest residual of the anatomy"), []).append(residual)
    return found


def sync(paceline: Path, flags: str, rounds: int) -> Values:
    blocks = f"{flags} --strategy ddp --sync-blocks 10"
    return {("ddp on shm", "added to a step, %"): [train(paceline, blocks)["sync_cost"]["added_pct"] for _ in range(rounds)]}


def predict(paceline: Path, _flags: str, rounds: int) -> Values:
    found: Values = {}
    for _ in range(rounds):
        for model, ranks, steps, links in STUDIES:
            # `predict` makes one round; this script repeats it, so that each prediction has its own measurement.
            command = f"predict --measure --model {model} --nproc {ranks} --links {links} --rounds 1 --steps-per-epoch {steps} --json out.json"
            with tempfile.TemporaryDirectory(prefix="overlap_") as folder:
                run([paceline, *command.split()], Path(folder), RUN_SECONDS)
                rows = json.loads(Path(folder, "out.json").read_text())["rows"]
            for link, row in zip(links.split(), rows):
                found.setdefault((f"{model}, {ranks.split()[0]} ranks, {link}", "predicted over measured step"), []).append(row["ratio"])
    return found


PARTS = {"overlap": overlap, "sync": sync, "predict": predict}


def main() -> int:
    parser = arguments_for(__doc__, "overlap.json")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: all)")
    parser.add_argument("--steps", type=int, default=256, help="steps of a training run (default: 256)")
    arguments = parsed(parser)
    epochs = -(-arguments.steps // STEPS_PER_EPOCH)
    flags = f"{CNN} --epochs {epochs} --steps-per-epoch {-(-arguments.steps // epochs)}"
    rows, results = [("part", "case", "measure", "median [min-max]")], []
    try:
        for part in arguments.parts:
            for (case, measure), values in PARTS[part](arguments.paceline, flags, arguments.rounds).items():
                rows.append((part, case, measure, ranged(values, 4)))
                results.append({"part": part, "case": case, "measure": measure, "values": values})
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(aligned(rows, left={0, 1, 2}))
    write(arguments.out, provenance() | {"flags": flags, "studies": STUDIES, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
