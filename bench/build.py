"""How long a cold release build takes, in all and per crate: checkouts of the project in turn, each into an empty folder.

    git worktree add ../before COMMIT
    python3 bench/build.py --tree before=../before --tree after=.

Everything is fetched before the first build. `cpu_s` is processor time of all compilers, `wall_s` the time of the build; a crate's
time is that of its compiler, from start to end, beside the other ones. Writes `results/build.json`. Needs 3 GB in the folder of
temporary files.
"""
import json
import os
import re
import resource
import tempfile
import time
from pathlib import Path

from common import ROOT, Record, aligned, arguments_for, commit, parsed, provenance, run, write

TIMEOUT_S = 3600.0
# Crates that take less are added up.
SHOWN_S = 5.0


def crates(report: Path) -> dict[str, float]:
    """The seconds of each crate, as cargo's own report has them."""
    units = re.search(r"UNIT_DATA = (\[.*?\]);\n", report.read_text(), re.S)
    if units is None:
        raise SystemExit(f"{report.name} has no UNIT_DATA: cargo writes its reports in another form now")
    seconds: dict[str, float] = {}
    for unit in json.loads(units.group(1)):
        seconds[unit["name"]] = seconds.get(unit["name"], 0.0) + unit["duration"]
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def build(tree: Path) -> Record:
    with tempfile.TemporaryDirectory(prefix="paceline-build-") as target:
        command = ["cargo", "build", "--release", "-p", "paceline", "--locked", "--offline", "--timings", "--target-dir", target]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        run(command, tree, TIMEOUT_S)
        wall_s, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        (report,) = Path(target, "cargo-timings").glob("cargo-timing-2*.html")
        return {
            "wall_s": round(wall_s, 1),
            "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
            "program_mb": round(Path(target, "release", "paceline").stat().st_size / 1e6, 1),
            "crates_s": crates(report),
        }


def main() -> None:
    parser = arguments_for(__doc__, "build.json", rounds=1, has_program=False)
    parser.add_argument("--tree", action="append", metavar="NAME=FOLDER", help="a checkout (the project's own by default)")
    args = parsed(parser)
    trees = {name: Path(os.path.abspath(folder)) for name, _, folder in (tree.partition("=") for tree in args.tree or [f"own={ROOT}"])}
    if lost := [name for name, tree in trees.items() if not (tree / "Cargo.toml").is_file()]:
        parser.error(f"--tree: pass NAME=FOLDER, a folder with a Cargo.toml, not {', '.join(lost)}")
    for tree in trees.values():
        run(["cargo", "fetch", "--locked"], tree, TIMEOUT_S)
    rounds = [{name: build(tree) for name, tree in trees.items()} for _ in range(args.rounds)]
    builds = {name: {"commit": commit(tree), "builds": [of[name] for of in rounds]} for name, tree in trees.items()}
    write(args.out, provenance() | {"trees": builds})
    first = [rounds[0][name] for name in trees]
    slowest = {name: max(of["crates_s"].get(name, 0.0) for of in first) for of in first for name in of["crates_s"]}
    large = sorted((name for name, seconds in slowest.items() if seconds >= SHOWN_S), key=slowest.get, reverse=True)
    rows = [["", *trees], *([f"{key[:-2]}, s", *(f"{of[key]:.0f}" for of in first)] for key in ("wall_s", "cpu_s"))]
    rows += [[name, *(f"{of['crates_s'].get(name, 0.0):.1f}" for of in first)] for name in large]
    rows += [["others", *(f"{sum(seconds for name, seconds in of['crates_s'].items() if name not in large):.1f}" for of in first)]]
    print(aligned(rows, left={0}))


if __name__ == "__main__":
    main()
