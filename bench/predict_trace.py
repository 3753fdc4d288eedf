"""Measures how well `paceline predict --trace` predicts steps on links that the traced run did not have.

    cargo build --release
    python3 bench/predict_trace.py             # about 10 minutes
    python3 bench/predict_trace.py --rounds 1 --steps 24 --active 6 --links 25gbit,50us     # only tries it

Two ranks train with `ddp` on shared memory, without a link, and trace some of their steps. From these traces alone,
the step is predicted on four emulated links: with 2 ranks, and with 4 ranks on the same 2 cores, where each rank has
half of a core (`--compute-scale 2`). Then the same runs are made on these links. A value is the predicted step divided
by the measured one, the median over the steps of each. In every round all runs are made again, so each prediction is
compared with a measurement of about the same time; the median over the rounds is compared with a bar.

With 2 ranks, each is pinned to its own core. Prints a table and writes the raw records with date, machine, versions
and commands to `results/predict_trace.json`. Only the standard library is needed.

Exits with 0 if everything was measured, whether or not a bar was met, with 1 if something could not be run, and with 2
on a wrong argument.
"""
import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, Record, RunFailed, aligned, machine, program, provenance, run, shown

TRACED_RANKS = 2
RUN_SECONDS = 900
WARMUP_STEPS = 10
# From a link whose communication hides behind the backward pass to one on which a tenth of the step is waited for.
LINKS = ("25gbit,50us", "5gbit,50us", "1.5gbit,50us", "0.5gbit,50us")


@dataclass(frozen=True)
class Study:
    """A number of ranks, the factor of their computing times beside the traced ones, and how near the median ratio has
    to be to 1."""

    ranks: int
    scale: float
    bar: float


