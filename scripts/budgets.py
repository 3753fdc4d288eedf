"""Holds the size and the shape of the code to `scripts/budgets.toml`.

    python3 scripts/budgets.py            # the totals; exit code 1 if a number is above its budget
    python3 scripts/budgets.py --all      # each folder too
    python3 scripts/budgets.py --set      # lowers budgets to what is counted; raises none

Input: the files that git knows, formatted by rustfmt with the settings of today. A line counts unless it is blank or all of it is a comment;
one of more than WIDEST characters counts as several. A docstring of Python is code. The shape is what `scripts/shape.py` counts.

A budget is raised by a commit of its own, which changes nothing else and has "issue N, allowance L" in its message: the lines that issue N may add
in all. The raises since the budgets began are listed; the script fails on one that breaks this rule. Commits that merge are not looked at.
"""
import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import shape

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = "scripts/budgets.toml"
LANGUAGES = {
    ".rs": "Rust", ".cu": "CUDA", ".cuh": "CUDA", ".h": "CUDA", ".c": "CUDA", ".py": "Python", ".sh": "shell", ".js": "pages", ".css": "pages",
}  # fmt: skip
WIDEST = 180
SECTIONS = ("lines", "totals", "shape")
CORE = {"numeric", "trace", "memory", "kernels", "collectives", "rendezvous", "model", "strategies", "schedule", "cuda", "data"}
# What opens an item that only tests compile, and what closes it on a line of its own at the same depth.
TEST_ITEM = re.compile(r"(\s*)#\[cfg\((all\()?test\b")
RAISE = re.compile(r"issue (\d+), allowance ([\d,]+)")

# An unpacked archive has files only.
HAS_GIT = shutil.which("git") is not None and subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode == 0


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def code_lines(path: Path, text: str) -> list[str]:
    """The lines that are neither blank nor only a comment."""
    is_c = path.suffix not in (".rs", ".py", ".sh", "")
    kept, in_comment = [], False
    for line in text.splitlines():
        word = line.strip()
        if in_comment or is_c and word.startswith("/*"):
            in_comment = "*/" not in word
            if in_comment or word.endswith("*/"):
                continue
        if word and not word.startswith("#" if path.suffix in (".py", ".sh", "") else "//"):
            kept.append(line)
    return kept


def split_tests(lines: list[str]) -> tuple[list[str], list[str]]:
    """The lines of a Rust file that ship, and those that only tests compile."""
    code: list[str] = []
    tests: list[str] = []
    depth = None
    for line in lines:
        opens = TEST_ITEM.match(line)
        if depth is None and opens:
            depth = opens[1]
        (code if depth is None else tests).append(line)
        is_outermost = depth is not None and line.startswith(depth) and not line[len(depth) :].startswith((" ", "#"))
        if is_outermost and line.rstrip().endswith(("}", ";", ",")):
            depth = None
    return code, tests


