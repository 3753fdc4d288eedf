"""Does `paceline record` leave programs as they are? Runs PyTorch programs in turn with it and without it, each in a folder of its own.

Compares what they print, and the CPU seconds of all their processes. With `--after` beyond the program's last step nothing is
recorded, which shows what counting costs; otherwise the recording itself is part of the seconds.

A program is a command in which `python` is that of `--peer-python`: `python train.py --epochs 1`. `torchrun` and `accelerate`
are taken from its folder.
"""
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import RUN_SECONDS, Record, RunFailed, aligned, arguments_for, each, parsed, provenance, ranged, write

# Steps that no program makes.
NEVER = 1_000_000_000


def measured(command: list[str], copied: Path, variables: Record) -> Record:
    """Runs a command in a copy of a folder: its output, and the seconds of its processes."""
    with tempfile.TemporaryDirectory(prefix="record_") as empty:
        folder = Path(empty, "copy")
        subprocess.run(["cp", "-r", copied, folder], check=True)
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        ended = subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=RUN_SECONDS)
        wall, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"code": ended.returncode, "stdout": ended.stdout, "stderr": ended.stderr, "cpu_s": cpu, "wall_s": wall}


def compared(arguments, case: str) -> Record:
    words = shlex.split(case)
    plain = [str(arguments.peer_python.parent / words[0]), *words[1:]]
    recorded = [str(arguments.paceline), "record", "--after", str(arguments.after), "--", *plain]
    variables = {"OMP_NUM_THREADS": "1"}
    rounds = []
    for _ in range(arguments.rounds):
        without, with_it = (measured(command, arguments.folder, variables) for command in (plain, recorded))
        if without["code"] != 0:
            raise RunFailed(f"{case}: exit code {without['code']}: {without['stderr'][-500:]}")
        rounds.append((without, with_it))
    own = [(with_it["stdout"].split("\n\nRecorded ")[0].rstrip("\n"), without["stdout"].rstrip("\n")) for without, with_it in rounds]
    ratios = [with_it["cpu_s"] / without["cpu_s"] for without, with_it in rounds]
    return {
        "program": case,
        "same_code": all(with_it["code"] == without["code"] for without, with_it in rounds),
        "same_output": all(ours == theirs for ours, theirs in own),
        "cpu_s": [(without["cpu_s"], with_it["cpu_s"]) for without, with_it in rounds],
        "cpu_ratio": ranged(ratios, 4),
        "end": rounds[-1][1]["stdout"].rsplit("\n\n", 1)[-1] + rounds[-1][1]["stderr"][-500:],
    }


def main() -> int:
    parser = arguments_for(__doc__, "record.json", rounds=5, has_peer=True)
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="the folder with the programs")
    parser.add_argument("--after", type=int, default=NEVER, help="steps before the recording (default: more than there are)")
    parser.add_argument("programs", nargs="+", metavar="COMMAND")
    arguments = parsed(parser)
    results, failures = each(arguments.programs, lambda case: compared(arguments, case))
    rows = [["program", "output", "exit code", "CPU seconds, with / without"]]
    said = {True: "same", False: "differs"}
    rows += [[of["program"], said[of["same_output"]], said[of["same_code"]], of["cpu_ratio"]] for of in results]
    print(aligned(rows, left={0}), *failures, sep="\n")
    write(arguments.out, provenance() | {"after": arguments.after, "results": results, "failures": failures})
    return int(bool(failures) or not all(of["same_output"] and of["same_code"] for of in results))


if __name__ == "__main__":
    sys.exit(main())
