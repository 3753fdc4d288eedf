"""Whether what paceline promises comes true: gains of advice, and predicted steps.

    python3 bench/promises.py advice         # a quarter of an hour; the same with --busy
    python3 bench/promises.py doctor         # twenty minutes; needs the peer: see bench/README.md
    python3 bench/promises.py sound --rounds 25   # half an hour; needs the peer
    python3 bench/promises.py predict        # half an hour, most of it the MLP's

`advice`: a run of 2 pinned ranks, on an emulated link or with another program on rank 1's core. `paceline train`, or `paceline analyze` from its traces, names a
change and how much shorter a step would be. The script makes the change and runs again, in turn. The promise is the median of the rounds, the gain the difference of
the medians of the mean step. A round with other advice, because something disturbed it, is recorded and left out. A case that keeps fewer than half of its rounds has
no result.

`doctor`: the same for `paceline record` on PyTorch's steps with one fault each (`peer/doctor_step.py`). `paceline analyze BEFORE --against AFTER` says
whether the promise was kept. Both steps are also timed in turn without a recording. A gain is kept within 25 % of the promised range, or
below its high end if other code would run (`at most`); it is near if it differs from the middle by 25 % of that at most. The cases `sound` have no fault; their advice is listed. They allocate from jemalloc, if there is one, as PyTorch's
tuning guide recommends: with glibc's allocator all operators of a rank may take twice as long. Cases about communication have a slow loopback (`tc`; root, or a user
namespace): on a fast one, communication takes the cores of the computation.

`sound`: false alarms. Steps without a fault on two ranks over Gloo, with glibc's allocator, while another program takes a core for a few milliseconds at random
times. Each round of a case is a run, and each piece of advice that it gets is an alarm. At most one run in 100 may have one.

`predict`: the predicted step over the measured one of each round. The links are such that communication takes much less time than the backward pass, about as
much, and much more. Two ranks are pinned to a core each; four ranks take turns on two cores.

Writes `results/PART.json`. The exit code is 1 if a case has no result.
"""
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from common import ROOT, RUN_SECONDS, Record, RunFailed, aligned, arguments_for, each, parsed, provenance, ranged, run, spinning, train, write

CNN = "--model cnn --data synthetic --samples 8192 --batch-size 64"
MLP = "--model mlp --num-layers 4 --input-dim 512 --hidden-dim 512 --output-dim 10 --batch-size 128"
WIDE = "--model mlp --num-layers 4 --input-dim 512 --hidden-dim 1024 --output-dim 10 --batch-size 64"
DIVIDED = "--model mlp --num-layers 5 --input-dim 1024 --hidden-dim 1024 --output-dim 1024 --global-batch-size 256"
TRANSFORMER = "--model llama --layers 4 --width 256 --heads 4 --vocab 1024 --seq-len 64 --optimizer adamw --global-batch-size 16"
PIPELINE = "--model llama --layers 4 --width 256 --heads 4 --vocab 8192 --optimizer adamw --mesh pp=2 --accumulate 8 --global-batch-size 2"
MS = r"(?P<ms>[0-9]+\.[0-9]+)"
HALF = rf"half the time .* less \({MS} ms per step\)"
BUCKETS = r"`(--bucket-cap-mb [0-9.]+ --first-bucket-mb [0-9.]+)`.* ms less"
KEPT = ["wall_ms", "step_ms_median", "comm_exposed_ms", "comm_exposed_wait_ms", "comm_wait_ms", "comm_move_ms", "sync_ms", "advice", "advised"]


class Case(NamedTuple):
    # The command that gives the advice.
    by: str
    # The flags of both runs, of the first one, and of the one that follows the advice, whose first group is \1.
    flags: str
    before: str
    after: str
    # Matches the advice. The promise is its group `ms`, or the gain in the record of `paceline train`.
    advice: str
    # Whether another program disturbs rank 1 in the first run.
    disturbed: bool = False


