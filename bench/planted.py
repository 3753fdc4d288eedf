"""Which planted bugs of training on several ranks are found: each patch of bench/planted is applied to a copy, built, and two layouts are compared.

    python3 bench/planted.py                 # six builds
    python3 bench/planted.py --only 1 9      # those patches
    python3 bench/planted.py --alone         # thirty builds, each with one bug

`paceline check --numerics A B` names the first tensor in which the layouts A and B of a patch differ. Where no other layout has the same bits, A is a
run of the program without the bug, and `compare --numerics` compares both. A bug is located if step, phase, micro-batch, tensor and ranks are those that
the patch states. Finding `earlier` is naming an earlier phase or block of the same step and the same ranks, and a bug is `seen` if another difference shows. The exit code is 1 if a bug shows nowhere, or if the layouts differ without it.
Needs Git and Cargo.
"""
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from common import ROOT, Record, aligned, arguments_for, ended, provenance, toml, write
from mutants import copy_tree

PLANTED = ROOT / "bench/planted"
RUN_SECONDS = 120
PHASES = ("input", "forward", "loss", "backward", "gradient", "reduced", "norm", "weights", "buffers")
# Bugs that share a build: none shows before another in the layouts of that one.
TOGETHER = (
    (1, 3, 4, 5, 10, 11, 14, 15, 18, 21, 23, 26, 27, 29, 30),
    (2, 6, 13, 19, 20, 24),
    (7, 28),
    (12, 25),
    (9, 16, 22),
    (8, 17),
)


def stated(patch: Path) -> dict[str, str]:
    """The lines before a patch."""
    head = patch.read_text().split("diff --git", 1)[0]
    return dict(line.split(": ", 1) for line in head.splitlines())


def flags_of(of: dict[str, str], side: str) -> str:
    model, flags = of["Model"].split(": ", 1)
    # Words follow a comma.
    layout = re.split(r", (?=by|stopped)", of[side])[0]
    return f"--model {model} {flags.replace(' --steps 4', '')} {layout}"


def train(binary: Path, folder: Path, name: str, flags: str, steps: int) -> str:
    """The last line of a run's errors; empty if it came to its end."""
    always = f"--steps {steps} --warmup-steps 0 --quiet --watch-passes=digests --name {name}"
    code, _, errors = ended([binary, "train", *flags.split(), *always.split()], folder, RUN_SECONDS, text=True)
    lines = [line for line in (errors or "").splitlines() if "error" in line]
    return "" if code == 0 else (lines or ["error: it ran too long"])[0]


def first_difference(sound: Path, binary: Path, folder: Path, of: dict[str, str]) -> str:
    """What the finder says of both layouts; empty without a difference."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sides = {side: flags_of(of, side) for side in "AB"}
    problems, steps = [], 3
    if "without the bug" in of["A"]:
        problems = [train(program, folder, side, sides[side], steps) for side, program in (("A", sound), ("B", binary))]
        command = [binary, "compare", "--numerics", "runs/A", "runs/B"]
    else:
        if "resumed" in of["B"]:
            steps = 4
            problems = [train(binary, folder, "saved", f"{sides['B']} --save saved", 2)]
            sides["B"] += " --resume saved"
        for side, flags in sides.items():
            (folder / f"{side}.toml").write_text(toml(flags))
        command = [binary, "check", "--numerics", "A.toml", "B.toml", "--steps", str(steps)]
    code, output, errors = ended(command, folder, RUN_SECONDS, text=True, env=os.environ | {"COLUMNS": "200"})
    lines = output.splitlines()
    found = [at for at, line in enumerate(lines) if line.startswith("The first difference")]
    if found:
        values = [line.strip() for line in lines[found[0] + 1 : found[0] + 3] if line.startswith("  ")]
        return " | ".join([lines[found[0]], *values])
    return "" if "No difference" in output else " ".join([*problems, errors.strip()]) or f"error: exit code {code}"


def numbers(text: str) -> set[int]:
    """The numbers of a list with ranges, as in `0, 2-3`."""
    parts = (part.split("-") for part in re.findall(r"\d+(?:-\d+)?", text))
    return {number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)}


def verdict(said: str, shows: str) -> str:
    """Whether all that the patch states is in the finder's line."""
    if not said:
        return "NOTHING"
    place = said.removeprefix("The first difference: ").split(" | ")[0]
    step, phase, *rest = [word.strip() for word in shows.split(",")]
    words = [word.strip() for word in re.split(r", (?!\d)", place)]
    # Of the first micro-batch, and with those that follow a semicolon.
    in_b = [numbers(ranks) for ranks in re.findall(r"ranks? ([\d, -]+?)(?: \(as its micro-batch \d+\))? in B", place)]
    of_b = in_b[:1] + [set().union(*in_b)]
    batches = re.findall(r"micro-batch (\d+)", place)
    is_there = step == words[0] and phase in words and bool(in_b)
    for part in rest:
        if part.startswith("rank"):
            is_there = is_there and numbers(part) in of_b
        elif part.startswith("micro-batch"):
            is_there = is_there and part.split()[1] in batches
        else:
            is_there = is_there and any(tensor in words for tensor in part.split(" or "))
    if is_there:
        return "located"
    # The first of several blocks or phases in which the bug shows.
    phases = [PHASES.index(word) for word in words if word in PHASES]
    is_before = step == words[0] and bool(phases) and phases[0] <= PHASES.index(phase)
    return "earlier" if is_before and all(numbers(part) in of_b for part in rest if part.startswith("rank")) else "seen"


