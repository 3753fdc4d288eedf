"""Which mutants of the protocols a simulated cluster finds: each patch of bench/protocol_mutants is applied to a copy, built, and run under many schedules.
Those from 31 on, of ranks that come and go, run the tests of such runs instead.

    python3 bench/protocol_mutants.py                                  # fifty builds
    python3 bench/protocol_mutants.py --only 1 9 --schedules 10000     # those patches
    python3 bench/protocol_mutants.py --run ''                         # only builds: does each patch still apply and compile?

`--build` and `--run` are commands in the copy; {first} and {end} are filled in. `--run` may be given several times: the commands run in order, up to
the first that exits with a code other than 0. First all must succeed without a patch.
A mutant is `found` if that command names a seed (a line with PACELINE_SEEDS=S) or a test that has failed, `endless` if it does not end within `--limit`
seconds, an `error` if it fails and names neither, and `nothing` otherwise.

The exit code is 1 if fewer than `--at-least` mutants are found, or if a schedule fails without a patch. Needs Git and Cargo.
"""
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from common import ROOT, Record, aligned, arguments_for, ended, provenance, write
from mutants import copy_tree

PATCHES = ROOT / "bench/protocol_mutants"
SCHEDULES = ["python3 bench/cluster.py --first --seeds {first}..{end}"]
# Of ranks that come and go, the quick ones first.
TESTS = [
    f"cargo test --locked --workspace {which}"
    for which in ("--lib -- membership", "--test all -- commit", "--test cluster -- membership", "--test program -- elastic:: generations::")
]
FIRST_OF_TESTS = 31


def check(commands: list[str], tree: Path, environment: dict[str, str], limit_s: float) -> Record:
    """How the commands ended, with the test, or the seed and the words of the schedule, that failed."""
    begin = time.monotonic()
    outcome: Record = {"verdict": "nothing", "seed": None, "said": ""}
    for command in commands:
        code, output, errors = ended(shlex.split(command), tree, limit_s, env=environment, text=True)
        if code == 0:
            continue
        lines = [line.strip() for line in f"{output}\n{errors}".splitlines() if line.strip()]
        seeds = [found for line in lines if (found := re.search(r"\bPACELINE_SEEDS=(\d+)", line))]
        tests = [line for line in lines if re.fullmatch(r"test \S+ \.\.\. FAILED", line)]
        verdict = "endless" if code is None else "found" if seeds or tests else "error"
        said = seeds[0].string if seeds else " | ".join(tests or lines[-2:])
        outcome = {"verdict": verdict, "seed": int(seeds[0][1]) if seeds else None, "said": said}
        break
    return outcome | {"seconds": round(time.monotonic() - begin, 1)}


def main() -> int:
    parser = arguments_for(__doc__, "protocol_mutants.json", rounds=0, has_program=False)
    parser.add_argument("--target-dir", type=Path, default=ROOT / "target/protocol_mutants", metavar="DIR", help="where the copy is built")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of patches")
    parser.add_argument("--build", default="cargo test --locked --workspace --lib --test cluster --test all --test program --no-run", metavar="COMMAND", help="(default: %(default)s)")
    parser.add_argument("--run", action="append", metavar="COMMAND", help="(default: schedules up to 30, tests of ranks that come and go from 31 on)")
    parser.add_argument("--schedules", type=int, default=300, metavar="N", help="for each mutant (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first schedule (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="for the schedules of a mutant (default: %(default)s)")
    parser.add_argument("--at-least", type=int, metavar="N", help="how many must be found (default: 47, or all of --only)")
    args = parser.parse_args()
    target = Path(os.path.abspath(args.target_dir))
    tree, environment = target / "tree", os.environ | {"CARGO_TARGET_DIR": str(target), "CARGO_INCREMENTAL": "0"}
    run = [of.format(first=args.seed, end=args.seed + args.schedules) for of in args.run or SCHEDULES + TESTS if of]
    copy_tree(tree)
    record: Record = provenance() | {"run": run, "sound": None, "mutants": []}
    apply = ["git", "apply", "--unsafe-paths", f"--directory={tree}"]
    numbered = {int(patch.name[:2]): patch for patch in sorted(PATCHES.glob("*.patch"))}
    for number in [0, *(args.only or numbered)]:
        patch = [numbered[number]] if number else []
        if patch:
            subprocess.run([*apply, *patch], cwd="/", check=True)
        # A patch that does not compile is no mutant.
        subprocess.run(shlex.split(args.build), cwd=tree, check=True, env=environment)
        of_mutant = [of for of in run if args.run or not number or (of in TESTS) == (number >= FIRST_OF_TESTS)]
        outcome = check(of_mutant, tree, environment, args.limit) if run else {"verdict": "built", "seed": None, "said": "", "seconds": 0.0}
        if patch:
            subprocess.run([*apply, "-R", *patch], cwd="/", check=True)
            record["mutants"].append({"mutant": patch[0].stem} | outcome)
        else:
            record["sound"] = outcome
        print(patch[0].stem if patch else "without a patch", outcome, file=sys.stderr, flush=True)
        if run:
            write(args.out, record)
        if not patch and outcome["verdict"] not in ("nothing", "built"):
            return 1
    rows = [["mutant", "verdict", "seed", "s", "said"]]
    rows += [[of["mutant"], of["verdict"], "" if of["seed"] is None else str(of["seed"]), str(of["seconds"]), of["said"][:90]] for of in record["mutants"]]
    print(aligned(rows, left={0, 1, 4}))
    found, count = sum(of["verdict"] == "found" for of in record["mutants"]), len(record["mutants"])
    if not run:
        return 0
    print(f"{found} of {count} found")
    return 1 if found < (args.at_least or (count if args.only else 47)) else 0


if __name__ == "__main__":
    sys.exit(main())
