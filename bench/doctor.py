"""Follows the advice that `paceline analyze` gives on traces of PyTorch, and compares what was promised with what came.

    cargo build --release
    python3 bench/doctor.py                      # about twenty minutes

Each case is a training step of PyTorch with one fault (`peer/doctor_step.py`). The script records its traces, reads the advice,
records the step with the change that is advised, and asks `paceline analyze BEFORE --against AFTER` whether the promise came. Both
steps are also timed without the profiler, in turn, `--rounds` times, because the profiler slows the host down. The cases named `sound` have
no fault; whatever they are told is listed. They allocate from jemalloc, if the machine has it, as PyTorch's tuning guide
recommends: with glibc's allocator each operator may get fresh pages, and one rank of two may be so unlucky that all its element-wise operators take
twice as long.

The cases about communication run in a network of their own whose loopback is slow (`tc`; root, or a user namespace): on a fast one,
communication takes the cores on which the ranks compute. `at most` marks advice that promises an upper bound, because other code would run then;
it counts as kept if the gain is below the high end. All other gains have to be in the range, with 25 % beside it.

Prints one table and writes `results/doctor.json` with date, machine and commit. Exits with 0 if every case was measured, whatever came, and
with 1 otherwise.
"""
import json
import re
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

from common import ROOT, RUN_SECONDS, Record, RunFailed, aligned, arguments_for, behind_link, parsed, provenance, run, write

STEP = ROOT / "bench/peer/doctor_step.py"
# The cause that is advised for a case, where it has another name.
CAUSES = {
    "small_buckets": "small_collectives", "busy_core": "straggler", "channels_last": "layout", "compile": "elementwise",
    "batch": "host_bound",
}
JEMALLOC = next(iter(sorted(Path("/usr/lib").glob("*/libjemalloc.so*"))), None)
SOUND = ["sound", "sound_cnn", "sound_transformer", "sound_one_rank", "sound_loader"]
FAULTS = [
    "loader", "first_bucket", "no_sync", "optimizer", "straggler", "exposed", "small_buckets", "busy_core", "channels_last", "compile", "batch",
]
# Of these, the trace does not determine the gain: other code would run.
BOUNDS = ["optimizer", "layout", "elementwise", "host_bound"]
# The rate of the loopback, which both ranks share, in cases about communication.
RATES = {"first_bucket": "4gbit", "small_buckets": "4gbit", "no_sync": "4gbit", "exposed": "1gbit"}
# How far from the range a gain may be.
SLACK = 0.25


class Bench:
    """Where programs are, and where traces go."""

    def __init__(self, binary: Path, peer: Path, folder: Path) -> None:
        self.binary, self.peer, self.folder = binary, peer, folder

    def step(self, case: str, followed: bool, *flags: str | Path) -> str:
        command = list(map(str, [self.peer, STEP, "--case", case, *flags]))
        command += ["--followed"] if followed else []
        if case in SOUND and JEMALLOC is not None:
            command = ["env", f"LD_PRELOAD={JEMALLOC}", "MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1", *command]
        if case in RATES:
            command = behind_link(shlex.join(command), RATES[case])
        return run(command, self.folder, RUN_SECONDS)

    def timed(self, case: str, followed: bool, *flags: str) -> float:
        return json.loads(self.step(case, followed, *flags).strip().splitlines()[-1])["step_ms"]

    def advice(self, traces: Path) -> list[Record]:
        """All advice on these traces, the largest gain first."""
        out = traces.with_name(traces.name + "_report")
        run([self.binary, "analyze", traces, "--output", out], self.folder, RUN_SECONDS)
        tables = json.loads((out / "summary.json").read_text())["tables"]
        return tables.get("advice", {}).get("rows", [])

    def case(self, case: str, rounds: int) -> Record:
        before, after = (self.folder / case / name for name in ("before", "after"))
        self.step(case, False, "--out", before)
        told = self.advice(before)
        said = [{key: of[key] for key in ("cause", "step_ms", "low_ms", "high_ms", "evidence")} for of in told]
        result: Record = {"case": case, "told": [of["cause"] for of in told], "advice": said}
        cause = CAUSES.get(case, case)
        promised = next((of for of in told if of["cause"] == cause), None)
        if promised is None:
            return result
        result |= {"low_ms": promised["low_ms"], "high_ms": promised["high_ms"], "change": promised["change"]}
        size = re.search(r"bucket_cap_mb=([\d.]+)", promised["change"])
        flags = ["--bucket-cap-mb", size[1]] if size else []
        self.step(case, True, "--out", after, *flags)
        out = self.folder / case / "against"
        run([self.binary, "analyze", before, "--against", after, "--output", out], self.folder, RUN_SECONDS)
        result["against"] = next(text for _, text in json.loads((out / "against.json").read_text())["notes"])
        pairs = [(self.timed(case, False), self.timed(case, True, *flags)) for _ in range(rounds)]
        steps = [statistics.median(of) for of in zip(*pairs)]
        gains = [was - then for was, then in pairs]
        result |= {"step_ms": steps[0], "followed_ms": steps[1], "gain_ms": statistics.median(gains), "gains_ms": gains}
        low_ms, high_ms, gain_ms = promised["low_ms"], promised["high_ms"], result["gain_ms"]
        result["is_bound"] = cause in BOUNDS
        result["is_within"] = low_ms <= gain_ms <= high_ms
        least_ms = 0.0 if result["is_bound"] else (1 - SLACK) * low_ms
        result["is_kept"] = least_ms <= gain_ms <= (1 + SLACK) * high_ms
        return result


HEAD = ["case", "step ms", "followed ms", "promise ms", "gain ms", "within", "kept", "told"]


def row(result: Record) -> list[str]:
    told = ", ".join(result["told"]) or "nothing"
    if "gain_ms" not in result:
        return [result["case"], *["-"] * (len(HEAD) - 2), told]
    promise = f"{'at most ' if result['is_bound'] else ''}{result['low_ms']:.2f} to {result['high_ms']:.2f}"
    numbers = [f"{result[key]:.2f}" for key in ("step_ms", "followed_ms")]
    is_it = ["yes" if result[key] else "no" for key in ("is_within", "is_kept")]
    return [result["case"], *numbers, promise, f"{result['gain_ms']:.2f}", *is_it, told]


def main() -> int:
    parser = arguments_for(__doc__, "doctor.json", has_peer=True)
    parser.add_argument("--cases", nargs="+", choices=FAULTS + SOUND, default=FAULTS + SOUND, metavar="NAME", help="(default: all)")
    arguments = parsed(parser)
    results: list[Record] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments.paceline, arguments.peer_python, Path(folder))
        for case in arguments.cases:
            try:
                results.append(bench.case(case, arguments.rounds))
                print("  ".join(row(results[-1])), file=sys.stderr, flush=True)
            except RunFailed as error:
                failures.append(f"{case}: {error}")
    print(aligned([HEAD, *map(row, results)], left={0, len(HEAD) - 1}))
    followed = [of for of in results if "gain_ms" in of]
    print(f"{sum(of['is_kept'] for of in followed)} of {len(followed)} promises kept", *failures, sep="\n")
    about = {"rounds": arguments.rounds, "rates": RATES, "jemalloc": JEMALLOC is not None}
    write(arguments.out, provenance() | about | {"cases": results, "failures": failures})
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
