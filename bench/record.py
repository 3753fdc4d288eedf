"""Does `paceline record` leave programs as they are? Runs six public PyTorch programs in turn without it, with it and recording.

    python3 bench/record.py --folder DIR     # the folder that bench/peer/programs.py has prepared

Compares what they print (times are masked), the weights they end with, and the CPU seconds of all their processes. With `--after`
beyond the program's last step nothing is recorded, which shows what counting costs. A second run without it shows the noise.
Keeps the advice that the recording leads to.
"""
import hashlib
import os
import re
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from common import RUN_SECONDS, Record, RunFailed, aligned, arguments_for, each, parsed, provenance, ranged, write
from peer.programs import PROGRAMS

# Steps that no program makes.
NEVER = 1_000_000_000
MASKED = re.compile(r"(time |mfu |runtime\W+|per_second\W+)-?[\d.]+")
# Prints a digest of all tensors in a file of weights.
DIGEST = """import hashlib, sys, torch
def tensors(of):
    if torch.is_tensor(of): yield of
    elif isinstance(of, dict): yield from (one for key in sorted(of, key=str) for one in tensors(of[key]))
    elif isinstance(of, (list, tuple)): yield from (one for part in of for one in tensors(part))
if sys.argv[1].endswith("safetensors"):
    from safetensors.torch import load_file as load
else:
    load = lambda path: torch.load(path, weights_only=False)
digest = hashlib.sha256()
for one in tensors(load(sys.argv[1])): digest.update(one.detach().contiguous().numpy().tobytes())
print(digest.hexdigest())"""


def measured(arguments: Namespace, case: str, flags: list[str] | None) -> Record:
    """Runs a program in a copy of its folder, with `paceline record` and these flags, or without it."""
    place, command, weights = PROGRAMS[case]
    words = shlex.split(command)
    words[0] = str(arguments.peer_python.parent / words[0])
    if flags is not None:
        words = [str(arguments.paceline), "record", *flags, "--", *words]
    with tempfile.TemporaryDirectory(prefix="record_") as empty:
        root = arguments.folder.resolve()
        subprocess.run(["cp", "-r", "--reflink=auto", root / Path(place).parts[0], empty], check=True)
        folder = Path(empty, place)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        # Lines of two processes shall not mix.
        own = {key: text for key, text in os.environ.items() if key != "PYTHONUNBUFFERED"} | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        ended = subprocess.run(words, cwd=folder, env=own, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if ended.returncode != 0:
            raise RunFailed(f"{shlex.join(words)}: exit code {ended.returncode}: {ended.stderr[-500:]}")
        file = next(folder.glob(weights))
        digest = subprocess.run([arguments.peer_python, "-c", DIGEST, file], capture_output=True, text=True, check=True).stdout
    printed, _, report = ended.stdout.partition("\nRecorded ")
    # Lines of two ranks may mix, so characters are compared without their order.
    characters = sorted(MASKED.sub(r"\1", printed).replace("\n", ""))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"output": hashlib.sha256("".join(characters).encode()).hexdigest(), "weights": digest, "cpu_s": cpu, "report": report}


def compared(arguments: Namespace, case: str) -> Record:
    recorded = ["--after", str(arguments.after)]
    kinds = {"without": None, "again": None, "counted": ["--after", str(NEVER)], "recorded": recorded}
    rounds = [{kind: measured(arguments, case, flags) for kind, flags in kinds.items()} for _ in range(arguments.rounds)]

    def same(what: str) -> bool:
        return len({one[what] for of in rounds for one in of.values()}) == 1

    def ratios(kind: str) -> list[float]:
        return [of[kind]["cpu_s"] / of["without"]["cpu_s"] for of in rounds]

    return {
        "program": case,
        "same_output": same("output"),
        "same_weights": same("weights"),
        "cpu_s": [{kind: one["cpu_s"] for kind, one in of.items()} for of in rounds],
        "counted": ratios("counted"),
        "again": ratios("again"),
        "recorded": ratios("recorded"),
        "report": rounds[-1]["recorded"]["report"],
    }


def row(of: Record) -> list[str]:
    said = {True: "same", False: "differs"}
    advice = re.findall(r"^advice: (.{0,60})", of["report"], re.MULTILINE)
    return [of["program"], said[of["same_output"]], said[of["same_weights"]], *(ranged(of[kind], 3) for kind in ("counted", "again", "recorded")), *advice[:1]]


def main() -> int:
    parser = arguments_for(__doc__, "record.json", rounds=5, has_peer=True)
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="the folder with the programs")
    parser.add_argument("--after", type=int, default=20, help="steps before the recording (default: 20)")
    parser.add_argument("--cases", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    arguments = parsed(parser)
    results, failures = each(arguments.cases, lambda case: compared(arguments, case))
    print(aligned([["program", "output", "weights", "CPU s counted / without", "again", "recorded", "advice"], *map(row, results)], left={0, 6}), *failures, sep="\n")
    counted = statistics.median(ratio for of in results for ratio in of["counted"]) if results else None
    write(arguments.out, provenance() | {"after": arguments.after, "counted": counted, "results": results, "failures": failures})
    return int(bool(failures) or not all(of["same_output"] and of["same_weights"] for of in results))


if __name__ == "__main__":
    sys.exit(main())
