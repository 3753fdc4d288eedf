"""Measures what communication costs a step: overlapped with the backward pass, on shared memory, and as predicted.

    cargo build --release
    python3 bench/overlap.py                    # all parts: about half an hour, most of it the MLP's
    python3 bench/overlap.py --parts overlap sync

`overlap`: the CNN on an emulated link on which communication takes 60 % of the step without communication. It
trains in turn without communication, with `simple_ddp`, with `ddp`, and with `ddp` with the buckets that its own
advice names, if it names any. No implementation can be faster than T_ideal: the step without communication, plus
what is left of the link's queue after the backward pass if every bucket starts as soon as its gradients are final.
Both come from the run without communication of the same round. If this run is no faster than `simple_ddp`, the
round was disturbed; it is recorded separately and repeated. The hidden part is
(T_simple - T_ddp) / (T_simple - T_ideal).

`sync`: what `ddp` adds to a step on shared memory, from alternating blocks of steps in one run.

`predict`: on three links, the step time that `paceline predict` predicts, divided by the step time that it measures.

No peer takes part. There are 2 ranks of 1 thread, each pinned to its own core (if 4 ranks are stated, they run on
any core). Every round gives one value of each measure, and the median is compared with a bar, the range in which it
should lie.

Prints one table and writes the raw records of all runs with date, machine, versions and commands to
`results/overlap.json`. Run it from the root of the repository; only the standard library is needed.

Exits with 0 if everything was measured, whether or not a bar was met, with 1 if something could not be run, and
with 2 on a wrong argument.
"""
import argparse
import datetime
import json
import math
import os
import re
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, Record, RunFailed, aligned, commit, machine, run, shown

Measured = tuple[list[Record], Record]  # results to compare with bars, and the raw records

RANKS = 2
RUN_SECONDS = 900
ELEMENT_BYTES = 4  # gradients are f32
STEPS_PER_EPOCH = 64  # 8192 synthetic images for 2 ranks with batches of 64
LATENCY_US = 50
SHARE = 0.60  # communication, as a part of the step without communication
BLOCK_STEPS = 10
MAX_LOAD = 0.3  # load of the machine above which this script warns
TRAIN = f"train --model cnn --nproc {RANKS} --threads 1 --pin-cores --batch-size 64 --lr 0.01"


