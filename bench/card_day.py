"""What a card must show, as stages in order of value: tests, faults, steps beside PyTorch's, NCCL, tools, endurance. `scripts/card_day.sh` packs and runs it.

A stage that fails, or that its limit ends with all its processes, does not end the others. A stage begins if its limit fits into the rest
of the time, so that a short one may come before a long one, which then is the first of the next run. One that was interrupted twice has failed.

Without a card (`nvidia-smi` names none) the emulated card computes, with smaller sizes; `PACELINE_CARD=1` demands a real one. Each stage has
RESULTS/NAME.log and RESULTS/NAME.json. Prints tables and writes RESULTS/card_day.json, which the next run reads: remove it to begin
again. Exits with 1 if a stage failed, with 3 if stages are left, with 0 if all have ended, and with 2 on a wrong argument.
"""
import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from card import PEAKS, driver, table
from common import Record, aligned, kill_with, program, provenance
from late import card_variables

BENCH = Path(__file__).resolve().parent
PLAIN = "bash {programs}/card_day.sh {name} {json} {small}"
OWN = "{python} {bench}/card_stages.py {name} --programs {programs} --out {json} {small}"
CARD = "{python} {bench}/card.py --paceline {programs}/paceline --steps {programs}/card_steps --out {json} --rounds 1 {small} --parts "
RIVALS = CARD + "steps --seconds {seconds} --cases "
LATE = "{python} {bench}/late.py --paceline {programs}/paceline --device cuda --out {json} --ranks 2 --orders {orders} --long-orders {orders} --strategies "
TIMES = "times, memory and shares of the peak of a card"


class Stage(NamedTuple):
    name: str
    limit_s: int
    command: str
    unseen: str  # what an emulated card cannot show


STAGES = [
    Stage("probe", 20, PLAIN, "whether the driver, the compiler and the libraries of a machine fit together"),
    Stage("tests", 100, PLAIN, "the vendor's products, and the last digits of a card's arithmetic"),
    Stage("late", 40, LATE + "simple_ddp ddp zero3 sharded3", "orders that a card takes by itself: here seeds draw them"),
    Stage("kill_rank", 30, PLAIN, "whether the driver frees the memory of a killed process: each process has an emulated card of its own"),
    Stage("out_of_memory", 40, OWN, "what the driver takes for itself, and what other processes take"),
    # The rows of the table in docs/devices.md.
    Stage("rivals", 130, RIVALS + "small_cnn/f32 small_cnn/bf16 llama/f32 llama/bf16 cnn mlp", TIMES),
    Stage("smollm2", 90, RIVALS + "smollm2/tf32 smollm2/bf16", TIMES + ", and the model at its own size"),
    Stage("nccl", 40, OWN, "NCCL: it is emulated, too"),
    Stage("sanitizer", 35, PLAIN, "what compute-sanitizer finds in the machine code of a card"),
    Stage("hottest", 45, PLAIN, "counters of the hardware"),
    Stage("growth", 30, CARD + "growth", "memory that the driver takes, and 10,240 steps: here 1,024"),
    Stage("autotuned", 60, RIVALS + "small_cnn/bf16 llama/bf16 cnn/bf16 mlp/bf16 --forms autotuned", TIMES),
]
# The part of a stage's limit after which PyTorch's steps end, and leave out what is left.
RIVALS_PART = 0.75
MARK = "PACELINE_CARD_DAY"
LEFT_OUT = 77
# An emulated card interprets each instruction: limits, and a run, are so many times as long.
SLOWNESS = 5


