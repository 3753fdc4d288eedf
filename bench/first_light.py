"""Compares Paceline and PyTorch, side by side: the data-parallel training step of three models.

    cargo build --release
    python3 bench/first_light.py                # needs the peer: see bench/README.md

For each model both sides train in turn (ours, theirs, ours, theirs) with 2 ranks of 1 thread, each pinned
to its own core. Every round gives one ratio of throughput and one of memory, and the median of the ratios
is compared with a bar, the goal for this ratio. Ratios are used because a time alone says more about the
machine than about the program. A short run of the peer before the first round determines how many steps
take `--seconds`.

Prints one table and writes the raw records of all runs with date, machine, versions and commands to
`results/first_light.json`. Run it from the root of the repository; only the standard library is needed.

Exits with 0 if everything was measured, whether or not a bar was met, with 1 if something could not be run
or the two sides did not train the same model, and with 2 on a wrong argument.
"""
import argparse
import datetime
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common import ROOT, Record, RunFailed, aligned, commit, machine, run, shown

RANKS = 2
PEER_SCRIPT = Path(__file__).resolve().with_name("peer") / "step.py"
START_SECONDS = 300  # how long a run may take in addition to the timed steps
MIN_STEPS = 5
MIB = 1 << 20


@dataclass(frozen=True)
class Workload:
    name: str  # the peer's name for it
    flags: str  # our flags for it
    description: str
    batch_size: int  # per rank
    warmup_steps: int
    min_speedup: float  # bar: our samples per second over PyTorch's
    max_memory: float  # bar: our resident bytes over PyTorch's


