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
from pathlib import Path

from common import ROOT, arguments_for, provenance, write

# The packages whose tests explore schedules, in modules or files named cluster or cluster_tests.
PACKAGES = ("rendezvous", "collectives", "checkpoint", "launch")
# A process of this many schedules stays below the usual limits of threads and descriptors.
SEEDS_OF_PROCESS = 50
LIMIT_S = 1800


def main() -> None:
    parser = arguments_for(__doc__, "cluster.json", rounds=0, has_program=False)
    parser.add_argument("--seeds", default="0..1000", metavar="A..B")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--first", action="store_true", help="end at the first failure")
    args = parser.parse_args()
    if not (seeds := re.fullmatch(r"(\d+)\.\.(\d+)", args.seeds)):
        parser.error(f"--seeds {args.seeds}: pass a range such as 0..1000")
    first, end = map(int, seeds.groups())
    chunks = [(at, min(at + SEEDS_OF_PROCESS, end)) for at in range(first, end, SEEDS_OF_PROCESS)]
    records = []
    for program, test in [(of, test) for of in built() for test in tests_of(of)]:
        begin = time.monotonic()
        failures = []
        with ThreadPoolExecutor(args.jobs) as pool:
            for run in [pool.submit(failures_of, program, test, *chunk) for chunk in chunks]:
                failures += run.result()
                if args.first and failures:
                    pool.shutdown(cancel_futures=True)
                    break
        records.append({"test": test, "schedules": end - first, "seconds": round(time.monotonic() - begin, 1), "failures": failures})
        print(json.dumps(records[-1], indent=2), flush=True)
        if args.first and failures:
            break
    write(args.out, {**provenance(), "seeds": args.seeds, "tests": records})
    if any(record["failures"] for record in records):
        sys.exit("some schedules fail")


def built() -> list[str]:
    """The programs of these packages' tests."""
    command = ["cargo", "test", "--locked", "--workspace", "--lib", "--test", "cluster", "--no-run", "--message-format", "json"]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    programs = [of for line in output.splitlines() if (of := json.loads(line)).get("executable")]
    is_of = lambda of: Path(of["manifest_path"]).parent.name in PACKAGES  # noqa: E731
    return [of["executable"] for of in programs if is_of(of)]


def tests_of(program: str) -> list[str]:
    """The tests that explore schedules: those that refuse a wrong range of seeds."""
    output = subprocess.run([program, "--list"], check=True, stdout=subprocess.PIPE, text=True).stdout
    tests = [line.removesuffix(": test") for line in output.splitlines() if line.endswith(": test")]
    return [test for test in tests if "cluster" in Path(program).name + test and failure(program, test, "none")]


def failures_of(program: str, test: str, first: int, end: int) -> list[str]:
    """Why schedules of these seeds fail."""
    failures: list[str] = []
    while first < end and (text := failure(program, test, f"{first}..{end}")):
        failures.append(text)
        seed = re.search(r"SEEDS=(\d+)", text)
        first = int(seed[1]) + 1 if seed else end
    return failures


def failure(program: str, test: str, seeds: str) -> str | None:
    """Why the first schedule of these seeds fails that does."""
    command = [program, "--exact", test]
    environment = {**os.environ, "PACELINE_SEEDS": seeds}
    try:
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"seeds {seeds} take more than {LIMIT_S} s"
    if ended.returncode == 0:
        return None
    said = [line for line in ended.stdout.splitlines() if "fails with" in line]
    return said[0] if said else f"seeds {seeds}: exit code {ended.returncode}: " + " | ".join(ended.stdout.splitlines()[-3:])


if __name__ == "__main__":
    main()
