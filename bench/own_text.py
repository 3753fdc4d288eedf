"""Trains a small language model on a folder of texts, from nothing, and counts how many of the words that it makes are real.

    cargo build --release
    python3 bench/own_text.py                    # 5 minutes on the pages in docs/
    python3 bench/own_text.py --texts ~/notes --minutes 10

In an empty folder, with 2 ranks of 1 thread: `paceline train --recipe tiny-lm` trains on copies of the texts and saves the
weights, and `paceline generate` makes 1,000 characters with them. A word is real if it occurs in the texts. The number of
steps follows from a short run before: training takes as much processor time as two cores have in `--minutes`, so that a
busy machine trains as much as an idle one, only longer.

Prints the text, the counts and the evaluation, and writes them with date, machine and commit to `results/own_text.json`.
Only the standard library is needed.

Exits with 0 if at least 80 % of the words are real, with 1 if fewer are or a run failed, and with 2 on a wrong argument.
"""
import argparse
import json
import re
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, RunFailed, arguments_for, parsed, provenance, run, shown, write

GOAL = 0.8
CHARACTERS = 1000
CORES = 2
PROBE_STEPS = 50
TIMEOUT_FACTOR = 8  # how much longer than on two idle cores training may take
ENDINGS = {".txt", ".md"}


def parse_arguments() -> argparse.Namespace:
    parser = arguments_for(__doc__, "own_text.json", rounds=0)
    parser.add_argument("--texts", type=Path, default=ROOT / "docs", metavar="DIR", help="(default: docs)")
    parser.add_argument("--minutes", type=float, default=5, help="how long training takes (default: 5)")
    arguments = parsed(parser)
    if not 0 < arguments.minutes <= 600:
        parser.error("--minutes must be above 0 and at most 600")
    if not arguments.texts.is_dir():
        parser.error(f"--texts {arguments.texts}: no such folder")
    return arguments


def words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())


def copy_texts(source: Path, to: Path) -> str:
    """Copies the texts and returns all of them."""
    files = sorted(path for path in source.rglob("*") if path.suffix in ENDINGS and path.is_file())
    for path in files:
        target = to / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return "\n".join(path.read_text() for path in files)


def train(paceline: Path, folder: Path, steps: int, minutes: float) -> dict:
    """Trains so many steps. Returns the summary of the run, with its time by this clock and its processor time."""
    command = [paceline, "train", "--recipe", "tiny-lm", "--data-dir", "texts", "--save", "model", "--json", "run.json"]
    begin, before = time.monotonic(), processor_s()
    run([*command, "--steps", str(steps), "--quiet"], folder, 60 * minutes * TIMEOUT_FACTOR + 300)
    summary = json.loads((folder / "run.json").read_text())
    return {**summary, "wall_s": time.monotonic() - begin, "processor_s": processor_s() - before}


def processor_s() -> float:
    """The processor time of all programs that were run, with their ranks."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(arguments: argparse.Namespace, folder: Path) -> dict:
    text = copy_texts(arguments.texts, folder / "texts")
    probe = train(arguments.paceline, folder, PROBE_STEPS, arguments.minutes)
    shutil.rmtree(folder / "model")
    # Its start is counted with its steps, so the time is rather too long.
    step_s = probe["processor_s"] / PROBE_STEPS
    steps = max(PROBE_STEPS, int(60 * arguments.minutes * CORES / step_s))
    trained = train(arguments.paceline, folder, steps, arguments.minutes)
    command = [arguments.paceline, "generate", "--model", "model", "--prompt", "The ", "--max-tokens", str(CHARACTERS)]
    made = run([*command, "--temperature", "0.7", "--top-p", "0.9", "--seed", "1"], folder, 300)
    known = set(words(text))
    # The last word may be cut off.
    found = words(made)[:-1]
    return {
        "characters_of_texts": len(text),
        "words_of_texts": len(known),
        "steps": steps,
        "train_s": trained["wall_s"],
        "train_processor_s": trained["processor_s"],
        "eval_loss": trained["eval_loss"],
        "eval_perplexity": trained["eval_perplexity"],
        "characters": len(made),
        "words": len(found),
        "real_words": sum(word in known for word in found),
        "text": made,
    }


def main() -> int:
    arguments = parse_arguments()
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(arguments, Path(folder))
    except RunFailed as error:
        print(f"own_text: {error}", file=sys.stderr)
        return 1
    share = result["real_words"] / max(1, result["words"])
    print(result["text"])
    print(
        f"{result['steps']} steps in {result['train_s']:.0f} s, with {result['train_processor_s']:.0f} s of processor time; "
        f"evaluation loss {result['eval_loss']:.3f} per byte, "
        f"perplexity {result['eval_perplexity']:.2f}; {result['real_words']} of {result['words']} words "
        f"({100 * share:.0f} %) occur in the texts"
    )
    record = {**provenance(), "texts": shown(arguments.texts), "real_share": share, **result}
    write(arguments.out, record)
    return 0 if share >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
