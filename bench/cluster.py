"""Runs the simulated clusters of the tests under many more schedules, each of which follows from its seed.

    python3 bench/cluster.py --seeds 0..100000      # a night

Builds the tests once. Each process runs some seeds and ends, because the threads of a simulated process that was killed stay until then.
A failure names its seed and its smallest list of faults; PACELINE_SEEDS=N..N+1 with the test plays it again. results/cluster.json has the number
of schedules for each test, their time, and the failures. Exits with 1 if there is one.
"""
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from common import ROOT, arguments_for, provenance, write

PACKAGES = ("paceline-rendezvous", "paceline-collectives")
# A process of this many schedules stays below the usual limits of threads and descriptors.
SEEDS_OF_PROCESS = 50
LIMIT_S = 1800


def main() -> None:
    parser = arguments_for(__doc__, "cluster.json", rounds=0, has_program=False)
    parser.add_argument("--seeds", default="0..1000", metavar="A..B")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    args = parser.parse_args()
    if not (seeds := re.fullmatch(r"(\d+)\.\.(\d+)", args.seeds)):
        parser.error(f"--seeds {args.seeds}: pass a range such as 0..1000")
    first, end = map(int, seeds.groups())
    chunks = [(at, min(at + SEEDS_OF_PROCESS, end)) for at in range(first, end, SEEDS_OF_PROCESS)]
    records = []
    programs = [built(package) for package in PACKAGES]
    for program, test in [(of, test) for of in programs for test in tests_of(of)]:
        begin = time.monotonic()
        with ThreadPoolExecutor(args.jobs) as pool:
            failures = [text for text in pool.map(lambda chunk: failure(program, test, *chunk), chunks) if text]
        records.append({"test": test, "schedules": end - first, "seconds": round(time.monotonic() - begin, 1), "failures": failures})
        print(json.dumps(records[-1], indent=2), flush=True)
    write(args.out, {**provenance(), "seeds": args.seeds, "tests": records})
    if any(record["failures"] for record in records):
        sys.exit("some schedules fail")


def built(package: str) -> str:
    """The program of a package's tests in a cluster."""
    command = ["cargo", "test", "--locked", "-p", package, "--test", "cluster", "--no-run", "--message-format", "json"]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return next(of["executable"] for line in output.splitlines() if (of := json.loads(line)).get("executable"))


def tests_of(program: str) -> list[str]:
    """The tests that explore schedules."""
    output = subprocess.run([program, "--list"], check=True, stdout=subprocess.PIPE, text=True).stdout
    return [line.removesuffix(": test") for line in output.splitlines() if line.endswith(": test") and "a_seed" not in line]


def failure(program: str, test: str, first: int, end: int) -> str | None:
    """Why the first schedule of these seeds fails that does."""
    command = [program, "--exact", test]
    environment = {**os.environ, "PACELINE_SEEDS": f"{first}..{end}"}
    try:
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"seeds {first}..{end} take more than {LIMIT_S} s"
    if ended.returncode == 0:
        return None
    said = [line for line in ended.stdout.splitlines() if "fails with" in line]
    return said[0] if said else f"seeds {first}..{end}: exit code {ended.returncode}: " + " | ".join(ended.stdout.splitlines()[-3:])


if __name__ == "__main__":
    main()
