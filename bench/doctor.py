"""Follows the advice that `paceline analyze` gives on traces of PyTorch, and compares what was promised with what it gained.

    python3 bench/doctor.py                  # all cases: about twenty minutes; the same with --busy

A case is a step with one fault (`peer/doctor_step.py`). The script records traces, reads the advice, records the step with the advised change, and asks `paceline
analyze BEFORE --against AFTER` whether the promise was kept. Both steps are also timed in turn without the profiler, which slows the host down. A gain is kept within
25 % of the promised range, or below its high end if other code would run (`at most`). The cases `sound` have no fault; their advice is listed. They allocate from
jemalloc, if there is one, as PyTorch's tuning guide recommends: with glibc's allocator all operators of a rank may take twice as long. Cases about communication have a
slow loopback (`tc`; root, or a user namespace): on a fast one, communication takes the cores of the computation.
"""
import argparse
import json
import os
import re
import shlex
import statistics
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from common import ROOT, RUN_SECONDS, Record, aligned, arguments_for, each, parsed, provenance, run, spinning, write

# The cause that is advised for each fault.
FAULTS = {cause: cause for cause in ("loader", "first_bucket", "no_sync", "optimizer", "straggler", "exposed")}
FAULTS |= {"small_buckets": "small_collectives", "busy_core": "straggler", "channels_last": "layout", "compile": "elementwise", "batch": "host_bound"}
SOUND = ["sound", "sound_cnn", "sound_transformer", "sound_one_rank", "sound_loader"]
# For these causes the traces do not determine the gain: other code would run.
BOUNDS = ["optimizer", "layout", "elementwise", "host_bound"]
# The rate of the loopback, which both ranks share.
RATES = {"first_bucket": "4gbit", "small_buckets": "4gbit", "no_sync": "4gbit", "exposed": "1gbit"}
# How far from the range a gain may be.
SLACK = 0.25
JEMALLOC = next(iter(sorted(Path("/usr/lib").glob("*/libjemalloc.so*"))), None)


def step(arguments: argparse.Namespace, case: str, flags: str, folder: Path) -> str:
    """The output of PyTorch's step."""
    command = shlex.join([str(arguments.peer_python), str(ROOT / "bench/peer/doctor_step.py"), "--case", case, *flags.split()])
    if case in SOUND and JEMALLOC is not None:
        command = f"LD_PRELOAD={JEMALLOC} MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1 {command}"
    shell = ["sh", "-c", command]
    if case in RATES:
        spaces = ["--net"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--net"]
        slow = f"ip link set lo up && tc qdisc add dev lo root tbf rate {RATES[case]} burst 256kb latency 400ms"
        shell = ["unshare", *spaces, "sh", "-c", f"{slow} && {command}"]
    with spinning(1, 0) if case == "busy_core" and "--followed" not in flags else nullcontext():
        return run(shell, folder, RUN_SECONDS)


def result_of(arguments: argparse.Namespace, case: str, folder: Path) -> Record:
    def step_ms(flags: str) -> float:
        return json.loads(step(arguments, case, flags, folder).splitlines()[-1])["step_ms"]

    def report(flags: str, name: str) -> Record:
        run([arguments.paceline, "analyze", *flags.split(), "--output", "report"], folder, RUN_SECONDS)
        return json.loads((folder / "report" / name).read_text())

    folder.mkdir()
    step(arguments, case, "--out before", folder)
    advice = report("before", "summary.json")["tables"].get("advice", {}).get("rows", [])
    result: Record = {"case": case, "advice": advice}
    promise = next((one for one in advice if one["cause"] == FAULTS.get(case)), None)
    if promise is None:
        return result
    size = re.search(r"bucket_cap_mb=([\d.]+)", promise["change"])
    followed = f"--followed --bucket-cap-mb {size[1]}" if size else "--followed"
    step(arguments, case, f"{followed} --out after", folder)
    result["against"] = next(text for _, text in report("before --against after", "against.json")["notes"])
    pairs = [(step_ms(""), step_ms(followed)) for _ in range(arguments.rounds)]
    gain = statistics.median(before - after for before, after in pairs)
    before, after = map(statistics.median, zip(*pairs))
    low, high, is_bound = promise["low_ms"], promise["high_ms"], promise["cause"] in BOUNDS
    result |= {"pairs_ms": pairs, "step_ms": before, "followed_ms": after, "gain_ms": gain, "low_ms": low, "high_ms": high, "is_bound": is_bound}
    return result | {"is_kept": (0.0 if is_bound else (1 - SLACK) * low) <= gain <= (1 + SLACK) * high}


def row(result: Record) -> list[str]:
    causes = ", ".join(one["cause"] for one in result["advice"]) or "nothing"
    if "gain_ms" not in result:
        return [result["case"], *["-"] * 5, causes]
    promise = f"{'at most ' if result['is_bound'] else ''}{result['low_ms']:.2f} to {result['high_ms']:.2f}"
    steps = [f"{result[key]:.2f}" for key in ("step_ms", "followed_ms")]
    return [result["case"], *steps, promise, f"{result['gain_ms']:.2f}", "yes" if result["is_kept"] else "no", causes]


def main() -> int:
    parser = arguments_for(__doc__, "doctor.json", has_peer=True, has_busy=True)
    parser.add_argument("--cases", nargs="+", choices=[*FAULTS, *SOUND], default=[*FAULTS, *SOUND], metavar="NAME", help="(default: all)")
    arguments = parsed(parser)
    with tempfile.TemporaryDirectory(prefix="doctor_") as folder:
        results, failures = each(arguments.cases, lambda case: result_of(arguments, case, Path(folder) / case))
    kept = f"{sum(one.get('is_kept', False) for one in results)} of {sum('gain_ms' in one for one in results)} promises kept"
    table = aligned([["case", "step ms", "followed ms", "promise ms", "gain ms", "kept", "advice"], *map(row, results)], left={0, 6})
    print(table, kept, *failures, sep="\n")
    about = provenance() | {"rounds": arguments.rounds, "rates": RATES, "jemalloc": JEMALLOC is not None, "busy": arguments.busy}
    write(arguments.out, about | {"cases": results, "failures": failures})
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
