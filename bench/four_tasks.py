"""Does what four kinds of readers come for, each in an empty folder, with the commands that the pages give them.

    cargo build --release
    python3 bench/four_tasks.py --task all
    python3 bench/four_tasks.py --task text

| task | what a reader does |
|---|---|
| `learn` | a command or two of each lesson, shortened where training takes minutes |
| `plan` | profiles a run, and predicts other networks, from its traces and from numbers |
| `extend` | begins a project of their own, tests it, and trains it with `ddp` and `sharded3` (compiles for minutes) |
| `text` | trains a language model and a tokenizer on the pages in `docs/`, and generates |

A command is looked up in its page by its first words, so a command that no page has fails its task. Checks compare what came
with what the page says. Prints a table and writes every command, its time, its checks and its output, with date, machine and
commit, to `results/four_tasks.json`. Only the standard library is needed.

Exits with 0 if every check holds, with 1 if one does not, and with 2 on a wrong argument.
"""
import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import ROOT, Record, aligned, program, provenance

# The most characters of an output that are kept: its beginning and its end.
KEPT = 4000
LIMIT_S = 600
COMPILE_LIMIT_S = 3600


def documented(page: str, start: str) -> str:
    """The command of a page's blocks of code that begins with these words, without its comment."""
    is_code, command = False, ""
    for line in (ROOT / page).read_text().splitlines():
        if line.startswith("```"):
            is_code, command = not is_code, ""
        elif is_code:
            command += line.removesuffix("\\")
            if line.endswith("\\"):
                continue
            if command.startswith(start):
                return re.sub(r"\s+#.*", "", command).strip()
            command = ""
    raise SystemExit(f"{page} has no command that begins with {start!r}; bring {Path(__file__).name} up to date")


class Task:
    """A task in an empty folder: runs commands, and keeps what came of them."""

    def __init__(self, name: str, folder: Path, paceline: Path) -> None:
        self.name, self.folder, self.commands = name, folder, []
        (folder / "bin").mkdir()
        (folder / "bin/paceline").symlink_to(paceline)
        self.work = folder / "work"
        self.work.mkdir()
        shutil.copytree(ROOT / "docs", folder / "pages")
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "PAGES": str(folder / "pages")}

    def run(self, page: str, start: str, change: tuple[str, str] = ("", ""), limit_s: float = LIMIT_S) -> str:
        """Runs the command of a page, with a part of it replaced, and returns what it printed. It has to end with 0."""
        command = documented(page, start)
        self.commands.append({"page": page, "documented": command, "checks": {}})
        if change[0]:
            self.check(f"the documented command has {change[0]!r}", change[0] in command)
        command = command.replace(*change) if change[0] else command + change[1]
        begin = time.monotonic()
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=self.work, env=self.environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        kept = output if len(output) <= KEPT else f"{output[: KEPT // 2]}\n[...]\n{output[-KEPT // 2 :]}"
        seconds = round(time.monotonic() - begin, 1)
        self.commands[-1].update(command=command, seconds=seconds, output=self.without_places(kept))
        self.check("it ends with 0", process.returncode == 0)
        print(f"{self.name}: {seconds:6.1f} s  {command}", flush=True)
        return output

    def without_places(self, output: str) -> str:
        """The output without the folders of this machine."""
        return output.replace(str(self.folder), "FOLDER").replace(str(ROOT), "PACELINE")

    def check(self, what: str, holds: bool) -> None:
        """Notes whether something that the page says holds for the last command."""
        self.commands[-1]["checks"][what] = bool(holds)

    def has(self, output: str, *patterns: str) -> None:
        for pattern in patterns:
            self.check(f"it prints {pattern}", re.search(pattern, output, re.MULTILINE) is not None)

    def file(self, pattern: str) -> None:
        self.check(f"there is {pattern}", any(path.stat().st_size > 0 for path in self.work.glob(pattern)))


def digest(output: str) -> str | None:
    found = re.search(r"^Weights: sha256 ([0-9a-f]{64})$", output, re.MULTILINE)
    return found and found[1]


def same_weights(task: Task, one: str, other: str) -> None:
    task.check("both runs end with the same weights", digest(one) is not None and digest(one) == digest(other))


def learn(task: Task) -> None:
    lesson = "docs/lessons/{}.md".format
    first = task.run(lesson("1-first-run"), "paceline train --steps 40 --samples 2048")
    task.has(first, r"^Epoch 3/3.*: loss ", r"^Run folder: runs/")
    task.file("runs/*-cnn-ddp/summary.json")
    again = task.run(lesson("1-first-run"), "paceline train --steps 40 --samples 2048 --nproc 1 --accumulate 2")
    same_weights(task, first, again)
    second = task.run(lesson("2-data-parallelism"), "paceline train --steps 20 --samples 1024 --transport thread")
    same_weights(task, second, task.run(lesson("2-data-parallelism"), "paceline train --steps 20 --samples 1024 --transport tcp"))
    bench = task.run(lesson("3-communication"), "paceline bench all_reduce -b 1K -e 4M -f 16 --link")
    task.has(bench, r"busbw")
    profiled = task.run(lesson("4-where-time-goes"), "paceline train --link 1gbit,50us --samples 2048 --steps 20 --strategy ddp --profile")
    task.has(profiled, r"^Advice: ", r"^Traces: profile/ddp", r"^Anatomy of a step")
    task.run(lesson("4-where-time-goes"), "paceline analyze profile/ddp")
    task.file("reports/ddp/summary.html")
    memory = task.run(lesson("5-where-memory-goes"), "paceline predict --memory --nproc 8,64")
    task.has(memory, r"sharded3")
    slow = task.run(lesson("6-slow-network"), "paceline train --recipe tiny-llama --link 100mbit,1ms --strategy fp16", ("", " --steps 10"))
    task.has(slow, r"exposed communication")
    links = task.run(lesson("7-choosing-a-network"), "paceline links --params 25.6e6 --compute-ms 50 --nproc 8 --link 10gbe")
    task.has(links, r"10gbe")
    text = task.run(lesson("8-language-model"), "paceline train --recipe tiny-lm", ("--steps 300 --sample-every 100", "--steps 20"))
    task.has(text, r"perplexity")


