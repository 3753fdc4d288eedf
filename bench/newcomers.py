"""What does somebody see who is new here: how long until the first success, how long is each screen, and which differences are seen?

    python3 bench/newcomers.py tasks --peer-python .peer/bin/python    # four tasks, each in an empty folder, with the commands of the pages
    python3 bench/newcomers.py screens [--before OLD_PROGRAM]          # lines at 80 and 120 columns, quiet and beside a program on each core
    python3 bench/newcomers.py planted --pairs 50                      # pairs of runs that differ by a tenth, and pairs that do not, on busy cores

A task ends with the first command that fails or lacks the words that it should print. `planted` says how often each command sees a difference. Results: newcomers.json,
a part for each of the three.
"""
import csv
import json
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from common import ROOT, Record, RunFailed, aligned, arguments_for, ended, parsed, provenance, run, spinning, train, write

LIMIT_S = 900.0
# A command of a task may build the crates.
TASK_LIMIT_S = 3600.0
REVIEWS = ROOT / "crates/choices/reviews"
SCRIPT = '''import os, torch, torch.distributed as dist
dist.init_process_group("gloo") if "RANK" in os.environ else None
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
model = torch.nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    x, y = torch.randn(64, 256), torch.randint(10, (64,))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
print("done")
'''


class Step(NamedTuple):
    """A command, words that it has to print, and whether the newcomer has got what they came for when it ends."""

    command: str
    words: str
    is_success: bool = False


TASKS = {
    "student": [
        Step("paceline train", "Training loss", True),
        Step("paceline train --link 1gbit,50us --profile", "Advice: "),
        Step("paceline analyze profile/ddp", "critical path"),
        Step("paceline schedule 1f1b --stages 2 --micro-batches 8", "idle"),
        Step("paceline train --model mlp --nproc 2 --mesh pp=2 --accumulate 8 --steps 20", "Bubble: "),
    ],
    "engineer": [
        Step("paceline record -- {python} train.py", "Report: ", True),
        Step("paceline bench all_reduce --against torch --python {python} -b 1M -e 16M -f 4", "torch"),
        Step("paceline bench scaling --nproc 1,2 --rounds 3 -- {python} train.py", "2 ranks"),
    ],
    "Rust programmer": [
        Step("paceline new my-project", "my-project"),
        Step("cargo test --manifest-path my-project/Cargo.toml", "test result: ok"),
        Step(
            "cargo run --release --manifest-path my-project/Cargo.toml -- train --model scaled_net --data circle --strategy one_reduce --epochs 4 --lr 0.1 "
            "--momentum 0.9 --nproc 2 --evaluate", "Evaluation accuracy", True,
        ),
    ],
    "somebody with texts": [
        Step("paceline tokenizer train --data-dir reviews.csv --vocab 600 --to tokenizer.json", "600"),
        Step("paceline train --recipe tiny-llama --data text --data-dir reviews.csv --vocab 600 --test-samples 40 --save sorter", "Evaluation accuracy"),
        Step("paceline classify --model sorter 'The bread was fresh and the waiter kind.'", "%", True),
        Step("paceline evaluate --checkpoint sorter --predictions predictions.csv", "Predicted classes"),
    ],
}

# The runs that screens read, and the screens by name.
RUNS = [
    "train --epochs 1 --link 1gbit,50us --evaluate --profile --profile-dir one --run-dir a --quiet",
    "train --epochs 1 --link 1gbit,50us --profile --profile-dir two --strategy simple_ddp --run-dir b --quiet",
    "train --steps 30 --strategy zero2 --run-dir c --quiet",
]
SCREENS = {
    "train": "train --epochs 1 --link 1gbit,50us --evaluate",
    "a pipeline": "train --model mlp --hidden-dim 256 --nproc 2 --mesh pp=2 --accumulate 4 --steps 20",
    "a language model": "train --recipe tiny-llama",
    "bench": "bench all_reduce -b 1K -e 1M -f 4",
    "compare two": "compare a b",
    "compare three": "compare a b c",
    "analyze": "analyze one/ddp",
    "analyze --against": "analyze two/simple_ddp --against one/ddp",
    "sweep": "sweep --vary strategy=simple_ddp,ddp,zero2 --output swept --steps 10 --rounds 3",
    "scaling": "bench scaling --nproc 1,2 --rounds 3 --steps-per-epoch 10",
    "predict": "predict --nproc 2,8 --links 10gbe --steps-per-epoch 10",
}