STUDIES = (Study(2, 1, 0.05), Study(4, 2, 0.15))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how well `paceline predict --trace` predicts.")
    parser.add_argument("--paceline", type=Path, default=Path("target/release/paceline"), metavar="PATH")
    parser.add_argument("--model", default="cnn", help="the model (default: cnn)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    parser.add_argument("--steps", type=int, default=110, help="steps of a run (default: 110)")
    parser.add_argument("--active", type=int, default=60, help="steps that are traced (default: 60)")
    parser.add_argument("--links", nargs="+", default=list(LINKS), metavar="LINK")
    parser.add_argument("--out", type=Path, default=Path("results/predict_trace.json"), metavar="FILE")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    if not 2 <= arguments.active <= arguments.steps - WARMUP_STEPS:
        parser.error(f"--active must be at least 2, and at most --steps less {WARMUP_STEPS} of warm-up")
    arguments.paceline = program(parser, "--paceline", arguments.paceline)
    if (cores := machine()["cores"]) < TRACED_RANKS:
        parser.error(f"this needs {TRACED_RANKS} cores for {TRACED_RANKS} ranks, and there is {cores}")
    return arguments


class Paceline:
    """The program, the flags of its runs, and every command that was run."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.binary = arguments.paceline
        self.train = (
            f"train --model {arguments.model} --strategy ddp --threads 1"
            f" --steps {arguments.steps} --warmup-steps {WARMUP_STEPS} --quiet"
        )
        self.profile = (
            f"--profile --profile-wait 0 --profile-warmup {WARMUP_STEPS} --profile-active {arguments.active}"
        )
        self.commands: list[str] = []

    def json(self, flags: str, folder: Path) -> Record:
        """What a command writes with `--json`. It is run in `folder`."""
        command = [self.binary, *shlex.split(flags), "--json", "out.json"]
        text = shlex.join([shown(self.binary), *map(str, command[1:])])
        if text not in self.commands:
            self.commands.append(text)
        run(command, folder, RUN_SECONDS)
        try:
            return json.loads((folder / "out.json").read_text())
        except (OSError, ValueError) as error:
            raise RunFailed(f"{text} wrote no usable JSON: {error}") from None

    def measured_ms(self, ranks: int, link: str, folder: Path) -> float:
        flags = f"{self.train} --nproc {ranks}{pinned(ranks)} --link {link}"
        return self.json(flags, folder)["step_ms_median"]

    def predicted(self, study: Study, links: list[str], folder: Path) -> Record:
        scale = f" --compute-scale {study.scale:g}" if study.scale != 1 else ""
        record = self.json(
            f"predict --trace profile --nproc {study.ranks} --links {' '.join(links)}{scale}", folder
        )
        if [row["link"] for row in record["rows"]] != links:
            raise RunFailed(f"predict gave {len(record['rows'])} rows for {len(links)} links")
        return record


def pinned(ranks: int) -> str:
    return " --pin-cores" if ranks <= machine()["cores"] else ""


def make_round(paceline: Paceline, links: list[str]) -> list[Record]:
    """One record for each study: the prediction, and the measured step of each link."""
    with tempfile.TemporaryDirectory(prefix="predict_trace_") as name:
        folder = Path(name)
        traced = f"{paceline.train} --nproc {TRACED_RANKS}{pinned(TRACED_RANKS)} {paceline.profile}"
        paceline.json(traced, folder)
        return [
            {
                "ranks": study.ranks,
                "compute_scale": study.scale,
                "predicted": paceline.predicted(study, links, folder),
                "measured_ms": [paceline.measured_ms(study.ranks, link, folder) for link in links],
            }
            for study in STUDIES
        ]


def results_of(rounds: list[list[Record]], links: list[str]) -> list[Record]:
    results = []
    for at, study in enumerate(STUDIES):
        for place, link in enumerate(links):
            pairs = [(one[at]["predicted"]["rows"][place], one[at]["measured_ms"][place]) for one in rounds]
            ratios = [row["step_ms"] / measured for row, measured in pairs]
            median = statistics.median(ratios)
            results.append({
                "ranks": study.ranks,
                "compute_scale": study.scale,
                "link": link,
                "predicted_ms": statistics.median(row["step_ms"] for row, _ in pairs),
                "predicted_low_ms": statistics.median(row["step_low_ms"] for row, _ in pairs),
                "predicted_high_ms": statistics.median(row["step_high_ms"] for row, _ in pairs),
                "measured_ms": statistics.median(measured for _, measured in pairs),
                "ratios": ratios,
                "median_ratio": median,
                "bar": f"within {100 * study.bar:g} %",
                "met": abs(median - 1) <= study.bar,
            })
    return results


def table(results: list[Record]) -> str:
    rows = [("ranks", "link", "predicted ms", "measured ms", "ratio [min-max]", "bar", "")]
    for one in results:
        rows.append((
            str(one["ranks"]),
            one["link"],
            f"{one['predicted_ms']:.2f}",
            f"{one['measured_ms']:.2f}",
            f"{one['median_ratio']:.3f} [{min(one['ratios']):.3f}-{max(one['ratios']):.3f}]",
            one["bar"],
            "MET" if one["met"] else "MISSED",
        ))
    return aligned(rows, left={1, 4, 5, 6})


def main() -> int:
    arguments = parse_arguments()
    paceline = Paceline(arguments)
    try:
        version = run([paceline.binary, "--version"], ROOT, timeout_s=30).strip()
        rounds = []
        for number in range(1, arguments.rounds + 1):
            rounds.append(make_round(paceline, arguments.links))
            print(f"round {number} of {arguments.rounds}", file=sys.stderr, flush=True)
    except RunFailed as error:
        print(f"predict_trace: {error}", file=sys.stderr)
        return 1
    results = results_of(rounds, arguments.links)
    print(table(results))
    record = provenance() | {
        "version": version, "commands": paceline.commands, "results": results, "rounds": rounds,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"Raw records: {shown(Path(os.path.abspath(arguments.out)))}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