CASES = {
    "halve transfer": Case("analyze", f"{CNN} --strategy ddp", "--link 500mbit,50us", "--link 1gbit,25us", HALF),
    "halve latency": Case("analyze", f"{MLP} --strategy simple_ddp", "--link 10gbit,3ms", "--link 20gbit,1500us", HALF),
    "slow rank, by analyze": Case("analyze", f"{CNN} --strategy ddp", "", "", rf"Rank 1 holds .* less \({MS} ms per step\)", True),
    "slow rank, by train": Case("train", f"{CNN} --strategy simple_ddp --link 10gbit,50us", "", "", rf"waiting is for rank 1: .* about {MS} ms less", True),
    "smaller buckets": Case("train", f"{CNN} --strategy ddp --link 500mbit,50us", "--bucket-cap-mb 100 --first-bucket-mb 100", r"\1", BUCKETS),
    "larger buckets": Case("train", f"{MLP} --strategy ddp --link 10gbit,2ms", "--bucket-cap-mb 0.01 --first-bucket-mb 0.01", r"\1", BUCKETS),
    "buckets at all": Case("train", f"{CNN} --link 500mbit,50us", "--strategy simple_ddp", r"\1", r"`(--strategy ddp)`.* ms less"),
    "half the bytes": Case("train", f"{CNN} --bucket-cap-mb 1 --link 100mbit,50us", "--strategy ddp", r"\1", r"`(--strategy bf16)`.* ms less"),
    "no compression": Case("train", f"{WIDE} --link 25gbit,20us", "--strategy top_k", r"\1", r"`(--strategy ddp)`.* ms less"),
    "no synchronized batch norm": Case("train", f"{CNN} --strategy ddp --batch-norm --link 1gbit,1ms", "--sync-batch-norm", "", r"leaving out `--sync-batch-norm`.* ms less"),
    "rarer averages": Case("train", f"{CNN} --strategy local_sgd --link 200mbit,50us", "--sync-every 2", r"\1", r"`(--sync-every [0-9]+)`.* ms less"),
    "gather ahead": Case("train", f"{MLP} --strategy sharded3 --link 1gbit,50us", "--prefetch 0", r"\1", r"`(--prefetch [0-9]+)`.* ms less"),
    "divided layers": Case("train", f"{DIVIDED} --mesh tp=2 --link 500mbit,50us", "", r"\1", r"`(--overlap-tp)`.* ms less"),
    "divided language model": Case("train", f"{TRANSFORMER} --mesh tp=2 --link 500mbit,50us", "", r"\1", r"`(--overlap-tp)`.* ms less"),
    "another schedule": Case("train", PIPELINE, "--schedule gpipe", r"\1", r"With `([^`]+)` the step.* ms less"),
    "another cut": Case("train", PIPELINE, "--stages model.layers.1", r"\1", r"With `([^`]+)` the step.* ms less"),
}


def measured(arguments: Namespace, by: str, flags: str, disturbed: bool) -> tuple[Record, str]:
    """The record of a run, and the advice that it gets."""
    flags += " --nproc 2 --threads 1 --pin-cores --lr 0.001 --steps 40 --warmup-steps 5"
    if by == "analyze":
        flags += " --profile --profile-wait 5 --profile-active 32 --profile-dir profile"
    with tempfile.TemporaryDirectory(prefix="advice_") as folder:
        with spinning(1, 3) if disturbed else nullcontext():
            summary = train(arguments.paceline, flags, Path(folder))
        text = run([arguments.paceline, "analyze", "profile"], Path(folder), RUN_SECONDS) if by == "analyze" else summary["advice"] or ""
    return {"flags": flags, **{key: summary.get(key) for key in KEPT}}, " ".join(text.split())


def advice(arguments: Namespace, name: str) -> Record:
    case, rounds = CASES[name], []
    for _ in range(arguments.rounds):
        before, text = measured(arguments, case.by, f"{case.flags} {case.before}", case.disturbed)
        named = re.search(case.advice, text)
        if named is None:
            rounds.append({"before": before, "left_out": f"other advice: {text[:2000]}"})
            continue
        after, _ = measured(arguments, case.by, f"{case.flags} {named.expand(case.after)}", False)
        promise = float(named["ms"]) if "ms" in named.groupdict() else before["advised"]["gain"]["ms"]
        rounds.append({"before": before, "after": after, "promise_ms": promise})
    kept = [one for one in rounds if "after" in one]
    if 2 * len(kept) < arguments.rounds:
        raise RunFailed(f"the runs got other advice: {[one['left_out'] for one in rounds if 'left_out' in one]}")
    before, after = (statistics.median(one[side]["wall_ms"] for one in kept) for side in ("before", "after"))
    promise = statistics.median(one["promise_ms"] for one in kept)
    result = {"case": name, "by": case.by, "disturbed": case.disturbed, "step_ms": before, "followed_ms": after, "promise_ms": promise}
    return result | {"gain_ms": before - after, "gain_of_promise": (before - after) / promise, "rounds": rounds}


def advice_row(result: Record) -> list[str]:
    return [result["case"], result["by"], *(f"{result[key]:.2f}" for key in ("step_ms", "followed_ms", "promise_ms", "gain_ms", "gain_of_promise"))]


