"""What checkpoints cost while training goes on, and whether they survive being killed.

    cargo build --release
    python3 bench/checkpoints.py                    # both parts
    python3 bench/checkpoints.py --parts kills --times 200

Part `cost`: an MLP of 14.7 million parameters with AdamW, 2 ranks under `sharded3`, in turns without checkpoints, with one
every 100 steps while training goes on, and with one every 100 steps that training waits for (`--save-sync`). The mean
step is the time of the epoch divided by its steps, so it includes what lies between steps. The longest step includes the
save that follows it, unless it is the last one of the run.

Part `kills`: 3 ranks under `sharded3` save after every step. The script kills the launcher or a rank at a random moment, and
then asks `paceline checkpoint verify` whether all checkpoints that are there match their digests, and whether the last one is
no older than before. The next trial goes on from there (`--resume auto`).

Writes `results/checkpoints.json`. The exit code is 1 if a trial failed. Only the standard library is needed.
"""
import argparse
import datetime
import json
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, Record, aligned, commit, machine, run

MODEL = "--model mlp --input-dim 2048 --hidden-dim 2048 --num-layers 3 --output-dim 1024 --batch-size 64 --optimizer adamw"
STEPS = 300
MODES = {"none": "", "while training goes on": "--save ck --save-every 100", "waiting": "--save ck --save-every 100 --save-sync"}
KILLED = "--model mlp --input-dim 256 --hidden-dim 256 --num-layers 4 --output-dim 64 --batch-size 16 --optimizer adamw"
LAST = re.compile(r"^step-(\d{9})$")
TIMEOUT_SECONDS = 300.0


def cost_of(binary: Path, mode: str) -> Record:
    command = shlex.split(
        f"train {MODEL} --strategy sharded3 --nproc 2 --threads 1 --pin-cores --epochs 1 --steps-per-epoch {STEPS} {MODES[mode]}"
    )
    with tempfile.TemporaryDirectory(prefix="checkpoints_") as folder:
        output = run([binary, *command], Path(folder), TIMEOUT_SECONDS)
        metrics = next(Path(folder).glob("runs/*/metrics.jsonl")).read_text().splitlines()
    records = [json.loads(line) for line in metrics]
    steps = [record for record in records if "step_ms" in record]
    saves = [record["save_s"] * 1e3 for record in records if "save_s" in record]
    epoch = re.search(r"^Epoch 1/1: .*, ([0-9.]+) s$", output, re.MULTILINE)
    if epoch is None:
        raise SystemExit(f"no line of the epoch in:\n{output}")
    # Nothing is left to overlap with the last save, which ends the run.
    saves_midway = saves[:-1]
    longest = max(record["step_ms"] + record.get("data_ms", 0.0) for record in steps[5:])
    return {
        "mean_ms": float(epoch.group(1)) * 1e3 / STEPS,
        "longest_ms": max([longest, *[save + statistics.median(r["step_ms"] for r in steps) for save in saves_midway]]),
        "saves_ms": saves,
    }


def cost(binary: Path, rounds: int) -> Record:
    found: dict[str, list[Record]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode in MODES:
            found[mode].append(cost_of(binary, mode))
            print(f"round {number + 1} of {rounds}: {mode}: {found[mode][-1]['mean_ms']:.2f} ms", file=sys.stderr)
    ratios = {
        mode: [own["mean_ms"] / none["mean_ms"] for own, none in zip(found[mode], found["none"])] for mode in MODES
    }
    rows = [("checkpoints", "mean step ms", "of none [min-max]", "longest step ms")]
    for mode, records in found.items():
        rows.append((
            mode,
            f"{statistics.median(record['mean_ms'] for record in records):.2f}",
            f"{statistics.median(ratios[mode]):.3f} [{min(ratios[mode]):.3f}-{max(ratios[mode]):.3f}]",
            f"{max(record['longest_ms'] for record in records):.1f}",
        ))
    print(aligned(rows, left={0}))
    return {"model": MODEL, "steps": STEPS, "rounds": found, "ratios": ratios}


def ranks_of(launcher: int) -> list[int]:
    """The processes of the ranks. The launcher has one more child, which ends the ranks if the launcher is killed."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children if b"\0RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()]


def last_step(folder: Path) -> int:
    steps = [LAST.match(entry.name) for entry in folder.iterdir()] if folder.is_dir() else []
    return max((int(found.group(1)) for found in steps if found), default=0)


def kill_one(binary: Path, work: Path, chance: random.Random) -> Record:
    """Starts the run, kills one of its processes, and checks what is left."""
    saved = work / "ck"
    before = last_step(saved)
    command = shlex.split(
        f"train {KILLED} --strategy sharded3 --nproc 3 --epochs 1000000 --steps-per-epoch 1000 --save ck --save-every 1"
        " --resume auto --quiet"
    )
    process = subprocess.Popen(
        [binary, *command], cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_s = chance.uniform(0.3, 1.5)
    time.sleep(wait_s)
    try:
        victims = [process.pid, *ranks_of(process.pid)]
        os.kill(chance.choice(victims), signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        pass
    try:
        _, errors = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return {"good": False, "wait_s": wait_s, "problem": "the run did not end within 60 s"}
    verified = subprocess.run([binary, "checkpoint", "verify", "ck"], cwd=work, capture_output=True, text=True, timeout=60)
    after = last_step(saved)
    nothing_yet = after == 0
    good = nothing_yet or verified.returncode == 0 and after >= before
    trial = {"good": good, "wait_s": round(wait_s, 3), "before": before, "after": after}
    return trial if good else trial | {"problem": (verified.stderr + errors)[-500:]}


def kills(binary: Path, times: int, seed: int) -> Record:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="checkpoints_") as folder:
        trials = []
        for number in range(times):
            trials.append(kill_one(binary, Path(folder), chance))
            if not trials[-1]["good"]:
                print(f"trial {number}: {trials[-1]}", file=sys.stderr)
    good = sum(trial["good"] for trial in trials)
    saved = max(trial.get("after", 0) for trial in trials)
    print(f"{good} of {times} kills left whole checkpoints; the last one is after step {saved}")
    return {"model": KILLED, "seed": seed, "times": times, "good": good, "trials": trials}


def main() -> int:
    parser = argparse.ArgumentParser(description="What checkpoints cost, and whether they survive kills.")
    parser.add_argument("--paceline", type=Path, default=ROOT / "target/release/paceline", metavar="PATH")
    parser.add_argument("--parts", nargs="+", choices=["cost", "kills"], default=["cost", "kills"])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind in part cost (default: 3)")
    parser.add_argument("--times", type=int, default=200, help="kills in part kills (default: 200)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and processes (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("results/checkpoints.json"), metavar="FILE")
    arguments = parser.parse_args()
    binary = arguments.paceline.absolute()
    if not binary.is_file():
        parser.error(f"--paceline {binary}: no such file; `cargo build --release` makes it")
    report: Record = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    report |= {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "commit": commit(),
    }
    if "cost" in arguments.parts:
        report["cost"] = cost(binary, arguments.rounds)
    if "kills" in arguments.parts:
        report["kills"] = kills(binary, arguments.times, arguments.seed)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nraw records: {arguments.out}")
    return 1 if report.get("kills", {}).get("good") != report.get("kills", {}).get("times") else 0


if __name__ == "__main__":
    sys.exit(main())
