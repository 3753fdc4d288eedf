"""Stages of `bench/card_day.py` that are no script of their own. Each takes where it is, returns its record, and raises where a card falls short.

    python3 card_stages.py kill --programs FOLDER --out kill.json [--small]

Writes the record to `--out`. Exits with 1 and one line if something is not as it must be, and with 77 and the reason if the stage cannot be
held here. With `--small` the card is an emulated one, and sizes are such that it can compute them.
"""
import argparse
import csv
import ctypes
import json
import multiprocessing
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from common import Record, RunFailed, run
from faults import NAMED, start, wait_for_ranks

LEFT_OUT = 77
TEST_SECONDS = 95
TOOL_SECONDS = 50
# An emulated card interprets each instruction, so tests, whose sizes stay as they are, take longer.
SLOWNESS = 3
CNN = "--image 8 8 3 --channels 4 8 --hidden 16 --batch-size 4"
INVALID_USAGE = "invalid usage"


class LeftOut(Exception):
    """The stage cannot be held on this machine. The message says why."""


class Place(NamedTuple):
    programs: Path
    out: Path
    small: bool

    def command(self, words: str) -> list[str]:
        return [str(self.programs / "paceline"), *words.split()]

    def train(self, words: str) -> Record:
        with tempfile.TemporaryDirectory() as folder:
            run(self.command(f"train {words} --device cuda --quiet --json run.json"), Path(folder), 60)
            return json.loads(Path(folder, "run.json").read_text())

    def refused(self, words: str, code: int, *said: str) -> str:
        """The last line of a command that must end with this code and these words."""
        with tempfile.TemporaryDirectory() as folder:
            ended = subprocess.run(self.command(words), cwd=folder, capture_output=True, text=True, timeout=60)
        line = (ended.stderr.strip().splitlines() or [""])[-1]
        check(ended.returncode == code and all(of in ended.stderr for of in said), f"paceline {words} ended with {ended.returncode}: {line}")
        return line


def check(holds: bool, words: str) -> None:
    if not holds:
        raise RunFailed(words)


def library(name: str) -> ctypes.CDLL:
    """A library of the vendor's, from where the programs take theirs."""
    folders = os.environ.get("PACELINE_CUDA_LIBRARIES", "").split(":")
    return ctypes.CDLL(next((f"{folder}/{name}" for folder in folders if folder and Path(folder, name).exists()), name))


def current_card() -> ctypes.CDLL:
    """The driver, with the context of the first card for this thread."""
    cuda, context = library("libcuda.so.1"), ctypes.c_void_p()
    statuses = [cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), cuda.cuCtxSetCurrent(context)]
    check(not any(statuses), f"the driver's answers: {statuses}")
    return cuda


def probe(at: Place) -> Record:
    lines = run(at.command("check --device cuda --nproc 1"), at.out.parent, 30).splitlines()
    return {"lines": lines, "refused": at.refused("train --nproc 1 --device cuda:99", 2, "--device cuda:99")}


def tests(at: Place) -> Record:
    """All test programs; several at a time where there are many cores, since none of them measures time."""
    found: Record = {}
    limit_s = TEST_SECONDS * (SLOWNESS if at.small else 1)

    def one(program: Path) -> None:
        begin = time.monotonic()
        log = at.out.with_name(f"{program.name}.log")
        with open(log, "w", encoding="utf-8") as file:
            try:
                code = subprocess.run([program], stdout=file, stderr=subprocess.STDOUT, timeout=limit_s).returncode
            except subprocess.TimeoutExpired:
                code = None
        passed = re.findall(r"(\d+) passed", log.read_text(errors="replace"))
        found[program.name] = {"code": code, "passed": sum(map(int, passed)), "seconds": round(time.monotonic() - begin, 1)}
        print(program.name, found[program.name], flush=True)
        at.out.write_text(json.dumps(found, indent=1))

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        list(pool.map(one, sorted(at.programs.glob("test-*"))))
    failed = [name for name, of in found.items() if of["code"] != 0]
    check(not failed and bool(found), f"failed: {', '.join(failed) or 'there are no tests'}")
    print(f"{sum(of['passed'] for of in found.values())} tests of {len(found)} programs passed")
    return found


