"""Compares what a page shows with where it comes from: outputs with those of its commands, code with its file.

    scripts/docs_shape.py PAGE OUTPUTS

scripts/docs-commands.sh runs the commands and writes OUTPUTS: a line "@@ N" before the output of the command in line N. A block marked
```text belongs to the commands of the last block marked ```sh, or to the comment <!-- output of: COMMAND --> before it. Each line of the
block must be a line of their output, in the same order: the same words, columns and digests of weights, not numbers or times. Lines, columns and words
(...) may be left out. A comment just before a block changes this:

    <!-- not compared: put together from two outputs -->    the block is left out

A block marked ```rust has lines of the file in the comment before it, as they are, in their order. A line `// ...` stands for lines that
are left out:

    <!-- lines of: crates/strategies/src/simple_ddp.rs -->
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# A digest that is not of weights; a number, with its sign if it begins a word.
DIGEST = re.compile(r"(?<![\w.])(?=[0-9a-f]*\d)[0-9a-f]{8,63}\b")
WEIGHTS = re.compile(r"[0-9a-f]{64}")
NUMBER = re.compile(r"(?:(?<!\w)[-+])?\d[\d,.]*(?:e[-+]\d+)?")
# The file and the text of a block of code, and a line of it that stands for others.
CODE = re.compile(r"^(?:<!-- lines of: (\S+) -->\n)?```rust\n(.*?)^```", re.DOTALL | re.MULTILINE)
LEFT_OUT = re.compile(r"^ *// \.\.\.\n", re.MULTILINE)
# Which advice is given depends on times.
ADVICE = ("advice:", "Advice:")


def words(line: str) -> list[str]:
    """The words of a line: a number, a digest and an empty cell as `#`, the rule of a table as `--`."""
    found = []
    for word in line.split():
        if not WEIGHTS.fullmatch(word.strip('",')):
            word = NUMBER.sub("#", DIGEST.sub("#", word))
        if re.fullmatch(r"-{2,}", word):
            word = "--"
        found.append("#" if word in ("-", "–") else word)
    if found[:1] in (["main"], ["buckets"]):
        return found[:1]  # the picture of a step
    return [word for word in found if word != "..."]


def agrees(shown: list[str], printed: list[str]) -> bool:
    """Whether the shown words are among the printed ones, in their order."""
    rest = iter(printed)
    return all(word in rest for word in shown)


def faults(page: list[str], outputs: dict[int, list[list[str]]]) -> list[str]:
    """The lines of a page that no command prints, with their numbers."""
    found, fence, source, is_compared = [], "", 0, True
    printed: list[list[str]] = []
    for number, line in enumerate(page, 1):
        if line.startswith("```"):
            fence = "" if fence else line[3:] or "?"
            source = number if fence == "sh" else source
            printed = [words for key in sorted(outputs) if source <= key < number for words in outputs[key]]
            is_compared = is_compared or not fence
        elif not fence and line.strip():
            is_compared = not line.startswith("<!-- not compared:")
            source = number if line.startswith("<!-- output of:") else source
        elif fence == "text" and printed and is_compared and (shown := words(line)) and shown[0] not in ADVICE:
            at = next((at for at, words in enumerate(printed) if agrees(shown, words)), None)
            if at is None:
                found.append(f"{number}: {line}")
            else:
                printed = printed[at + 1:] or [[]]
    return found


def changed(page: str) -> list[str]:
    """The blocks of code that are not in their files, with the numbers of their lines."""
    found = []
    for block in CODE.finditer(page):
        number = page.count("\n", 0, block.start(2)) + 1
        if not block[1]:
            found.append(f"{number}: no comment says from which file this code is")
            continue
        at, source = 0, (ROOT / block[1]).read_text(encoding="utf-8")
        for part in LEFT_OUT.split(block[2]):
            begin = f"\n{source}".find(f"\n{part}", at)
            if begin < 0:
                found.append(f"{number}: not in {block[1]}, or not in this order: {part.strip().splitlines()[0]}")
                break
            at = begin + len(part)
    return found


page, lines = (open(path, encoding="utf-8", errors="replace").read().splitlines() for path in sys.argv[1:3])
outputs: dict[int, list[list[str]]] = {}
for line in lines:
    if line.startswith("@@ "):
        outputs[int(line[3:])] = last = []
    else:
        last.append(words(line))
lost = faults(page, outputs) + changed("\n".join(page) + "\n")
print("\n".join(lost))
sys.exit(bool(lost))