def plan(task: Task) -> None:
    page = "docs/prediction.md"
    run = task.run(page, "paceline train --nproc 2 --profile --profile-active 50")
    task.has(run, r"^Traces: profile/ddp")
    traced = task.run(page, "paceline predict --trace profile/ddp")
    task.has(traced, r"^ *64 +ndr ", r"^ *8 +25gbe ")
    stated = task.run("README.md", "paceline predict --gradient-bytes 102.4e6")
    task.has(stated, r"^ *64 +100gbe ")
    task.file("charts/predict_efficiency.png")
    fits = task.run("README.md", "paceline predict --memory --nproc 8,64")
    # The README's words about this table.
    task.has(fits, r"31,868", r"16,277", r"10,629", r"4,981")


def extend(task: Task) -> None:
    page = "docs/extending.md"
    task.run(page, "paceline new my-project")
    task.work /= "my-project"
    shutil.copy(ROOT / "Cargo.lock", task.work)
    task.has(task.run(page, "cargo test", limit_s=COMPILE_LIMIT_S), r"^test result: ok\. [1-9]")
    start = "cargo run --release -- train --model scaled_net"
    runs = [task.run(page, start, ("one_reduce", name), COMPILE_LIMIT_S) for name in ["one_reduce", "ddp", "sharded3"]]
    for run in runs:
        task.has(run, r"^Evaluation accuracy: (9\d|100)\.")
    same_weights(task, runs[1], runs[2])


def text(task: Task) -> None:
    page = "docs/lessons/8-language-model.md"
    trained = task.run(page, 'paceline train --recipe tiny-lm --data-dir "$PAGES" --steps 300')
    task.has(trained, r"^Step 300, a text: ", r"perplexity \d")
    losses = [float(loss) for loss in re.findall(r"evaluation loss (\d+\.\d+)|^Evaluation loss: (\d+\.\d+)", trained, re.M) for loss in loss if loss]
    task.check("the held-out loss is below that of a guess among 256 bytes, 5.55", bool(losses) and losses[-1] < 5.55)
    made = task.run(page, "paceline generate --model my-model --prompt 'The rank ' --max-tokens 80 --temperature 0.7")
    task.check("the text begins with the prompt and goes on", made.startswith("The rank ") and len(made.strip()) > 40)
    task.run(page, "paceline tokenizer train")
    task.file("tokenizer.json")
    words = task.run(page, 'paceline train --recipe tiny-lm --data-dir "$PAGES" --tokenizer', ("", " --save words"))
    task.has(words, r"^Evaluation loss: ")
    own = task.run("docs/language-models.md", "paceline generate --model my-model", ("my-model", "words"))
    task.check("the text begins with the prompt and goes on", own.startswith("The ") and len(own.strip()) > 20)


TASKS: dict[str, Callable[[Task], None]] = {"learn": learn, "plan": plan, "extend": extend, "text": text}


def main() -> int:
    parser = argparse.ArgumentParser(description="Do what four kinds of readers come for, with the commands of the pages.")
    parser.add_argument("--paceline", type=Path, default=Path("target/release/paceline"), metavar="PATH")
    parser.add_argument("--task", choices=[*TASKS, "all"], default="all")
    parser.add_argument("--out", type=Path, default=Path("results/four_tasks.json"), metavar="FILE")
    arguments = parser.parse_args()
    paceline = program(parser, "--paceline", arguments.paceline)
    names = list(TASKS) if arguments.task == "all" else [arguments.task]
    record: Record = {**provenance(), "tasks": {}}
    rows = [["task", "commands", "minutes", "checks", "failed"]]
    failures = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix=f"four-tasks-{name}-") as folder:
            task = Task(name, Path(folder), paceline)
            begin = time.monotonic()
            TASKS[name](task)
            minutes = (time.monotonic() - begin) / 60
        checks = [(command["command"], *check) for command in task.commands for check in command["checks"].items()]
        failed = [f"{name}: {command}\n    not so: {what}" for command, what, holds in checks if not holds]
        failures += failed
        record["tasks"][name] = {"minutes": round(minutes, 2), "commands": task.commands}
        rows.append([name, str(len(task.commands)), f"{minutes:.1f}", str(len(checks)), str(len(failed))])
    print(f"\n{aligned(rows, {0})}")
    print("\n".join(failures))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
