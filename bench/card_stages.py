"""Stages of `bench/card_day.py` that call the vendor's libraries: memory that runs out, and NCCL.

    python3 card_stages.py nccl --programs FOLDER --out nccl.json [--small]

Writes the record to `--out`. Exits with 1 and one line if something is not as it must be. With `--small` the card is an emulated one.
"""
import argparse
import ctypes
import json
import multiprocessing
import os
import queue
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import Record, RunFailed, run


def check(holds: bool, words: str) -> None:
    if not holds:
        raise RunFailed(words)


def refused(binary: Path, words: str, code: int, *said: str) -> str:
    """The last line of a command that must end with this code and these words."""
    ended = subprocess.run([binary, *words.split()], capture_output=True, text=True, timeout=60)
    line = (ended.stderr.strip().splitlines() or [""])[-1]
    check(ended.returncode == code and all(of in line for of in said), f"paceline {words} ended with {ended.returncode}: {line}")
    return line


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


def out_of_memory(binary: Path, small: bool) -> Record:
    """A part of the largest batch that `plan` says to fit is trained; twice as much ends with a sentence. This process holds the rest of
    the card, since the host, too, has to hold as much memory as `paceline train` predicts."""
    model = "--model mlp --input-dim 4 --hidden-dim 512 --output-dim 4" if small else "--image 32 32 3 --channels 2048 2048"
    room = 1 << 27 if small else 8 * 10**9
    largest = 1
    # The plan's answer by bisection.
    for bit in reversed(range(24)):
        words = f"plan --on 1xH100 {model} --precision f32 --batch-size {largest + (1 << bit)} --top 1 --rank-gb {room / 1e9} --json plan.json"
        run([binary, *words.split()], Path(), 60)
        fits_too = any(row["over_bytes"] == 0 for row in json.loads(Path("plan.json").read_text())["rows"])
        largest += fits_too << bit
    cuda = current_card()
    free, total, held = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64()
    statuses = [cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
                cuda.cuMemAlloc_v2(ctypes.byref(held), ctypes.c_size_t(free.value - room))]
    check(not any(statuses), f"the driver's answers: {statuses}")
    if small:
        # Each process has an emulated card of its own.
        os.environ["PACELINE_EMULATED_MEMORY"] = str(room)
    fits, fails = largest // (4 if small else 2), 2 * largest
    # One batch of images is enough; an MLP has no number of samples.
    words = [f"train {model} --device cuda --nproc 1 --batch-size {batch} --steps 1{'' if small else f' --samples {batch}'}" for batch in (fits, fails)]
    run([binary, *words[0].split(), "--json", "run.json"], Path(), 60)
    peak_bytes = json.loads(Path("run.json").read_text())["peak_bytes"]["total"]
    said = refused(binary, words[1], 1, "out of memory", "bytes were asked for")
    print(f"a batch of {largest} is predicted to fit into {room / 1e9:.2f} GB: {fits} trained; {fails}: {said}")
    return {"room_bytes": room, "largest_batch": largest, "peak_bytes": peak_bytes, "said": said}


def two_ranks(answers: multiprocessing.Queue) -> None:
    """What NCCL itself says of two ranks on one card: threads of this process, since processes have emulated cards of their own."""
    class Identity(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_byte * 128)]

    nccl, identity = library("libnccl.so.2"), Identity()
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Identity, ctypes.c_int]

    def one(rank: int) -> str:
        current_card()
        return nccl.ncclGetErrorString(nccl.ncclCommInitRank(ctypes.byref(ctypes.c_void_p()), 2, identity, rank)).decode()

    current_card()
    nccl.ncclGetUniqueId(ctypes.byref(identity))
    with ThreadPoolExecutor(2) as pool:
        answers.put(list(pool.map(one, range(2))))


def nccl(binary: Path, small: bool) -> Record:
    one = run([binary, *"check --device cuda --nproc 1 --transport nccl".split()], Path(), 30).splitlines()[-1]
    check("every element right on every rank" in one, one)
    run([binary, *"bench all_reduce --device cuda --nproc 1 --transport nccl -b 8 -e 4M -f 8 -w 2 --iters 5 --json bench.json".split()], Path(), 30)
    said: Record = {"refused": refused(binary, "train --device cuda --nproc 2 --transport nccl", 2, "2 ranks of this host share 1 card")}
    for shares in "01":
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = shares
        answers = multiprocessing.get_context("spawn").Queue()
        multiprocessing.get_context("spawn").Process(target=two_ranks, args=(answers,), daemon=True).start()
        said[shares] = sorted(set(answers.get(timeout=15)))
    # Otherwise `paceline train` refuses what it need not.
    check(all("invalid usage" in of for of in said["0"]), f"NCCL itself says of two ranks on a card: {said['0']}")
    print(f"one rank: every element right; two on a card are refused: NCCL says {said['0']}, with NCCL_MULTI_RANK_GPU_ENABLE=1 {said['1']}")
    return said | {"one_rank": json.loads(Path("bench.json").read_text())}


def main() -> int:
    stages = {of.__name__: of for of in (out_of_memory, nccl)}
    parser = argparse.ArgumentParser(description="A stage of bench/card_day.py, in an empty folder.")
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--programs", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--small", action="store_true", help="sizes for an emulated card")
    arguments = parser.parse_args()
    try:
        found = stages[arguments.stage](arguments.programs / "paceline", arguments.small)
    except (RunFailed, OSError, KeyError, ValueError, queue.Empty, subprocess.SubprocessError) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