# The cause that is advised for each fault.
FAULTS = {cause: cause for cause in ("loader", "first_bucket", "no_sync", "optimizer", "straggler", "exposed")}
FAULTS |= {"small_buckets": "small_collectives", "busy_core": "straggler", "channels_last": "layout", "compile": "elementwise", "batch": "host_bound"}
FAULTS |= {"attention": "attention", "host_work": "loader", "item": "synchronizations"}
SOUND = ["sound", "sound_cnn", "sound_transformer", "sound_one_rank", "sound_loader"]
# For these causes the traces do not determine the gain: other code would run.
BOUNDS = ["optimizer", "layout", "elementwise", "host_bound", "attention"]
# The rate of the loopback, which both ranks share.
RATES = {"first_bucket": "4gbit", "small_buckets": "4gbit", "no_sync": "4gbit", "exposed": "1gbit"}
# How long the steps are timed together, at least.
TIMED_MS = 3000
# How far from the range a gain may be.
SLACK = 0.25
JEMALLOC = next(iter(sorted(Path("/usr/lib").glob("*/libjemalloc.so*"))), None)


def step(arguments: Namespace, case: str, flags: str, folder: Path, output: str = "") -> str:
    """The output of PyTorch's step, recorded to `output` if that is a name."""
    recorded = [str(arguments.paceline), *f"record --steps 8 --output {output} --".split()] if output else []
    command = shlex.join([*recorded, str(arguments.peer_python), str(ROOT / "bench/peer/doctor_step.py"), "--case", case, *flags.split()])
    if case in SOUND and JEMALLOC is not None:
        command = f"LD_PRELOAD={JEMALLOC} MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1 {command}"
    shell = ["sh", "-c", command]
    if case in RATES:
        spaces = ["--net"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--net"]
        slow = f"ip link set lo up && tc qdisc add dev lo root tbf rate {RATES[case]} burst 256kb latency 400ms"
        shell = ["unshare", *spaces, "sh", "-c", f"{slow} && {command}"]
    with spinning(1, 0) if case == "busy_core" and "--followed" not in flags else nullcontext():
        return run(shell, folder, RUN_SECONDS)


def doctor(arguments: Namespace, case: str) -> Record:
    with tempfile.TemporaryDirectory(prefix="doctor_") as folder:
        return examined(arguments, case, Path(folder))


def examined(arguments: Namespace, case: str, folder: Path) -> Record:
    def step_ms(flags: str) -> float:
        flags += f" --steps {max(30, round(TIMED_MS / promise['step_ms']))}"
        return json.loads(step(arguments, case, flags, folder).splitlines()[-1])["step_ms"]

    def report(flags: str, name: str) -> Record:
        run([arguments.paceline, "analyze", *flags.split(), "--output", "report"], folder, RUN_SECONDS)
        return json.loads((folder / "report" / name).read_text())

    step(arguments, case, "", folder, "before")
    advice = report("before", "summary.json")["tables"].get("advice", {}).get("rows", [])
    result: Record = {"case": case, "advice": advice}
    promise = next((one for one in advice if one["cause"] == FAULTS.get(case)), None)
    if promise is None:
        return result
    size = re.search(r"bucket_cap_mb=([\d.]+)", promise["change"])
    followed = f"--followed --bucket-cap-mb {size[1]}" if size else "--followed"
    step(arguments, case, followed, folder, "after")
    result["against"] = next(text for _, text in report("before --against after", "against.json")["notes"])
    pairs = [(step_ms(""), step_ms(followed)) for _ in range(arguments.rounds)]
    gain = statistics.median(before - after for before, after in pairs)
    before, after = map(statistics.median, zip(*pairs))
    low, high, is_bound = promise["low_ms"], promise["high_ms"], promise["cause"] in BOUNDS
    result |= {"pairs_ms": pairs, "step_ms": before, "followed_ms": after, "gain_ms": gain, "low_ms": low, "high_ms": high, "is_bound": is_bound}
    result["is_near"] = abs(gain - (low + high) / 2) <= SLACK * (low + high) / 2
    return result | {"is_kept": (0.0 if is_bound else (1 - SLACK) * low) <= gain <= (1 + SLACK) * high}


def doctor_row(result: Record) -> list[str]:
    causes = ", ".join(one["cause"] for one in result["advice"]) or "nothing"
    if "gain_ms" not in result:
        return [result["case"], *["-"] * 6, causes]
    promise = f"{'at most ' if result['is_bound'] else ''}{result['low_ms']:.2f} to {result['high_ms']:.2f}"
    steps = [f"{result[key]:.2f}" for key in ("step_ms", "followed_ms")]
    answers = ["yes" if result[key] else "no" for key in ("is_kept", "is_near")]
    return [result["case"], *steps, promise, f"{result['gain_ms']:.2f}", *answers, causes]


# Computes for up to 10 ms, on any core, and sleeps for up to 200 ms, again and again: about a twentieth of a core.
JITTER = """
import random, time
while True:
    end = time.perf_counter() + random.uniform(0.0, 0.01)
    while time.perf_counter() < end:
        pass
    time.sleep(random.uniform(0.0, 0.2))
"""


def sound(arguments: Namespace, case: str) -> Record:
    runs = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory(prefix="sound_") as folder:
            command = [arguments.paceline, *"record --steps 8 --output traces --".split(), arguments.peer_python]
            command += [ROOT / "bench/peer/doctor_step.py", "--case", case]
            with subprocess.Popen([sys.executable, "-c", JITTER]) as jitter:
                try:
                    run(command, Path(folder), RUN_SECONDS)
                finally:
                    jitter.kill()
            run([arguments.paceline, "analyze", "traces", "--output", "report"], Path(folder), RUN_SECONDS)
            summary = json.loads(Path(folder, "report/summary.json").read_text())
            advice = summary["tables"].get("advice", {}).get("rows", [])
            # Of the path across ranks, if the doctor has none.
            runs.append(advice or [{"cause": "path", "title": text} for weight, text in summary["notes"] if weight == "advice"])
    return {"case": case, "runs": runs, "alarms": sum(bool(advice) for advice in runs)}


def sound_row(result: Record) -> list[str]:
    causes = {one["cause"] for advice in result["runs"] for one in advice}
    return [result["case"], str(len(result["runs"])), str(result["alarms"]), ", ".join(sorted(causes)) or "nothing"]


# By name: the study, and its links.
STUDIES = {
    "cnn, 2 ranks": ("--model cnn --nproc 2 --pin-cores --steps-per-epoch 100", "25gbit,50us 1.5gbit,50us 0.5gbit,50us"),
    "mlp, 2 ranks": ("--model mlp --nproc 2 --pin-cores --steps-per-epoch 20", "25gbit,50us 4gbit,50us 2gbit,50us"),
    "cnn, 4 ranks": ("--model cnn --nproc 4 --steps-per-epoch 100", "25gbit,50us 1.5gbit,50us 0.5gbit,50us"),
}


def predict(arguments: Namespace, study: str) -> Record:
    flags, links = STUDIES[study]
    ratios = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory(prefix="predict_") as folder:
            run([arguments.paceline, *f"predict --measure {flags} --links {links} --rounds 1 --json out.json".split()], Path(folder), RUN_SECONDS)
            ratios.append([row["ratio"] for row in json.loads(Path(folder, "out.json").read_text())["rows"]])
    return {"case": study, "ratios": dict(zip(links.split(), zip(*ratios)))}


def predict_row(result: Record) -> list[str]:
    return [result["case"], *(f"{link}: {ranged(values, 3)}" for link, values in result["ratios"].items())]


# By part: its cases, the result of one, and its row in the table below these headings.
PARTS = {
    "advice": (CASES, advice, advice_row, "advice|by|step ms|followed ms|promise ms|gain ms|gain/promise"),
    "doctor": ([*FAULTS, *SOUND], doctor, doctor_row, "case|step ms|followed ms|promise ms|gain ms|kept|near|advice"),
    "sound": ([case for case in SOUND if case != "sound_one_rank"], sound, sound_row, "case|runs|alarms|advice"),
    "predict": (STUDIES, predict, predict_row, "case|predicted over measured step, by link||"),
}


def main() -> int:
    parser = arguments_for(__doc__, "PART.json", rounds=3, has_peer=True, has_busy=True)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="(default: all)")
    arguments = parsed(parser)
    cases, result_of, row, headings = PARTS[arguments.part]
    if unknown := set(arguments.cases or []) - set(cases):
        parser.error(f"--cases: there is no {', '.join(unknown)}; there are {'; '.join(cases)}")
    results, failures = each(arguments.cases or cases, lambda case: result_of(arguments, case))
    print(aligned([headings.split("|"), *map(row, results)], left={0, 1, 7}), *failures, sep="\n")
    out = arguments.out.with_name(arguments.out.name.replace("PART", arguments.part))
    write(out, provenance() | {"rounds": arguments.rounds, "busy": arguments.busy, "cases": results, "failures": failures})
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