def size(lines: list[str]) -> int:
    return sum(-(-len(line) // WIDEST) for line in lines)


def count() -> Counter[str]:
    """Lines by folder and kind, such as `crates/kernels CUDA` or `crates/kernels tests`."""
    counted: Counter[str] = Counter()
    known = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines() if HAS_GIT else map(str, ROOT.rglob("*"))
    for name in known:
        path = (ROOT / name).relative_to(ROOT)
        language = "shell" if path == Path(".ci/run") else LANGUAGES.get(path.suffix)
        if language is None or path.parts[0] == "target" or not (ROOT / path).is_file():
            continue
        folder = "/".join(path.parts[: 2 if path.parts[0] in ("crates", "testing") else 1])
        lines = code_lines(path, (ROOT / path).read_text(encoding="utf-8", errors="replace"))
        tests: list[str] = []
        if "tests" in path.parts or path.name == "tests.rs" or path.name.endswith("_tests.rs"):
            lines, tests = ([], lines) if language in ("Rust", "CUDA") else (lines, [])
        elif language == "Rust":
            lines, tests = split_tests(lines)
        kind = next((part for part in path.parts if part in ("examples", "benches")), language)
        counted[f"{folder} {kind}"] += size(lines)
        counted[f"{folder} tests"] += size(tests)
    return +counted


def totals(counted: Counter[str]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for name, lines in counted.items():
        folder, kind = name.split()
        crate = folder.rpartition("/")[2]
        if kind == "Rust" and folder.startswith(("crates/", "testing/", "python")):
            kind = "core crates" if crate in CORE else crate if crate == "emulated-card" else "outer crates"
        sums["fuzz targets" if kind == "Rust" else kind] += lines
        sums["all"] += lines
    return sums


def over(title: str, counted: Counter[str], budgets: dict[str, int], show: bool) -> list[str]:
    """Shows one section, and returns what is above its budget."""
    wrong = []
    if show:
        print(f"\n{title:36}{'now':>10}{'budget':>10}")
    for name in sorted(counted | Counter(budgets)):
        now, budget = counted[name], budgets.get(name, 0)
        if show:
            print(f"{name:36}{now:>10,}{budget:>10,}")
        if now > budget:
            wrong.append(f"{title}: {name}: {now:,} is {now - budget:,} above its budget of {budget:,}")
    return wrong


def budgets_of(commit: str) -> Counter[tuple[str, str]]:
    """The budgets at a commit, by section and name. None where there is no such file."""
    shown = subprocess.run(["git", "show", f"{commit}:{BUDGETS}"], cwd=ROOT, capture_output=True, text=True)
    stated = tomllib.loads(shown.stdout) if shown.returncode == 0 else {}
    return Counter({(section, name): budget for section in SECTIONS for name, budget in stated.get(section, {}).items()})


def check_raises() -> list[str]:
    """Lists the commits that raised a budget, and returns what breaks the rule. A raise that a later commit has taken back counts for none."""
    wrong = []
    if not HAS_GIT or git("rev-parse", "--is-shallow-repository").strip() == "true":
        print("\nThe whole history is not here: raises of budgets are not checked.")
        return wrong
    lowest: dict[tuple[str, str], int] = {}
    # By issue: the lines by which its commits raise budgets, and the allowance that they name.
    raised: Counter[str] = Counter()
    allowed: dict[str, int] = {}
    commits = git("log", "--no-merges", "--format=%h", "--", BUDGETS).split()
    for commit in commits[:-1]:
        before, after = budgets_of(f"{commit}^"), budgets_of(commit)
        raises: Counter[str] = Counter()
        for key in {**before, **after}:
            was, now = before[key], after[key]
            if now > was and lowest.get(key, now) > was:
                raises[key[0]] += now - was
            lowest[key] = min(was, lowest.get(key, now))
        if not raises:
            continue
        print(f"\nraised by {git('show', '-s', '--format=%h %as %s', commit).strip()}: " + ", ".join(f"{k} +{n:,}" for k, n in raises.items()))
        if git("show", "--name-only", "--format=", commit).split() != [BUDGETS]:
            wrong.append(f"{commit} raises a budget and changes other files: a raise is a commit of its own")
        stated = RAISE.search(git("show", "-s", "--format=%B", commit))
        if stated is None:
            wrong.append(f'{commit} raises a budget without "issue N, allowance L" in its message')
            continue
        raised[stated[1]] += raises["lines"]
        allowed.setdefault(stated[1], int(stated[2].replace(",", "")))
    for issue, lines in raised.items():
        if lines > allowed[issue]:
            wrong.append(f"issue {issue} raises budgets by {lines:,} lines; its allowance is {allowed[issue]:,}")
    return wrong


def write(sections: dict[str, Counter[str]], budgets: dict[str, dict[str, int]]) -> None:
    """Lowers each budget to what is counted, and drops those of folders that are gone."""
    text = (ROOT / BUDGETS).read_text()
    for section, counted in sections.items():
        for name, budget in budgets[section].items():
            row = f'"{name}" = {budget}\n'
            text = text.replace(row, "" if section == "lines" and not counted[name] else f'"{name}" = {min(budget, counted[name])}\n')
    (ROOT / BUDGETS).write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="show each folder")
    parser.add_argument("--set", action="store_true", help="lower budgets to what is counted")
    args = parser.parse_args()
    budgets = tomllib.loads((ROOT / BUDGETS).read_text())
    counted = count()
    sections = {"lines": counted, "totals": totals(counted), "shape": shape.count(ROOT, CORE)}
    if args.set:
        write(sections, budgets)
        budgets = tomllib.loads((ROOT / BUDGETS).read_text())
    wrong = [w for title, now in sections.items() for w in over(title, now, budgets[title], args.all or title != "lines")]
    settings = (ROOT / "rustfmt.toml").read_text()
    if settings != budgets["rustfmt"]["settings"]:
        wrong.append("rustfmt.toml is not the one with which the budgets were counted")
    wrong += check_raises()
    if wrong:
        sys.exit("\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
