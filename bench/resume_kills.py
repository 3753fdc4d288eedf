"""Kills a training run at a random moment and resumes it, until it is done. Repeats this many times.

    cargo build --release
    python3 bench/resume_kills.py

Each trial starts `paceline train --save DIR --save-every N --resume auto`, sends SIGKILL at a random moment
to the launcher or to one of the ranks, and starts the same command again, until the run has made all of its
steps. A trial is good if the run ends with exactly the weights of a run that was never interrupted, if every
resumed run reports that no sample is repeated or skipped, and if only the last checkpoints are left in their folder, with
the digests that they should have.

Trials take turns among the cases below, which differ in model, strategy, transport, optimizer and schedule.

Prints a line per trial and writes all of them to `results/resume_kills.json`. The exit code is 1 if a trial
failed. Only the standard library is needed.
"""
import argparse
import datetime
import json
import os
import random
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, Record, RunFailed, commit, machine, run

# A run that takes longer counts as hanging.
HANGS_S = 120.0
# After this many kills a run is no longer killed, so that every trial ends.
MAX_KILLS = 8
# The environment variable by which every process of a run is recognized.
TOKEN = "RESUME_KILLS_TRIAL"

CASES = {
    "cnn": "--model cnn --channels 4 8 --hidden 32 --samples 1000 --nproc 2 --global-batch-size 30 "
    "--momentum 0.9 --batch-norm --accumulate 2 --lr-schedule cosine --lr-warmup-steps 20",
    "mlp": "--model mlp --input-dim 64 --hidden-dim 64 --output-dim 16 --num-layers 2 --nproc 2 "
    "--batch-size 32 --steps-per-epoch 25 --optimizer adamw --transport tcp",
    "uneven": "--model cnn --channels 4 --hidden 16 --samples 1000 --nproc 3 --batch-size 16 "
    "--rank-samples 500 330 170 --momentum 0.9 --strategy simple_ddp_async",
    "threads": "--model cnn --channels 4 8 --hidden 32 --samples 1000 --nproc 2 --global-batch-size 32 "
    "--optimizer adamw --clip-grad-norm 1 --transport thread --lr-schedule linear",
}
# The names of checkpoints, and how many stay unless --save-keep says otherwise.
STEP = re.compile(r"^step-\d{9}$")
KEPT = 2
DIGEST = re.compile(r"^Weights: sha256 ([0-9a-f]{64})$", re.MULTILINE)
RESUMED = re.compile(r"^Resumed from \S+: (.*)$", re.MULTILINE)
STEPS = re.compile(r"(\d+) steps? (?:are|is) complete")
WHOLE = "no sample is repeated or skipped"
DONE = "are complete already"


def only(pattern: re.Pattern[str], text: str, what: str) -> str:
    found = pattern.findall(text)
    if len(found) != 1:
        raise RunFailed(f"{len(found)} lines with {what}")
    return found[0]