class Day:
    """The stages so far, and the file that keeps them."""

    def __init__(self, programs: Path, results: Path, emulated: bool) -> None:
        self.programs, self.results, self.emulated = programs, results, emulated
        self.file = results / "card_day.json"
        # By this variable, all processes of a stage are known.
        self.mark = f"{MARK}={results}\0"
        new = provenance() | {"commit": Path(programs, "COMMIT").read_text().strip(), "card": "emulated" if emulated else driver(), "stages": {}}
        self.record: Record = json.loads(self.file.read_text()) if self.file.exists() else new
        if (self.record["card"] == "emulated") != emulated:
            raise SystemExit(f"{self.file} is of another card ({self.record['card']}): remove it, or name another folder for results")

    def save(self) -> None:
        part = self.file.with_suffix(".partial")
        part.write_text(json.dumps(self.record, indent=1) + "\n")
        part.replace(self.file)

    def entry(self, stage: Stage) -> Record:
        return self.record["stages"].setdefault(stage.name, {"starts": 0, "limit_s": stage.limit_s})

    def hold(self, stage: Stage, variables: dict[str, str]) -> None:
        """Runs a stage within its limit and records how it ended."""
        entry, log, out = self.entry(stage), self.results / f"{stage.name}.log", self.results / f"{stage.name}.json"
        entry |= {"starts": entry["starts"] + 1, "limit_s": stage.limit_s}
        self.save()
        places = {"python": sys.executable, "bench": BENCH, "programs": self.programs, "json": out, "name": stage.name,
                  "small": "--small" if self.emulated else "", "seconds": int(RIVALS_PART * stage.limit_s),
                  "orders": 2 if self.emulated else 1}
        command = [word for word in (of.format(**places) for of in stage.command.split()) if word]
        out.unlink(missing_ok=True)
        begin, code = time.monotonic(), None
        with open(log, "w", encoding="utf-8") as file, tempfile.TemporaryDirectory(prefix="card_day_") as work:
            environment = os.environ | variables | {MARK: str(self.results)}
            process = subprocess.Popen(command, cwd=work, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
            try:
                code = process.wait(stage.limit_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                kill_with(self.mark)
                process.wait()
        lines = log.read_text(errors="replace").strip().splitlines() or [""]
        failed = f"failed ({code})" if code is not None else f"failed: took more than {stage.limit_s} s"
        outcome = {0: "passed", LEFT_OUT: "left out"}.get(code, failed)
        entry |= {"outcome": outcome, "seconds": round(time.monotonic() - begin, 1), "says": lines[-1].replace(f"{self.programs}/", "")}
        entry |= {"unseen": stage.unseen} if self.emulated else {}
        if out.exists():
            try:
                entry["result"] = json.loads(out.read_text().replace(f"{self.programs}/", ""))
            except ValueError:
                entry["outcome"] = f"failed: {out.name} is no JSON" if code == 0 else failed
        self.save()
        print(f"{entry['outcome']:<10} {stage.name:<17} {entry['seconds']:6.1f} s  {entry['says'][:100]}", flush=True)

    def tables(self) -> str:
        ended = {name: of for name, of in self.record["stages"].items() if "outcome" in of}
        rows = [["stage", "outcome", "s", "limit s", "says", "an emulated card cannot show" if self.emulated else ""]]
        rows += [[name, of["outcome"], f"{of['seconds']:.1f}", str(of["limit_s"]), of["says"][:110], of.get("unseen", "")] for name, of in ended.items()]
        steps = [record for of in ended.values() for record in (of["result"].get("records", []) if isinstance(of.get("result"), dict) else [])]
        peaks = next((of for name, of in PEAKS.items() if name in self.record["card"]), {})
        return aligned(rows, left={0, 1, 4, 5}) + ("\n\n" + table(steps, peaks) if steps else "")


def of_card() -> dict[str, str]:
    """The variables for a real card: its libraries may be those that came with PyTorch."""
    folders = [str(folder) for path in sys.path for folder in sorted(Path(path).glob("nvidia/*/lib"))]
    known = os.environ.get("PACELINE_CUDA_LIBRARIES", "")
    return {"PACELINE_CARD": "1", "RUST_BACKTRACE": "1", "PACELINE_CUDA_LIBRARIES": ":".join(filter(None, [known, *folders]))}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the stages of a card's day.")
    parser.add_argument("--programs", type=Path, required=True, metavar="FOLDER", help="what `scripts/card_day.sh pack` has packed")
    parser.add_argument("--results", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seconds", type=float, metavar="S", help="of this run (default: 240; five times as long on an emulated card, as are limits)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    binary = program(parser, "--programs", arguments.programs / "paceline")
    results = Path(os.path.abspath(arguments.results))
    results.mkdir(parents=True, exist_ok=True)
    emulated = os.environ.get("PACELINE_CARD") != "1" and driver() == "unknown"
    slowness = SLOWNESS if emulated else 1
    end = time.monotonic() + (arguments.seconds or 240 * slowness) - 2
    day = Day(binary.parent, results, emulated)
    kill_with(day.mark)
    print("card and driver:", day.record["card"], flush=True)
    with tempfile.TemporaryDirectory(prefix="card_") as folder:
        variables = card_variables(parser, binary, Path(folder)) if emulated else of_card()
        for stage in STAGES:
            entry = day.entry(stage)
            if "outcome" in entry:
                continue
            if entry["starts"] >= 2:
                entry |= {"outcome": "failed: was interrupted twice", "seconds": 0.0, "says": ""}
                day.save()
            elif slowness * stage.limit_s <= end - time.monotonic():
                day.hold(stage._replace(limit_s=slowness * stage.limit_s), variables)
    print("\n" + day.tables())
    outcomes = [day.entry(stage).get("outcome") for stage in STAGES]
    left = outcomes.count(None)
    if left:
        print(f"\n{left} stages are left: run this again")
    return 1 if any(of and of.startswith("failed") for of in outcomes) else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