WORKLOADS = (
    Workload(
        "cnn", "--model cnn", "3 convolutions of 32, 64, 128 channels on 28 x 28, hidden 512", 64, 10, 1.75, 0.333
    ),
    Workload(
        "cnn32",
        "--model cnn --channels 16 32 --hidden 64 --image 32 32 3",
        "2 convolutions of 16, 32 channels on 32 x 32 x 3, hidden 64",
        64, 10, 1.75, 0.333,
    ),
    Workload("mlp", "--model mlp", "4096, 3 hidden layers of 4096, output 2048", 256, 3, 1.5, 0.70),
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare a training step of paceline with PyTorch's, interleaved.")
    parser.add_argument("--paceline", type=Path, default=Path("target/release/paceline"), metavar="PATH")
    parser.add_argument("--peer-python", type=Path, default=Path(".peer/bin/python"), metavar="PATH")
    models = [workload.name for workload in WORKLOADS]
    parser.add_argument("--models", nargs="+", choices=models, default=models, help="(default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side (default: 5)")
    parser.add_argument("--seconds", type=float, default=10, help="timed seconds of each run (default: 10)")
    parser.add_argument("--out", type=Path, default=Path("results/first_light.json"), metavar="FILE")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    if arguments.seconds <= 0:
        parser.error("--seconds must be positive")
    if not arguments.paceline.is_file():
        parser.error(f"--paceline {arguments.paceline}: no such file; `cargo build --release` makes it")
    if not arguments.peer_python.is_file():
        parser.error(f"--peer-python {arguments.peer_python}: no such file; bench/README.md says how to set it up")
    return arguments


class Paceline:
    def __init__(self, binary: Path) -> None:
        self.binary = Path(os.path.abspath(binary))

    def version(self) -> str:
        return run([self.binary, "--version"], ROOT, timeout_s=30).strip()

    def arguments(self, workload: Workload, steps: int) -> list[str]:
        # Warm-up steps are part of an epoch; an epoch of the synthetic images has at most 64 steps.
        epochs = -(-(steps + workload.warmup_steps) // 64)
        steps_per_epoch = -(-(steps + workload.warmup_steps) // epochs)
        return shlex.split(
            f"train {workload.flags} --nproc {RANKS} --threads 1 --pin-cores --lr 0.01"
            f" --batch-size {workload.batch_size} --epochs {epochs} --steps-per-epoch {steps_per_epoch}"
            f" --warmup-steps {workload.warmup_steps} --quiet --json step.json"
        )

    def command_line(self, workload: Workload, steps: int) -> str:
        return shlex.join([shown(self.binary), *self.arguments(workload, steps)])

    def measure(self, workload: Workload, steps: int, seconds: float) -> Record:
        # A run writes its run folder into the current folder, which is temporary here.
        with tempfile.TemporaryDirectory(prefix="first_light_") as folder:
            command = [self.binary, *self.arguments(workload, steps)]
            run(command, Path(folder), START_SECONDS + 10 * seconds)
            try:
                record = json.loads(Path(folder, "step.json").read_text())
            except (OSError, ValueError) as error:
                raise RunFailed(f"{shown(self.binary)} wrote no usable JSON: {error}") from None
        # PyTorch's timer is stopped while data are made. Earlier versions of paceline had other names for this figure.
        record["samples_per_s"] = record.get("samples_per_s_without_data", record.get("samples_per_s"))
        record["loss"] = record.get("train_loss", record.get("loss"))
        return checked(record, "step_ms_median", self.binary)


class Peer:
    def __init__(self, python: Path) -> None:
        self.python = Path(os.path.abspath(python))  # not resolved: a virtual environment is recognized by the link

    def version(self) -> str:
        program = "import sys, torch; print('Python', sys.version.split()[0] + ', PyTorch', torch.__version__)"
        return run([self.python, "-c", program], ROOT, timeout_s=120).strip()

    def arguments(self, workload: Workload, seconds: float) -> list[str]:
        return shlex.split(
            f"--model {workload.name} --ranks {RANKS} --batch-size {workload.batch_size}"
            f" --warmup-steps {workload.warmup_steps} --seconds {seconds:g}"
        )

    def command_line(self, workload: Workload, seconds: float) -> str:
        return shlex.join([shown(self.python), shown(PEER_SCRIPT), *self.arguments(workload, seconds)])

    def measure(self, workload: Workload, seconds: float, failures: list[str]) -> Record:
        """One run, repeated once if it fails; `failures` records that."""
        try:
            return self.measure_once(workload, seconds)
        except RunFailed as error:
            failures.append(str(error))
            print(f"  PyTorch failed and is run once more: {error}", file=sys.stderr)
            return self.measure_once(workload, seconds)

    def measure_once(self, workload: Workload, seconds: float) -> Record:
        command = [self.python, PEER_SCRIPT, *self.arguments(workload, seconds)]
        output = run(command, ROOT, START_SECONDS + 10 * seconds)
        try:
            record = json.loads(output.strip().splitlines()[-1])
        except (IndexError, ValueError) as error:
            raise RunFailed(f"{shown(PEER_SCRIPT)} printed no usable JSON: {error}") from None
        return checked(record, "step_ms", PEER_SCRIPT)


def checked(record: Record, step_key: str, source: Path) -> Record:
    wanted = [step_key, "step_ms_p99", "samples_per_s", "resident_bytes", "loss", "params", "steps"]
    if missing := [key for key in wanted if key not in record]:
        raise RunFailed(f"the JSON of {shown(source)} lacks {', '.join(missing)}")
    return record


def compare(workload: Workload, paceline: Paceline, peer: Peer, rounds: int, seconds: float) -> Record:
    """All rounds of one model: raw records, ratios, medians, and whether the bars are met."""
    failures: list[str] = []
    print(f"{workload.name}: calibrating", file=sys.stderr)
    calibration = peer.measure(workload, min(seconds, 2), failures)
    steps = max(MIN_STEPS, round(seconds * 1e3 / calibration["step_ms"]))

    ours: list[Record] = []
    theirs: list[Record] = []
    for number in range(1, rounds + 1):
        ours.append(paceline.measure(workload, steps, seconds))
        theirs.append(peer.measure(workload, seconds, failures))
        if ours[-1]["params"] != theirs[-1]["params"]:
            raise RunFailed(
                f"{workload.name}: not the same model, paceline has {ours[-1]['params']} parameters"
                f" and PyTorch has {theirs[-1]['params']}"
            )
        speeds = [record["samples_per_s"] for record in (ours[-1], theirs[-1])]
        print(
            f"{workload.name}: round {number} of {rounds}: {speeds[0]:.0f} and {speeds[1]:.0f} samples/s",
            file=sys.stderr,
        )

    speed = ratios_of("samples_per_s", ours, theirs)
    memory = ratios_of("resident_bytes", ours, theirs)
    speed |= {"bar": workload.min_speedup, "met": speed["ratio_median"] >= workload.min_speedup}
    memory |= {"bar": workload.max_memory, "met": memory["ratio_median"] <= workload.max_memory}
    return {
        "workload": asdict(workload),
        "params": ours[0]["params"],
        "commands": {
            "ours": paceline.command_line(workload, steps),
            "theirs": peer.command_line(workload, seconds),
        },
        "speed": speed,
        "memory": memory,
        "peer_failures": failures,
        "calibration": calibration,
        "rounds": [{"ours": our, "theirs": their} for our, their in zip(ours, theirs)],
    }


def ratios_of(key: str, ours: list[Record], theirs: list[Record]) -> Record:
    ratios = [our[key] / their[key] for our, their in zip(ours, theirs)]
    return {
        "key": key,
        "ours_median": statistics.median(record[key] for record in ours),
        "theirs_median": statistics.median(record[key] for record in theirs),
        "ratios": ratios,
        "ratio_median": statistics.median(ratios),
    }


def table(models: Sequence[Record]) -> str:
    header = ("model", "measure", "paceline", "PyTorch", "ratio [min-max]", "bar", "")
    rows = [header]
    for result in models:
        for name, key, unit, sign in (("samples/s", "speed", 1, ">="), ("PSS, MiB per rank", "memory", MIB, "<=")):
            measure = result[key]
            ratios = measure["ratios"]
            rows.append((
                result["workload"]["name"],
                name,
                f"{measure['ours_median'] / unit:.1f}",
                f"{measure['theirs_median'] / unit:.1f}",
                f"{measure['ratio_median']:.3f} [{min(ratios):.3f}-{max(ratios):.3f}]",
                f"{sign} {measure['bar']:g}",
                "MET" if measure["met"] else "MISSED",
            ))
    return aligned(rows, left={0, 1, 6})


def main() -> int:
    arguments = parse_arguments()
    paceline, peer = Paceline(arguments.paceline), Peer(arguments.peer_python)
    machine_now = machine()
    if machine_now["cores"] < RANKS:
        print(f"warning: {machine_now['cores']} core for {RANKS} ranks, so neither side is pinned", file=sys.stderr)
    try:
        report = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine_now,
            "versions": {"paceline": paceline.version(), "commit": commit(), "peer": peer.version()},
            "ranks": RANKS,
            "threads_per_rank": 1,
            "seconds": arguments.seconds,
            "models": [
                compare(workload, paceline, peer, arguments.rounds, arguments.seconds)
                for workload in WORKLOADS
                if workload.name in arguments.models
            ],
        }
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    print(table(report["models"]))
    print(f"\nraw records: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