def kill(at: Place) -> Record:
    """kill -9 of one of two ranks that share the card: the launcher names it, and the card serves the next run as before."""
    before = at.train(f"{CNN} --nproc 1 --steps 8")
    with tempfile.TemporaryDirectory() as folder:
        words = f"train {CNN} --device cuda --nproc 2 --quiet --epochs 1000000 --save saved --save-every 5"
        launcher = start(at.programs / "paceline", words.split(), folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            ranks, deadline = wait_for_ranks(launcher, 2), time.monotonic() + 30
            while not Path(folder, "saved", "latest").exists():
                check(bool(ranks) and launcher.poll() is None and time.monotonic() < deadline, "two ranks do not train")
                time.sleep(0.05)
            os.kill(ranks[1], signal.SIGKILL)
            begin = time.monotonic()
            said = launcher.communicate(timeout=30)[1]
        finally:
            launcher.kill()
    named = NAMED.findall(said)
    check(launcher.returncode == 137 and bool(named) and named[0][0] == "1", f"the launcher ended with {launcher.returncode}: {said[-300:]}")
    found = {"seconds": round(time.monotonic() - begin, 2), "named": named, "before": before["card_used_bytes"]}
    after = at.train(f"{CNN} --nproc 1 --steps 8")
    check(after["weights_sha256"] == before["weights_sha256"], "the card computes other weights after a rank was killed")
    check((after["card_used_bytes"] or 0) <= (before["card_used_bytes"] or 0), "memory of a killed rank is still in use")
    print(f"rank 1 named, the launcher ended after {found['seconds']} s, the next run has the same weights")
    return found


def out_of_memory(at: Place) -> Record:
    """A part of the largest batch that `predict` says to fit is trained; twice as much ends with a sentence. Another program holds the rest of
    the card, since the host, too, has to hold as much memory as `paceline train` predicts."""
    model = "--model mlp --input-dim 4 --hidden-dim 512 --output-dim 4" if at.small else "--image 32 32 3 --channels 2048 2048"
    room = 1 << 27 if at.small else 8 * 10**9
    with tempfile.TemporaryDirectory() as folder:
        words = f"predict --memory --nproc 1 {model} --batch-size 4 --rank-gb {room / 1e9} --strategies ddp --json predicted.json"
        run(at.command(words), Path(folder), 60)
        largest = json.loads(Path(folder, "predicted.json").read_text())["rows"][0]["largest_batch"]
    cuda = current_card()
    free, total, held = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64()
    statuses = [cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
                cuda.cuMemAlloc_v2(ctypes.byref(held), ctypes.c_size_t(free.value - room))]
    check(not any(statuses), f"the driver's answers: {statuses}")
    if at.small:
        # Each process has an emulated card of its own.
        os.environ["PACELINE_EMULATED_MEMORY"] = str(room)
    # A run has its images made once, so one batch of them is enough.
    samples = "" if at.small else "--samples {0}"
    fits, fails = largest // (4 if at.small else 2), 2 * largest
    trained = at.train(f"{model} --nproc 1 --batch-size {fits} {samples.format(fits)} --steps 1")
    words = f"train {model} --device cuda --nproc 1 --batch-size {fails} {samples.format(fails)} --steps 1"
    said = at.refused(words, 1, "out of memory", "bytes were asked for")
    print(f"a batch of {largest} is predicted to fit into {room / 1e9:.2f} GB: {fits} trained; {fails}: {said}")
    return {"room_bytes": room, "largest_batch": largest, "peak_bytes": trained["peak_bytes"]["total"], "said": said}


def two_ranks(answers: multiprocessing.Queue) -> None:
    """What NCCL itself says of two ranks on one card: threads of this process, since processes have emulated cards of their own."""
    class Identity(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_byte * 128)]

    nccl, identity = library("libnccl.so.2"), Identity()
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Identity, ctypes.c_int]

    def one(rank: int) -> str:
        current_card()
        communicator = ctypes.c_void_p()
        return nccl.ncclGetErrorString(nccl.ncclCommInitRank(ctypes.byref(communicator), 2, identity, rank)).decode()

    current_card()
    nccl.ncclGetUniqueId(ctypes.byref(identity))
    with ThreadPoolExecutor(2) as pool:
        answers.put(list(pool.map(one, range(2))))


def nccl(at: Place) -> Record:
    one = run(at.command("check --device cuda --nproc 1 --transport nccl"), at.out.parent, 30).splitlines()[-1]
    check("every element right on every rank" in one, one)
    with tempfile.TemporaryDirectory() as folder:
        run(at.command("bench all_reduce --device cuda --nproc 1 --transport nccl -b 8 -e 4M -f 8 -w 2 --iters 5 --json bench.json"), Path(folder), 30)
        times = json.loads(Path(folder, "bench.json").read_text())
    refused = at.refused(f"train {CNN} --device cuda --nproc 2 --transport nccl", 2, "2 ranks of this host share 1 card")
    spawn, said = multiprocessing.get_context("spawn"), {}
    for shares in "01":
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = shares
        answers = spawn.Queue()
        spawn.Process(target=two_ranks, args=(answers,), daemon=True).start()
        said[shares] = sorted(set(answers.get(timeout=15)))
    # Otherwise `paceline train` refuses what it need not.
    check(all(INVALID_USAGE in of for of in said["0"]), f"NCCL itself says of two ranks on a card: {said['0']}")
    print(f"one rank: every element right; two on a card are refused: NCCL says {said['0']}, with NCCL_MULTI_RANK_GPU_ENABLE=1 {said['1']}")
    return {"one_rank": times, "refused": refused, "nccl_says": said}


