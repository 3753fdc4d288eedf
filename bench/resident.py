"""Compares the memory that the system says ranks have with what was predicted, for commands of README and docs.

    cargo build --release
    python3 bench/resident.py                # the first ten: about two minutes
    python3 bench/resident.py --commands 20 --rounds 3

The commands are the `paceline train` commands of README.md and docs/commands.md that print one run of processes and download
nothing, in order, each page in a folder of its own, as someone who reads these pages would enter them. The prediction has to be within 5 % or 4 MB of what
was measured, whichever is larger. Both are means over the ranks, of the median round.

Prints one table and writes all rounds to `results/resident.json`. Only the standard library is needed. Exits with 1 if a
prediction is farther off.
"""
import argparse
import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

from common import ROOT, Record, aligned, program, provenance, run, shown

RUN_SECONDS = 300
PAGES = ["README.md", "docs/commands.md"]
# Commands that print no single run, have no processes, or need what is not here.
LEFT_OUT = ("--ddp-choice", "--shard-choice", "--transport thread", "--download", "--config", "smollm2", "--data-dir", "~/")
PART, BYTES = 0.05, 4e6


def commands(page: str) -> list[str]:
    lines = (ROOT / page).read_text().splitlines()
    words = [line.split("#")[0].strip() for line in lines if line.startswith("paceline train ")]
    return [of for of in words if not any(flag in of for flag in LEFT_OUT)]


def measured(binary: Path, command: str, folder: Path) -> tuple[float, float]:
    """Measured and predicted bytes."""
    run([binary, *shlex.split(command)[1:], "--quiet", "--json", "run.json"], folder, RUN_SECONDS)
    record = json.loads((folder / "run.json").read_text())
    predicted = [of["resident"] for of in record["memory_predicted"]]
    return record["resident_bytes"], statistics.fmean(predicted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paceline", type=Path, default=ROOT / "target/release/paceline", metavar="PATH")
    parser.add_argument("--commands", type=int, default=10, help="how many of the commands (default: 10)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each (default: 3)")
    parser.add_argument("--out", type=Path, default=ROOT / "results/resident.json", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.commands < 1 or arguments.rounds < 1:
        parser.error("--commands and --rounds must be at least 1")
    binary = program(parser, "--paceline", arguments.paceline)
    wanted = [(page, command) for page in PAGES for command in commands(page)][: arguments.commands]
    rounds: list[list[tuple[float, float]]] = []
    for _ in range(arguments.rounds):
        # A command may go on from the checkpoint of one before it.
        with tempfile.TemporaryDirectory() as root:
            folders = {page: Path(root, str(at)) for at, page in enumerate(PAGES)}
            for folder in folders.values():
                folder.mkdir()
            rounds.append([measured(binary, command, folders[page]) for page, command in wanted])
    results: list[Record] = []
    for (_, command), of_command in zip(wanted, zip(*rounds)):
        measured_bytes, predicted = (statistics.median(of) for of in zip(*of_command))
        off = abs(measured_bytes - predicted)
        results.append({
            "command": command, "measured_bytes": measured_bytes, "predicted_bytes": predicted,
            "measured_of_predicted": measured_bytes / predicted, "holds": off <= max(BYTES, PART * predicted),
            "rounds": of_command,
        })
    rows = [
        [of["command"], f"{of['measured_bytes'] / 1e6:.1f}", f"{of['predicted_bytes'] / 1e6:.1f}",
         f"{100 * of['measured_of_predicted'] - 100:+.1f} %", "yes" if of["holds"] else "NO"]
        for of in results
    ]
    print(aligned([["command", "measured MB", "predicted MB", "apart", "holds"], *rows], left={0}))
    arguments.out.write_text(json.dumps(provenance() | {"binary": shown(binary), "commands": results}, indent=1) + "\n")
    print(f"wrote {shown(arguments.out)}", file=sys.stderr)
    return 0 if all(of["holds"] for of in results) else 1


if __name__ == "__main__":
    sys.exit(main())