@dataclass(frozen=True)
class Bar:
    """The range in which a median should lie."""

    low: float = -math.inf
    high: float = math.inf

    def met(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        if self.high == math.inf:
            return f">= {self.low:g}"
        return f"<= {self.high:g}" if self.low == -math.inf else f"{self.low:g} to {self.high:g}"


HIDDEN = Bar(low=0.80)
FASTER = Bar(low=1.3)
NEAR_SHARE = Bar(low=SHARE - 0.05, high=SHARE + 0.05)
RESIDUAL = Bar(high=0.03)
ADDED_PCT = Bar(low=-3.0, high=3.0)  # a value far below zero is suspicious too


@dataclass(frozen=True)
class Study:
    """One `paceline predict`: links on which communication takes much less time than the backward pass, about the
    same time, and much more."""

    model: str
    ranks: int
    links: tuple[str, ...]
    steps: int
    bar: Bar


STUDIES = (
    Study("cnn", 2, ("25gbit,50us", "1.5gbit,50us", "0.5gbit,50us"), 100, Bar(0.90, 1.10)),
    Study("mlp", 2, ("25gbit,50us", "4gbit,50us", "2gbit,50us"), 20, Bar(0.90, 1.10)),
    # If there are more ranks than cores, the ranks take turns. A replay does not know this.
    Study("cnn", 4, ("25gbit,50us", "1.5gbit,50us", "0.5gbit,50us"), 100, Bar(0.80, 1.20)),
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what communication costs a step, and how well it is hidden.")
    parser.add_argument("--paceline", type=Path, default=Path("target/release/paceline"), metavar="PATH")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="(default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each part (default: 5)")
    parser.add_argument("--steps", type=int, default=256, help="steps of a training run (default: 256)")
    parser.add_argument("--out", type=Path, default=Path("results/overlap.json"), metavar="FILE")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    if arguments.steps < 4 * BLOCK_STEPS:
        parser.error(f"--steps must be at least {4 * BLOCK_STEPS}, two pairs of blocks")
    if not arguments.paceline.is_file():
        parser.error(f"--paceline {arguments.paceline}: no such file; `cargo build --release` makes it")
    if (cores := machine()["cores"]) < RANKS:
        parser.error(f"this needs {RANKS} cores to pin {RANKS} ranks to, and there is {cores}")
    return arguments


class Paceline:
    """The program, and every command that was run."""

    def __init__(self, binary: Path, steps: int) -> None:
        self.binary = Path(os.path.abspath(binary))
        self.epochs = -(-steps // STEPS_PER_EPOCH)
        self.steps_per_epoch = -(-steps // self.epochs)
        self.commands: list[str] = []

    def version(self) -> str:
        return run([self.binary, "--version"], ROOT, timeout_s=30).strip()

    def json(self, flags: str) -> Record:
        command = [self.binary, *shlex.split(flags), "--json", "run.json"]
        text = shlex.join([shown(self.binary), *map(str, command[1:])])
        if text not in self.commands:
            self.commands.append(text)
        # A run writes its run folder into the current folder, which is temporary here.
        with tempfile.TemporaryDirectory(prefix="overlap_") as folder:
            run(command, Path(folder), RUN_SECONDS)
            try:
                return json.loads(Path(folder, "run.json").read_text())
            except (OSError, ValueError) as error:
                raise RunFailed(f"{text} wrote no usable JSON: {error}") from None

    def train(self, flags: str) -> Record:
        epochs = f"--epochs {self.epochs} --steps-per-epoch {self.steps_per_epoch} --warmup-steps 10"
        return self.json(f"{TRAIN} {epochs} {flags} --quiet")


@dataclass(frozen=True)
class Link:
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


def overlap(paceline: Paceline, rounds: int) -> Measured:
    alone_runs = [paceline.train("--strategy no_sync") for _ in range(3)]
    alone_ms = statistics.median(one["step_ms_median"] for one in alone_runs)
    num_bytes = alone_runs[0]["params"] * ELEMENT_BYTES
    link = Link.that_takes(SHARE * alone_ms, num_bytes)
    link_ms = link.all_reduce_ms(num_bytes)
    say(f"overlap: {alone_ms:.2f} ms without communication; all gradients take {link_ms:.2f} ms on {link}")

    ddp = f"--strategy ddp --link {link}"
    advice = paceline.train(ddp)["advice"] or ""
    kinds = {"ddp, default buckets": ddp}
    if advised := re.search(r"--bucket-cap-mb ([0-9.]+) --first-bucket-mb ([0-9.]+)", advice):
        kinds["ddp, {} MB, first {}".format(*advised.groups())] = f"{ddp} {advised.group()}"
    say(f"overlap: the advice of ddp is: {advice or 'none'}")

    samples: list[Record] = []
    disturbed: list[Record] = []
    while len(samples) < rounds:
        alone = paceline.train("--strategy no_sync")
        simple = paceline.train(f"--strategy simple_ddp --link {link}")
        sample = {"no_sync": alone, "simple_ddp": simple}
        sample |= {kind: paceline.train(flags) for kind, flags in kinds.items()}
        say(f"overlap: round {len(samples) + 1} of {rounds}: " + ", ".join(
            f"{kind} {one['step_ms_median']:.2f} ms" for kind, one in sample.items()
        ))
        if all(times["simple"] > times["ideal"] for times in (times_of(sample, kind, link) for kind in kinds)):
            samples.append(sample)
            continue
        # Something else slowed down the run without communication, so there is no ideal to compare with.
        disturbed.append(sample)
        if len(disturbed) > rounds:
            raise RunFailed(f"{len(disturbed)} rounds were disturbed by something else that uses the cores")
        say("overlap: simple_ddp was faster than the ideal, so the round was disturbed, and is made again")

    # The bars hold for a link with this share. The first row says whether the machine's speed has changed since.
    shares = [link_ms / sample["no_sync"]["step_ms_median"] for sample in samples]
    results = [held(f"link {link}", "its time over the step without", shares, NEAR_SHARE)]
    times: dict[str, list[Record]] = {}
    for kind in kinds:
        times[kind] = [times_of(sample, kind, link) for sample in samples]
        hidden = [(one["simple"] - one["ddp"]) / (one["simple"] - one["ideal"]) for one in times[kind]]
        faster = [one["simple"] / one["ddp"] for one in times[kind]]
        results += [
            held(kind, "hidden part of what can be", hidden, HIDDEN),
            held(kind, "times faster than simple_ddp", faster, FASTER),
        ]
    residuals = [
        max(figure(one, "rest_ms") / figure(one, "wall_ms") for one in sample.values()) for sample in samples
    ]
    results.append(held("all runs", "largest residual of the anatomy", residuals, RESIDUAL))
    return results, {
        "link": str(link),
        "link_ms": link_ms,
        "advice": advice,
        "times_ms": times,
        "alone": [essence(one) for one in alone_runs],
        "rounds": [{kind: essence(one) for kind, one in sample.items()} for sample in samples],
        "disturbed": [{kind: essence(one) for kind, one in sample.items()} for sample in disturbed],
    }


def times_of(sample: Record, kind: str, link: Link) -> Record:
    """The steps of one round in milliseconds."""
    return {
        "simple": sample["simple_ddp"]["step_ms_median"],
        "ddp": sample[kind]["step_ms_median"],
        "ideal": ideal_ms(sample["no_sync"], sample[kind]["anatomy"]["buckets"], link),
    }


def figure(summary: Record, name: str) -> float:
    """A time of the step's anatomy. An earlier version of paceline had it in a different place."""
    return summary[name] if name in summary else summary["anatomy"][name]


def essence(summary: Record) -> Record:
    keys = ("strategy", "link", "steps", "step_ms_median", "step_ms_p99", "anatomy", "advice")
    loss = summary["train_loss"] if "train_loss" in summary else summary["loss"]
    times = {name: figure(summary, name) for name in ("rest_ms", "wall_ms")}
    return {key: summary[key] for key in keys} | times | {"train_loss": loss}


def sync(paceline: Paceline, rounds: int) -> Measured:
    costs = []
    for number in range(1, rounds + 1):
        costs.append(paceline.train(f"--strategy ddp --sync-blocks {BLOCK_STEPS}")["sync_cost"])
        say(f"sync: round {number} of {rounds}: {costs[-1]['added_pct']:+.2f} %")
    added = [cost["added_pct"] for cost in costs]
    return [held("ddp on shm", "added to a step, %", added, ADDED_PCT)], {"rounds": costs}


def predict(paceline: Paceline, rounds: int) -> Measured:
    samples: dict[Study, list[Record]] = {study: [] for study in STUDIES}
    for number in range(1, rounds + 1):
        for study in STUDIES:
            pinned = " --pin-cores" if study.ranks <= machine()["cores"] else ""
            # `predict` makes one round; this script repeats it, so that each prediction has its own measurement.
            record = paceline.json(
                f"predict --measure --model {study.model} --nproc {study.ranks} --links {' '.join(study.links)}"
                f" --rounds 1 --steps-per-epoch {study.steps}{pinned}"
            )
            if len(record["rows"]) != len(study.links):
                raise RunFailed(f"predict gave {len(record['rows'])} rows for {len(study.links)} links")
            samples[study].append(record)
            ratios = ", ".join(f"{row['ratio']:.3f}" for row in record["rows"])
            say(f"predict: round {number} of {rounds}: {study.model}, {study.ranks} ranks: {ratios}")
    results = []
    for study, records in samples.items():
        for at, link in enumerate(study.links):
            ratios = [record["rows"][at]["ratio"] for record in records]
            case = f"{study.model}, {study.ranks} ranks, {link}"
            results.append(held(case, "predicted over measured step", ratios, study.bar))
    raw = [{"model": study.model, "ranks": study.ranks, "rounds": records} for study, records in samples.items()]
    return results, {"studies": raw}


PARTS = {"overlap": overlap, "sync": sync, "predict": predict}


def held(case: str, measure: str, values: list[float], bar: Bar) -> Record:
    """The median of a measure, compared with its bar."""
    median = statistics.median(values)
    return {
        "case": case, "measure": measure, "values": values, "median": median, "bar": str(bar), "met": bar.met(median)
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(results: Sequence[Record]) -> str:
    rows = [("part", "case", "measure", "median [min-max]", "bar", "")]
    for result in results:
        values = result["values"]
        rows.append((
            result["part"],
            result["case"],
            result["measure"],
            f"{result['median']:.4g} [{min(values):.4g}-{max(values):.4g}]",
            result["bar"],
            "MET" if result["met"] else "MISSED",
        ))
    return aligned(rows, left={0, 1, 2, 5})


def main() -> int:
    arguments = parse_arguments()
    paceline = Paceline(arguments.paceline, arguments.steps)
    # Ranks that wait for each other leave their cores to other work now and then, ranks that never wait do not. So
    # other work slows down a run without communication more than a run with it, and every comparison is wrong.
    if (load := os.getloadavg()[0]) > MAX_LOAD:
        say(f"warning: a load of {load:.2f} on this machine: what is measured beside other work means little")
    results: list[Record] = []
    raw: Record = {}
    failures: list[str] = []
    for part in arguments.parts:
        try:
            part_results, raw[part] = PARTS[part](paceline, arguments.rounds)
            results += [{"part": part} | result for result in part_results]
        except (RunFailed, KeyError, TypeError) as error:
            failures.append(f"{part}: {error!r}")
            say(f"error: {part} could not be measured: {error}")
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine() | {"load_before": load},
        "versions": {"paceline": paceline.version(), "commit": commit()},
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "commands": paceline.commands,
        "results": results,
        "failures": failures,
        "raw": raw,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(results))
    print(f"\nraw records: {arguments.out}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