def main() -> int:
    parser = arguments_for(__doc__, "planted.json", rounds=0, has_program=False)
    parser.add_argument("--target-dir", type=Path, default=ROOT / "target/planted", metavar="DIR", help="where the copy is built")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of patches")
    parser.add_argument("--alone", action="store_true", help="build each bug by itself")
    parser.add_argument("--sound", type=Path, default=ROOT / "target/debug/paceline", metavar="PROGRAM",
                        help="a build without a bug, for which the layouts must agree (default: target/debug/paceline)")
    args = parser.parse_args()
    begin, target = time.monotonic(), Path(os.path.abspath(args.target_dir))
    tree, binary = target / "tree", target / "debug/paceline"
    copy_tree(tree)
    record: Record = provenance() | {"planted": []}
    patches = {int(patch.name[:2]): patch for patch in PLANTED.glob("*.patch") if not args.only or int(patch.name[:2]) in args.only}
    groups = [(number,) for number in sorted(patches)] if args.alone else TOGETHER
    for group in ([patches[number] for number in numbers if number in patches] for numbers in groups):
        if not group:
            continue
        apply = ["git", "apply", "--unsafe-paths", f"--directory={tree}"]
        subprocess.run([*apply, *group], cwd="/", check=True)
        build = ["cargo", "build", "--bin", "paceline", "--target-dir", str(target)]
        subprocess.run(build, cwd=tree, check=True, env=os.environ | {"CARGO_INCREMENTAL": "0"})
        for patch in group:
            of = stated(patch)
            sound, said = (first_difference(args.sound, program, target / "runs", of) for program in (args.sound, binary))
            outcome = {"patch": patch.stem, "shows": of["Shows"], "verdict": verdict(said, of["Shows"]), "said": said, "sound": sound}
            record["planted"].append(outcome)
            print(outcome, file=sys.stderr, flush=True)
        subprocess.run([*apply, "-R", *reversed(group)], cwd="/", check=True)
        record["planted"].sort(key=lambda outcome: outcome["patch"])
        write(args.out, record)
    rows = [["patch", "verdict", "shows", "said"]]
    rows += [[of["patch"], of["verdict"], of["shows"][:60], of["said"][:90]] for of in record["planted"]]
    print(aligned(rows, left={0, 1, 2, 3}))
    count = {word: sum(of["verdict"] == word for of in record["planted"]) for word in ("located", "earlier")}
    print(f"{count['located']} of {len(record['planted'])} located, {count['earlier']} earlier; {time.monotonic() - begin:.0f} s")
    return 1 if any(of["verdict"] == "NOTHING" or of["sound"] for of in record["planted"]) else 0


if __name__ == "__main__":
    sys.exit(main())