def processes_of(token: str) -> list[int]:
    """The processes that were started with this token in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if f"{TOKEN}={token}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                # The process has ended, or belongs to another user.
                continue
    return found


def ranks_of(token: str) -> list[int]:
    """The processes among these that are ranks of a launcher."""
    ranks = []
    for process in processes_of(token):
        try:
            if b"\0RANK=" in b"\0" + (Path("/proc") / str(process) / "environ").read_bytes():
                ranks.append(process)
        except OSError:
            continue
    return ranks


class Trial:
    """One run, however often it has to be started."""

    def __init__(self, arguments: argparse.Namespace, case: str, took_s: float, chance: random.Random):
        self.arguments, self.case, self.took_s, self.chance = arguments, case, took_s, chance
        self.token = secrets.token_hex(8)
        self.starts: list[Record] = []

    def start(self, folder: Path, may_kill: bool) -> str | None:
        """Starts the command, and kills it or one of its ranks. Returns the output if the run succeeded."""
        after_s = self.chance.uniform(0.0, self.took_s)
        victim = self.chance.choice(["launcher", "rank"])
        child = subprocess.Popen(
            [*command(self.arguments, self.case), "--save", "saved", "--resume", "auto",
             "--save-every", str(self.arguments.save_every)],
            cwd=folder, env=os.environ | {TOKEN: self.token}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )
        is_killed = False
        try:
            output, errors = child.communicate(timeout=after_s if may_kill else HANGS_S)
        except subprocess.TimeoutExpired:
            if not may_kill:
                os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
                raise RunFailed(f"a run took more than {HANGS_S:.0f} s") from None
            ranks = ranks_of(self.token) if victim == "rank" else []
            # Ranks that are threads are not processes. Ranks that are processes may not have started, or may
            # have ended.
            victim = "rank" if ranks else "launcher"
            try:
                os.kill(self.chance.choice(ranks) if ranks else child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            is_killed = True
            try:
                output, errors = child.communicate(timeout=HANGS_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
                raise RunFailed(f"a killed run hung for {HANGS_S:.0f} s") from None
        # All processes must have stopped writing into the folder before the next run begins.
        deadline = time.monotonic() + HANGS_S
        while left := processes_of(self.token):
            if time.monotonic() > deadline:
                raise RunFailed(f"processes {left} outlived their run")
            time.sleep(0.01)
        resumed = RESUMED.findall(output)
        record: Record = {"killed": victim if is_killed else None, "resumed": resumed[0] if resumed else None}
        record |= {"after_s": round(after_s, 4)} if is_killed else {}
        self.starts.append(record)
        if resumed and WHOLE not in resumed[0] and DONE not in resumed[0]:
            raise RunFailed(f"a resumed run says: {resumed[0]}")
        if child.returncode == 0:
            return output
        if not is_killed:
            raise RunFailed(f"a run that nobody killed ended with {child.returncode}: {errors.strip()[-500:]}")
        return None

    def run(self, expected: str) -> Record:
        wrong = []
        with tempfile.TemporaryDirectory(prefix="resume_kills_") as name:
            folder, output, digest = Path(name), None, None
            try:
                while output is None:
                    output = self.start(folder, may_kill=len(self.starts) < MAX_KILLS)
                digest = only(DIGEST, output, "the digest")
                if digest != expected:
                    wrong.append(f"it ended with {digest}, not with {expected}")
                left = sorted(file.name for file in (folder / "saved").iterdir())
                stray = [name for name in left if name not in ("checkpoint.lock", "latest") and not STEP.match(name)]
                if stray or sum(bool(STEP.match(name)) for name in left) > KEPT:
                    wrong.append(f"the folder of checkpoints holds {left}")
                checked = subprocess.run(
                    [str(self.arguments.paceline), "checkpoint", "verify", "saved"],
                    cwd=folder, capture_output=True, text=True, timeout=HANGS_S,
                )
                if checked.returncode != 0:
                    wrong.append(f"the checkpoints are damaged: {checked.stdout.strip()[-500:]}")
            except RunFailed as failure:
                wrong.append(str(failure))
            finally:
                for process in processes_of(self.token):
                    os.kill(process, signal.SIGKILL)
        steps = [STEPS.search(start["resumed"] or "") for start in self.starts]
        return {
            "case": self.case,
            "kills": sum(start["killed"] is not None for start in self.starts),
            "resumed_at_steps": [int(step[1]) for step in steps if step],
            "starts": self.starts,
            "weights_sha256": digest,
            "wrong": wrong,
        }


def command(arguments: argparse.Namespace, case: str) -> list[str]:
    return [str(arguments.paceline), "train", *CASES[case].split(), "--steps", str(arguments.steps)]


def uninterrupted(arguments: argparse.Namespace, case: str) -> tuple[str, float]:
    """The digest of an uninterrupted run that saves nothing, and how long a run that saves takes."""
    with tempfile.TemporaryDirectory(prefix="resume_kills_") as name:
        digest = only(DIGEST, run(command(arguments, case), Path(name), HANGS_S), "the digest")
        begin = time.monotonic()
        saving = ["--save", "saved", "--save-every", str(arguments.save_every)]
        output = run([*command(arguments, case), *saving], Path(name), HANGS_S)
        took_s = time.monotonic() - begin
        if only(DIGEST, output, "the digest") != digest:
            raise RunFailed(f"{case}: a run that saves ends with other weights than one that does not")
        return digest, took_s


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill a run at random moments and resume it, many times.")
    parser.add_argument("--paceline", type=Path, default=ROOT / "target/release/paceline", metavar="PATH")
    parser.add_argument("--times", type=int, default=20, help="trials, shared by the cases (default: 20)")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of a run (default: 400)")
    parser.add_argument("--save-every", type=int, default=7, help="steps between checkpoints (default: 7)")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seed", type=int, default=1, help="of the moments and victims (default: 1)")
    parser.add_argument("--out", type=Path, default=ROOT / "results/resume_kills.json", metavar="FILE")
    arguments = parser.parse_args()
    if not arguments.paceline.exists():
        parser.error(f"there is no {arguments.paceline}; build it first, see the head of this script")
    arguments.paceline = arguments.paceline.resolve()
    return arguments


def main() -> int:
    arguments = parse_arguments()
    chance = random.Random(arguments.seed)
    try:
        expected = {case: uninterrupted(arguments, case) for case in arguments.cases}
    except RunFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    trials = []
    for number in range(arguments.times):
        case = arguments.cases[number % len(arguments.cases)]
        digest, took_s = expected[case]
        trial = Trial(arguments, case, took_s, chance).run(digest)
        trials.append(trial)
        verdict = "; ".join(trial["wrong"]) or "the same weights"
        print(f"trial {number}, {case}: {trial['kills']} kills, resumed at {trial['resumed_at_steps']}: {verdict}")
    kills = [trial["kills"] for trial in trials]
    summary = {
        "trials": len(trials),
        "good": sum(not trial["wrong"] for trial in trials),
        "kills": sum(kills),
        "kills_of_a_trial": {"median": statistics.median(kills), "max": max(kills)} if kills else {},
        "resumed_at_different_steps": len({step for trial in trials for step in trial["resumed_at_steps"]}),
    }
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "commit": commit(),
        "steps": arguments.steps,
        "save_every": arguments.save_every,
        "seed": arguments.seed,
        "cases": {case: CASES[case] for case in arguments.cases},
        "uninterrupted": {
            case: {"weights_sha256": digest, "seconds_with_checkpoints": round(took_s, 3)}
            for case, (digest, took_s) in expected.items()
        },
        "summary": summary,
        "trials": trials,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(
        f"{summary['good']} of {summary['trials']} ended with the weights of the uninterrupted run, after "
        f"{summary['kills']} kills in all"
    )
    print(f"raw records: {arguments.out}")
    return 0 if summary["good"] == summary["trials"] else 1


if __name__ == "__main__":
    sys.exit(main())