def tool(name: str, at: Place, instead: str) -> str:
    if at.small:
        raise LeftOut(instead)
    found = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if not found:
        raise LeftOut(f"there is no {name} on this machine")
    return found


def sanitizer(at: Place) -> Record:
    command = [tool("compute-sanitizer", at, "an emulated card checks each access, barrier and wait itself, in the stage tests"), "--error-exitcode", "9"]
    found, deadline = {}, time.monotonic() + TOOL_SECONDS
    for program in [at.programs / "paceline", *sorted(at.programs.glob("test-*"))]:
        words = ["check", "--device", "cuda", "--nproc", "1"] if program.name == "paceline" else []
        try:
            ended = subprocess.run([*command, program, *words], capture_output=True, text=True, timeout=max(1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            found[program.name] = "not ended in time"
            continue
        lines = [line for line in (ended.stdout + ended.stderr).splitlines() if line.startswith("=========")]
        if not found and ended.returncode != 0 and not any("ERROR SUMMARY" in line for line in lines):
            raise LeftOut(f"compute-sanitizer cannot run here: {(lines or [ended.stderr])[0].strip('= ')[:200]}")
        check(ended.returncode != 9, f"{program.name}: {' | '.join(lines[:6])}")
        found[program.name] = (lines or ["said nothing"])[-1].strip("= ")
    print(f"{sum('ERROR SUMMARY: 0' in of for of in found.values())} of {len(found)} programs ended without an error")
    return found


METRICS = {
    "gpu__time_duration.sum": "ns",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory",
}


def hottest_of(text: str) -> list[Record]:
    """The ten kernels that took the most time in the raw page of Nsight Compute, and their shares of the peak, weighted by time."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    for row in csv.DictReader(line for line in text.splitlines() if line.startswith('"')):
        if not row["ID"]:
            continue  # The row of the units.
        ns, compute, memory = (float(row[name].replace(",", "") or 0) for name in METRICS)
        of = sums[row["Kernel Name"]]
        for at, value in enumerate((ns, ns * compute, ns * memory, 1)):
            of[at] += value
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])[:10]
    return [{"kernel": name, "launches": int(count), "ms": ns / 1e6, "compute_pct": compute / ns, "memory_pct": memory / ns}
            for name, (ns, compute, memory, count) in ordered]


def hottest(at: Place) -> Record:
    command = [tool("ncu", at, "an emulated card has no counters of the hardware"), "--csv", "--page", "raw", "--print-units", "base",
               "--clock-control", "none", "--metrics", ",".join(METRICS), "--launch-skip", "1500", "--launch-count", "400"]
    found, deadline = {}, time.monotonic() + TOOL_SECONDS
    for case in ("cnn/bf16", "llama/bf16"):
        limit = max(1, (deadline - time.monotonic()) / (2 - len(found)))
        try:
            ended = subprocess.run([*command, at.programs / "card_steps", case], capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            raise LeftOut(f"ncu takes more than {limit:.0f} s for {case}") from None
        found[case] = hottest_of(ended.stdout)
        if not found[case]:
            raise LeftOut(f"ncu cannot run here: {(ended.stdout + ended.stderr).strip()[-200:]}")
        for of in found[case]:
            print(f"{case} {of['kernel']}: {of['launches']} launches, {of['ms']:.3f} ms, {of['compute_pct']:.0f} % compute, {of['memory_pct']:.0f} % memory")
    return found


STAGES: dict[str, Callable[[Place], Record]] = {
    of.__name__: of for of in (probe, tests, kill, out_of_memory, nccl, sanitizer, hottest)
}


def main() -> int:
    parser = argparse.ArgumentParser(description="A stage of bench/card_day.py.")
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--programs", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--small", action="store_true", help="sizes for an emulated card")
    arguments = parser.parse_args()
    try:
        found = STAGES[arguments.stage](Place(arguments.programs, arguments.out, arguments.small))
    except LeftOut as why:
        print(f"left out: {why}")
        return LEFT_OUT
    except (RunFailed, OSError, KeyError, ValueError, queue.Empty, subprocess.SubprocessError) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
