"""Which planted bugs of training on several ranks are found: each patch of bench/planted is applied to a copy, built, and two layouts are compared.

    python3 bench/planted.py                 # thirty builds
    python3 bench/planted.py --only 1 9      # those patches

The layouts A and B of a patch train with --watch-numerics. A bug is located if the run of B itself, or `paceline compare --numerics A B`, names the
tensor and the step that the patch states; it is seen if a difference shows elsewhere. The finder has no view of single micro-batches, so bugs of the
phases before the reduction are seen in the gradients that follow. The exit code is 1 if a bug shows nowhere, or if the layouts differ without it.
Needs Git and Cargo.
"""
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from common import ROOT, Record, aligned, arguments_for, ended, provenance, write
from mutants import copy_tree

PLANTED = ROOT / "bench/planted"
RUN_SECONDS = 120
# The finder's word for a phase of the table.
PHASES = {"reduced": "gradients", "weights": "weights"}


def stated(patch: Path) -> dict[str, str]:
    """The lines before a patch."""
    head = patch.read_text().split("diff --git", 1)[0]
    return dict(line.split(": ", 1) for line in head.splitlines())


def flags_of(of: dict[str, str], side: str) -> str:
    model, flags = of["Model"].split(": ", 1)
    # Words follow a comma.
    layout = re.split(r", (?=by|stopped)", of[side])[0]
    return f"--model {model} {flags.replace(' --steps 4', '')} {layout}"


def train(binary: Path, folder: Path, name: str, flags: str, steps: int = 3) -> str:
    """The last line of a run's errors; empty if it came to its end."""
    always = f"--steps {steps} --warmup-steps 0 --quiet --watch-numerics --name {name}"
    code, _, errors = ended([binary, "train", *flags.split(), *always.split()], folder, RUN_SECONDS, text=True)
    lines = [line for line in (errors or "").splitlines() if "error" in line]
    return "" if code == 0 else (lines or ["error: it ran too long"])[0]


def first_difference(sound: Path, binary: Path, folder: Path, of: dict[str, str]) -> str:
    """What the finder says of both layouts; empty without a difference."""
    program = sound if "without the bug" in of["A"] else binary
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    a, b = flags_of(of, "A"), flags_of(of, "B")
    if "resumed" in of["B"]:
        said = train(program, folder, "A", a, 4) or train(binary, folder, "B0", f"{b} --save saved", 2)
        said = said or train(binary, folder, "B", f"{b} --resume saved", 4)
    else:
        said = train(program, folder, "A", a) or train(binary, folder, "B", b)
    if said:
        return said
    command = [binary, "compare", "--numerics", "runs/A", "runs/B"]
    _, output, errors = ended(command, folder, RUN_SECONDS, text=True, env=os.environ | {"COLUMNS": "200"})
    found = [line for line in output.splitlines() if line.startswith("The first difference")]
    return found[0] if found else "" if "No difference" in output else errors.strip()


def verdict(said: str, shows: str) -> str:
    step, phase, *rest = [word.strip() for word in shows.split(",")]
    tensors = re.findall(r"[\w.]+\.(?:weight|bias)", shows)
    is_there = step in said and any(tensor in said for tensor in tensors)
    is_phase = "the gradient of" in said if "other values" in said and phase == "reduced" else PHASES.get(phase, "-") in said or "other values" in said
    return "located" if is_there and is_phase else "seen" if said else "NOTHING"


def main() -> int:
    parser = arguments_for(__doc__, "planted.json", rounds=0, has_program=False)
    parser.add_argument("--target-dir", type=Path, default=ROOT / "target/planted", metavar="DIR", help="where the copy is built")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of patches")
    parser.add_argument("--sound", type=Path, default=ROOT / "target/debug/paceline", metavar="PROGRAM",
                        help="a build without a bug, for which the layouts must agree (default: target/debug/paceline)")
    args = parser.parse_args()
    begin, target = time.monotonic(), Path(os.path.abspath(args.target_dir))
    tree, binary = target / "tree", target / "debug/paceline"
    copy_tree(tree)
    record: Record = provenance() | {"planted": []}
    for patch in sorted(PLANTED.glob("*.patch")):
        if args.only and int(patch.name[:2]) not in args.only:
            continue
        of = stated(patch)
        sound = first_difference(args.sound, args.sound, target / "runs", of)
        subprocess.run(["git", "apply", "--unsafe-paths", f"--directory={tree}", patch], cwd="/", check=True)
        build = ["cargo", "build", "--bin", "paceline", "--target-dir", str(target)]
        subprocess.run(build, cwd=tree, check=True, env=os.environ | {"CARGO_INCREMENTAL": "0"})
        said = first_difference(args.sound, binary, target / "runs", of)
        subprocess.run(["git", "apply", "-R", "--unsafe-paths", f"--directory={tree}", patch], cwd="/", check=True)
        outcome = {"patch": patch.stem, "shows": of["Shows"], "verdict": verdict(said, of["Shows"]), "said": said, "sound": sound}
        record["planted"].append(outcome)
        print(outcome, file=sys.stderr, flush=True)
    write(args.out, record)
    rows = [["patch", "verdict", "shows", "said"]]
    rows += [[of["patch"], of["verdict"], of["shows"][:60], of["said"][:90]] for of in record["planted"]]
    print(aligned(rows, left={0, 1, 2, 3}))
    print(f"{sum(of['verdict'] == 'located' for of in record['planted'])} of {len(record['planted'])} located; {time.monotonic() - begin:.0f} s")
    return 1 if any(of["verdict"] == "NOTHING" or of["sound"] for of in record["planted"]) else 0


if __name__ == "__main__":
    sys.exit(main())
