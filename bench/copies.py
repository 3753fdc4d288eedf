"""What pinned memory, non-blocking copies and a copy stream do to the time that a training step spends loading its batch.

    python3 bench/copies.py                    # a few minutes
    python3 bench/copies.py --device cuda      # on a card

Trains the CNN on an emulated accelerator, with each combination of the three switches, in turn. The bandwidth of its copies is such that
copying a batch from pinned memory takes 40 % of a step that waits for it: a run with fast copies tells how long the rest of the step takes.
From memory that is not pinned, a copy takes twice as long. A step waits `to_device_ms` for its batch; the rest of `copy_ms` is hidden.

Prints a table with the median over the runs of each case, and writes `results/copies.json`. The exit code is 1 unless all three switches
together hide at least 90 % of the copies, all other combinations next to nothing, and pinned memory alone makes the step shorter. On a card all
three must hide 90 %, and weights may not differ; with `--small` sizes, for an emulated card that copies in no time, only the latter. Only the
standard library is needed.
"""
import argparse
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path

from common import Record, RunFailed, aligned, program, provenance, run

SWITCHES = ("--pin-memory", "--non-blocking", "--copy-stream")
TRAIN = "train --generate-on-host --channels 16 16 --hidden 16 --batch-size 256 --steps 40 --warmup-steps 5 --quiet --seed 1"
ON_A_CARD = "train --generate-on-host --channels 64 128 256 --image 32 32 3 --batch-size 512 --steps 60 --warmup-steps 10 --quiet --seed 1"
SMALL = "train --generate-on-host --channels 4 8 --image 8 8 3 --hidden 16 --batch-size 4 --steps 12 --warmup-steps 5 --quiet --seed 1"
FIGURES = ("step_ms", "to_device_ms", "copy_ms", "copy_hidden_ms")
SHARE = 0.4  # of the step, for copies from pinned memory that it waits for
LEAST_HIDDEN = 0.9
NOTHING = 0.1  # less than this part hidden counts as nothing


def measure(binary: Path, command: str, device: str, switches: tuple[str, ...]) -> Record:
    with tempfile.TemporaryDirectory(prefix="copies_") as folder:
        run([binary, *command.split(), "--device", device, "--run-dir", ".", "--name", "run", *switches], Path(folder), timeout_s=300)
        summary = json.loads((Path(folder) / "run/summary.json").read_text())
    return {name: summary[name] for name in (*FIGURES, "weights_sha256")}


def median_of(runs: list[Record]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in runs) for name in FIGURES}


def hidden_part(figures: dict[str, float]) -> float:
    return figures["copy_hidden_ms"] / figures["copy_ms"] if figures["copy_ms"] else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what each way to copy batches to a device hides.")
    parser.add_argument("--binary", type=Path, default=Path("target/release/paceline"), metavar="PATH")
    parser.add_argument("--out", type=Path, default=Path("results/copies.json"), metavar="FILE")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="runs of each case (default: 5)")
    parser.add_argument("--device", choices=["sim", "cuda"], default="sim", help="sim (default), or cuda for a card")
    parser.add_argument("--small", action="store_true", help="sizes for an emulated card")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    binary = program(parser, "--binary", args.binary)
    cases = [words for count in range(len(SWITCHES) + 1) for words in itertools.combinations(SWITCHES, count)]

    is_card = args.device == "cuda"
    command = (SMALL if args.small else ON_A_CARD) + " --nproc 1" if is_card else TRAIN
    try:
        device = "cuda"
        if not is_card:
            trial = median_of([measure(binary, TRAIN, "sim:copy=1gbit,0us", SWITCHES[:1]) for _ in range(args.rounds)])
            bandwidth_gbit = trial["copy_ms"] / ((trial["step_ms"] - trial["copy_ms"]) * SHARE / (1 - SHARE))
            device = f"sim:copy={bandwidth_gbit:.6f}gbit,0us"
        runs: dict[tuple[str, ...], list[Record]] = {case: [] for case in cases}
        for number in range(args.rounds):
            for case in cases if number % 2 == 0 else reversed(cases):
                runs[case].append(measure(binary, command, device, case))
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    figures = {case: median_of(of) for case, of in runs.items()}
    digests = {one["weights_sha256"] for of in runs.values() for one in of}
    pageable, pinned, whole = figures[()], figures[SWITCHES[:1]], figures[SWITCHES]
    others = max(hidden_part(of) for case, of in figures.items() if case != SWITCHES)
    held = {"different weights": (len(digests), len(digests) == 1)}
    if not args.small:
        held["all three hide, part of the copies"] = (hidden_part(whole), hidden_part(whole) >= LEAST_HIDDEN)
    if not is_card:
        held |= {
            "copies from pinned memory, part of a step that waits for them": (share := pinned["to_device_ms"] / pinned["step_ms"],
                                                                             abs(share - SHARE) < 0.05),
            "any others hide at most": (others, others < NOTHING),
            "step with pinned memory, of one without": (ratio := pinned["step_ms"] / pageable["step_ms"], ratio < 1),
            "step with all three, of one without": (ratio := whole["step_ms"] / pageable["step_ms"], ratio < 1),
        }
    named = {" ".join(case) or "none": case for case in cases}
    record = provenance() | {
        "command": command, "device": device,
        "cases": {name: {"median": figures[case], "runs": runs[case]} for name, case in named.items()},
        "held": {what: {"value": value, "holds": holds} for what, (value, holds) in held.items()},
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"On {device}: medians over {args.rounds} runs of the means over a run's steps")
    rows = [[name, *(f"{figures[case][key]:.2f}" for key in FIGURES), f"{100 * hidden_part(figures[case]):.1f}"] for name, case in named.items()]
    print(aligned([["switches", "step ms", "waiting ms", "copies ms", "hidden ms", "hidden %"], *rows], left={0}))
    for what, (value, holds) in held.items():
        print(f"{what}: {value:.3g}{'' if holds else '  (not as expected)'}")
    return 0 if all(holds for _, holds in held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