def reviews(folder: Path) -> None:
    """The reviews in the program as one table, with words as labels."""
    rows = [row for part in ("train", "test") for row in csv.DictReader((REVIEWS / f"{part}.csv").open())]
    with (folder / "reviews.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerows([("text", "label"), *((row["text"], ("bad", "good")[int(row["label"])]) for row in rows)])


def task(name: str, steps: list[Step], python: Path, bin_folder: Path) -> Record:
    """The time of each command of a task, and of its first success, from an empty folder on."""
    with tempfile.TemporaryDirectory(prefix="newcomer_") as made:
        folder, done, begin = Path(made), [], time.monotonic()
        (folder / "train.py").write_text(SCRIPT)
        reviews(folder)
        first, failure = None, None
        for step in steps:
            command = shlex.split(step.command.format(python=python))
            start = time.monotonic()
            code, out, errors = ended(command, folder, TASK_LIMIT_S, text=True, env={**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "COLUMNS": "80"})
            done.append({"command": step.command, "seconds": round(time.monotonic() - start, 1)})
            if code != 0 or step.words not in out:
                failure = f"{step.command}: exit code {code}, without {step.words!r}: {(errors or out or '')[-400:]}"
                break
            if step.is_success:
                first = round(time.monotonic() - begin, 1)
        return {"task": name, "date": provenance()["date"], "first_success_s": first, "commands": done, "failure": failure}


def tasks(arguments) -> list[Record]:
    with tempfile.TemporaryDirectory(prefix="bin_") as made:
        os.symlink(arguments.paceline, Path(made) / "paceline")
        chosen = {arguments.only: TASKS[arguments.only]} if arguments.only else TASKS
        results = [task(name, steps, arguments.peer_python, Path(made)) for name, steps in chosen.items()]
    rows = [["task", "first success (s)", "all (s)", ""]]
    rows += [[of["task"], str(of["first_success_s"]), f"{sum(step['seconds'] for step in of['commands']):.0f}", of["failure"] or ""] for of in results]
    print(aligned(rows, {0, 3}))
    return results


def screens(arguments) -> list[Record]:
    """The lines of each screen, and the longest one, of this program and the one before."""
    results = []
    for is_busy in (False, True):
        for name, program in {"now": arguments.paceline, "before": arguments.before}.items():
            if program is None:
                continue
            with tempfile.TemporaryDirectory(prefix="screens_") as made, ExitStack() as busy:
                folder = Path(made)
                for core in range(os.cpu_count() or 1) if is_busy else ():
                    busy.enter_context(spinning(core, 0))
                for words in RUNS:
                    run([program, *shlex.split(words)], folder, LIMIT_S)
                for columns in (80, 120):
                    for screen, words in SCREENS.items():
                        shutil.rmtree(folder / "swept", ignore_errors=True)
                        code, out, errors = ended(
                            [program, *shlex.split(words)], folder, LIMIT_S, text=True, env={**os.environ, "COLUMNS": str(columns)},
                        )
                        if code != 0:
                            raise RunFailed(f"{words}: {errors[-300:]}")
                        lines = [line for line in out.splitlines() if not line.startswith("Epoch ")]
                        longest = max(map(len, lines), default=0)
                        results.append({"screen": screen, "program": name, "busy": is_busy, "columns": columns, "lines": len(lines), "longest": longest, "text": out})
    rows = [["screen", *(f"{name}, {columns}{', busy' if busy else ''}" for name in ("before", "now") for columns in (80, 120) for busy in (False, True))]]
    for screen in SCREENS:
        found = {(of["program"], of["columns"], of["busy"]): str(of["lines"]) for of in results if of["screen"] == screen}
        rows.append([screen, *(found.get((name, columns, busy), "-") for name in ("before", "now") for columns in (80, 120) for busy in (False, True))])
    print(aligned(rows, {0}))
    return results


# Takes a core for a random time, and leaves it for one.
BURSTS = """import random, time
while True:
    end = time.monotonic() + random.uniform(0.1, 2)
    while time.monotonic() < end: pass
    time.sleep(random.uniform(0.1, 2))
"""
WORK = "--model mlp --input-dim 256 --num-layers 3 --output-dim 64 --batch-size 128 --steps 60 --pin-cores"
# A tenth more time: the second value is chosen so that a step takes about 1.1 times as long on quiet cores, which is measured first.
HIDDEN = (512, 540)


def seen_by_each(program: Path, folder: Path, values: tuple[int, int]) -> dict[str, bool]:
    """Whether each command says that two cases differ."""

    def told(words: str) -> str:
        return run([program, *shlex.split(words)], folder, LIMIT_S)

    for at, value in enumerate(values):
        told(f"train {WORK} --hidden-dim {value} --seed {at + 1} --profile --profile-active 40 --profile-dir traces{at} --run-dir run{at} --quiet")
    compared = " ".join(told("compare run0 run1").split())
    against = " ".join(told("analyze traces0/ddp --against traces1/ddp").split())
    told(f"sweep {WORK} --vary hidden-dim={values[0]},{values[1]} --rounds 3 --output swept" if values[0] != values[1]
         else f"sweep {WORK} --hidden-dim {values[0]} --vary seed=1,2 --rounds 3 --output swept")
    effects = [row["effect"] for row in json.loads((folder / "swept/sweep.json").read_text())["rows"] if row.get("effect")]
    return {
        "compare": not compared.startswith("First of single runs:"),
        "analyze --against": "within the spread of the steps" not in against,
        "sweep": any(not of["low"] <= 1 <= of["high"] for of in effects),
    }


def planted(arguments) -> Record:
    """How often each command sees a difference of a tenth, and one that is not there."""
    ratios = []
    for _ in range(5):
        steps = [float(train(arguments.paceline, f"{WORK} --hidden-dim {value}")["step_ms_median"]) for value in HIDDEN]
        ratios.append(steps[1] / steps[0])
    counts: dict[str, dict[str, int]] = {}
    order = [True, False] * arguments.pairs
    random.shuffle(order)
    with ExitStack() as stack:
        if not arguments.quiet:
            stack.callback(stack.enter_context(subprocess.Popen([sys.executable, "-c", BURSTS])).kill)
        for at, differs in enumerate(order):
            with tempfile.TemporaryDirectory(prefix="planted_") as made:
                pair = HIDDEN if differs else (HIDDEN[0], HIDDEN[0])
                for command, is_seen in seen_by_each(arguments.paceline, Path(made), pair).items():
                    kind = "of a tenth" if differs else "none"
                    counts.setdefault(command, {"of a tenth": 0, "none": 0})[kind] += is_seen
            print(f"pair {at + 1} of {len(order)}: {counts}", file=sys.stderr, flush=True)
    rows = [["command", f"seen of {arguments.pairs} that differ by a tenth", f"of {arguments.pairs} that do not"]]
    rows += [[command, str(of["of a tenth"]), str(of["none"])] for command, of in counts.items()]
    print(aligned(rows, {0}))
    return {"pairs": arguments.pairs, "busy": not arguments.quiet, "planted_ratio_quiet": statistics.median(ratios), "ratios": ratios, "seen": counts}


def main() -> int:
    parser = arguments_for(__doc__ or "", "newcomers.json", rounds=0, has_peer=True)
    parser.add_argument("part", choices=("tasks", "screens", "planted"))
    parser.add_argument("--before", type=Path, help="an older program, for its screens")
    parser.add_argument("--only", choices=TASKS, help="this one of the tasks; the record keeps the others")
    parser.add_argument("--pairs", type=int, default=50, help="pairs of each kind (default: 50)")
    parser.add_argument("--quiet", action="store_true", help="no other program beside the pairs")
    parser.add_argument("--beside", metavar="TEXT", help="other work on the machine, for the record")
    arguments = parsed(parser)
    result = {"tasks": tasks, "screens": screens, "planted": planted}[arguments.part](arguments)
    record = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    if arguments.only:
        others = [of for of in record.get("tasks", {}).get("result", []) if of["task"] != arguments.only]
        result = [*others, *result]
    write(arguments.out, record | {arguments.part: {**provenance(), "beside": arguments.beside, "result": result}})
    return int(arguments.part == "tasks" and any(of["failure"] for of in result))


if __name__ == "__main__":
    sys.exit(main())
