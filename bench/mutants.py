"""Which fault shows how: every wait of the program on an emulated accelerator is left out once, and training runs until something is seen.

    python3 bench/mutants.py               # builds a copy of the working tree once, then runs it some hundred times

For each wait that is switched off, a small model trains first in the timed mode and then in up to `--seeds` orders of the late mode, until a run ends in
another way than the processor's: a use of memory was refused, with the name of the missing wait (claim); a value is not finite, because freed memory is
overwritten (poison); the weights are others, or differ between ranks (digest); a test fails, for waits that no training needs (test); or anything else (error).

The exit code is 1 if a fault stays unseen and is not known to change nothing, or if fewer than nine in ten of the others are claims in the first
run. Freed memory is not counted there: nobody uses it, so no use can be refused. Needs Git and Cargo.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, Record, aligned, arguments_for, ended, provenance, write

CNN = "--channels 4 8 --hidden 16 --batch-size 8 --steps 6 --optimizer adamw"
STREAM = "--generate-on-host --pin-memory --non-blocking --copy-stream"
SWITCH = "PACELINE_MUTANT"
RUN_SECONDS = 60
TEST_SECONDS = 300


@dataclass
class Mutant:
    """A wait, and training that needs it."""

    of: str  # copies, reductions, gathers, optimizer, batches or memory
    what: str
    file: str
    wait: str  # the only text of this form in the file, or behind `after`
    flags: str  # of `paceline train`, or of `cargo test`, if training does not need it
    after: str = ""
    without: str = ""  # what stands in its place; nothing otherwise
    redundant: str = ""  # why nothing changes


MUTANTS = [
    Mutant("copies", "to the host, for the kernels before", "collectives/src/staging.rs",
           "self.from_device.wait(&home.record());", "--strategy ddp"),
    Mutant("copies", "to the host, for the copy back before", "collectives/src/staging.rs",
           "self.from_device.wait(&self.to_device.record());", "-p paceline-collectives --test all device::"),
    Mutant("copies", "back, for the kernels before", "collectives/src/staging.rs",
           "        to_device.wait(&home.record());", "--strategy zero1"),
    Mutant("copies", "back, for the operation", "collectives/src/staging.rs", "to_device.wait(done);", "--strategy ddp"),
    Mutant("copies", "the operation, for the copy to the host", "collectives/src/worker.rs", "of.ready.block();", "--strategy ddp"),
    Mutant("copies", "whoever waits for an operation, for the copy back", "collectives/src/worker.rs",
           "copy.wait();", "--strategy ddp"),
    Mutant("copies", "the host, for what it reads", "memory/src/transfer.rs", "stream.copy(self, &host)?.wait();", "--strategy ddp",
           without="stream.copy(self, &host)?;"),
    Mutant("copies", "the host, for a copy from pageable memory", "memory/src/transfer.rs", "event.wait();", "--strategy ddp",
           after="if copy.is_pageable() {",
           redundant="the host's memory is claimed until the copy is done, so nobody changes it; only the time is that of a card"),
    Mutant("reductions", "ddp, for a bucket", "strategies/src/ddp.rs", "cx.wait(&self.in_flight[at])?;",
           "--strategy ddp --bucket-cap-mb 0.01"),
    Mutant("reductions", "bucket_ddp_async, for a bucket", "strategies/src/bucket_ddp_async.rs",
           "cx.wait(&work)?;", "--strategy bucket_ddp_async"),
    Mutant("reductions", "simple_ddp_async, for a gradient", "strategies/src/simple_ddp_async.rs",
           "cx.wait(&work)?;", "--strategy simple_ddp_async"),
    Mutant("reductions", "blocking operations", "collectives/src/ops.rs", "return self.start(request)?.wait();",
           "--strategy simple_ddp", without="drop(self.start(request)?); return Ok(OpTimes::default());"),
    Mutant("reductions", "sharding, for a unit", "strategies/src/sharding/reductions.rs",
           "exposed(cx.track, span::REDUCE_SCATTER, || first.work.wait())?;", "--strategy sharded2"),
    Mutant("reductions", "sharding, for a part that replicas average", "strategies/src/sharding/reductions.rs", "self.work.wait()?;",
           "--strategy sharded2 --nproc 4 --mesh dp=2,shard=2"),
    Mutant("reductions", "the number of targets", "strategies/src/step.rs", "self.hooks.cx.wait(work)?;",
           "-p paceline-strategies --test all parity::targets_of_different_lengths", after="SampleCount::Travels(work) => {"),
    Mutant("reductions", "the sums of the loss", "strategies/src/step.rs", "self.hooks.cx.wait(work)?;",
           "--strategy local_sgd --sync-every 3", after="LossOfAll::Travels(work) = &self.loss {"),
    Mutant("gathers", "for a unit that is on its way", "strategies/src/sharding/gathers.rs",
           "exposed(cx.track, span::GATHER, || work.wait())?;", "--strategy sharded3"),
    Mutant("gathers", "before a unit is used", "strategies/src/sharding/gathers.rs", "self.wait(cx, unit)?;", "--strategy sharded3",
           after="cx.track.mark(span::GATHER_NEEDED, unit.0);"),
    Mutant("gathers", "before another unit takes the place", "strategies/src/sharding/gathers.rs", "self.wait(cx, unit)?;",
           "--strategy sharded3", after="fn evict(&mut self, cx: &mut StepContext, unit: UnitId) -> Result<()> {",
           redundant="every unit that is gathered ahead is used, and so waited for, before another one takes its place"),
    Mutant("gathers", "sharded1, before replicas are compared", "strategies/src/sharded.rs",
           "self.units().gathers.wait_all(cx)?;", "--strategy sharded1"),
    Mutant("gathers", "sharded2, before replicas are compared", "strategies/src/sharded.rs",
           "self.units().gathers.wait_all(cx)?;", "--strategy sharded2"),
    Mutant("gathers", "sharded3, before replicas are compared", "strategies/src/sharded.rs",
           "self.units().gathers.wait_all(cx)?;", "--strategy sharded3",
           redundant="the shards that are compared lie elsewhere than the units that are gathered"),
    Mutant("optimizer", "sharded1, for gathers of the step before", "strategies/src/sharded.rs", "gathers.wait_all(cx)?",
           "--strategy sharded1", after="if holds_all {",
           redundant="the passes have waited for every unit that they use, and these models use all"),
    Mutant("optimizer", "sharded2, for gathers of the step before", "strategies/src/sharded.rs", "gathers.wait_all(cx)?",
           "--strategy sharded2", after="if holds_all {",
           redundant="the passes have waited for every unit that they use, and these models use all"),
    Mutant("optimizer", "the end of a step", "run/src/step.rs", "replica.compute.synchronize()?;", "--strategy ddp",
           redundant="what comes next is behind the optimizer in its stream, or waits for what it reads; only the step's time needs this"),
    Mutant("batches", "kernels, for the copy of their batch", "run/src/to_device.rs",
           "brought.copies.iter().for_each(|copied| kernels.wait(copied));", f"--strategy ddp {STREAM}"),
    Mutant("batches", "the host, for the copy of a batch", "run/src/to_device.rs", "copied.wait();", "--strategy ddp",
           redundant="kernels come behind the copy in its stream, or wait for it; the host waits only because nobody told it not to"),
    Mutant("batches", "the copy, for kernels that used its memory", "model/src/batch.rs",
           "memory.home().into_iter().for_each(|home| stream.wait(&home.record()));", f"--strategy ddp {STREAM}",
           redundant="a step ends with the device synchronized, so no kernel still uses memory that the next batches get"),
    Mutant("memory", "another stream's use, before freed memory is used again", "memory/src/buffers/allocator.rs",
           "lock(&self.parked).push((block, others));", "-p paceline-memory --lib transfer",
           without="{ home.poison(block.base.as_ptr(), block.len_bytes); self.heap().give_back(block); }"),
    Mutant("memory", "the end of that use", "memory/src/buffers/allocator.rs",
           "home.stream().is_after(event) || event.poll() == EventState::Complete;", "-p paceline-memory --lib transfer", without="true;"),
]


def switched(number: int, mutant: Mutant) -> str:
    """The wait behind its switch."""
    wait, without = mutant.wait.strip(), mutant.without
    if without == "true;":
        return f"!({is_off(number)}) || {wait}"
    return f"if {is_off(number)} {{ {wait} }} else {{ {without} }}"


def is_off(number: int) -> str:
    """Whether a fault is off, in Rust."""
    return f'std::env::var_os("{SWITCH}").is_none_or(|of| of != "{number}")'


def copy_tree(tree: Path) -> None:
    """Copies the tracked files."""
    shutil.rmtree(tree, ignore_errors=True)
    for name in subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def replace(tree: Path, places: Sequence[tuple[str, str, str, str]]) -> None:
    """Replaces texts of a copy, each given by its file, a text before it or nothing, itself, and what stands in its place."""
    found = []
    for file, after, sound, faulty in places:
        text = (tree / "crates" / file).read_text()
        begin = text.index(after) + len(after) if after else 0
        count = text.count(sound, begin)
        if count == 0 or count > 1 and not after:
            raise SystemExit(f"error: {file} has {count} times: {sound}")
        found.append((file, text.index(sound, begin), sound, faulty))
    # From the end of a file to its begin, so that each text is found where it was.
    for file, at, sound, faulty in sorted(found, reverse=True):
        path = tree / "crates" / file
        text = path.read_text()
        # Two faults may have one place: then the text stands within what the other one has put there.
        path.write_text(text[:at] + text[at:].replace(sound, faulty, 1))


def cargo_test(target: Path, words: str, number: int | None, **variables: str) -> tuple[int, str, str]:
    """The exit code and the output of tests of the copy, with one of the faults or none."""
    environment = os.environ | variables | ({} if number is None else {SWITCH: str(number)})
    command = ["cargo", "test", "--target-dir", str(target), *words.split()]
    # Without a fault they are also built.
    limit = None if number is None else TEST_SECONDS
    code, output, errors = ended(command, target / "tree", limit, env=environment, text=True)
    return (1, f"still running after {limit} s", "") if code is None else (code, output, errors)


def how_it_ended(lines: list[str]) -> tuple[str, str]:
    """The kind of error, and the line that says so."""
    signs = {"claim": ("does not wait for it", "wait for its event"), "poison": ("finite", "NaN"), "digest": ("has other values on rank",),
             "test": ("... FAILED",)}
    for kind, words in signs.items():
        if found := [line for line in lines if any(word in line for word in words)]:
            return kind, found[0].strip()
    return "error", " | ".join(lines[-2:])


def test(target: Path, flags: str, number: int | None) -> tuple[str, str]:
    """How tests of the copy ended."""
    code, output, _ = cargo_test(target, flags, number)
    return ("weights", "") if code == 0 else how_it_ended(output.splitlines())


def train(binary: Path, flags: str, number: int | None) -> tuple[str, str]:
    """How a run ended, and the words that say so."""
    environment = os.environ | ({} if number is None else {SWITCH: str(number)})
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        code, output, errors = ended([binary, "train", *flags.split()], Path(folder), RUN_SECONDS, env=environment, text=True)
    if code is None:
        return "error", f"still running after {RUN_SECONDS} s"
    if found := re.search(r"sha256 ([0-9a-f]{64})", output):
        return "weights", found[1]
    return how_it_ended([line for line in errors.splitlines() if not line.startswith("warning:")])


def try_out(target: Path, number: int, mutant: Mutant, num_seeds: int) -> Record:
    if mutant.flags.startswith("-p "):
        if (sound := test(target, mutant.flags, None))[0] != "weights":
            raise SystemExit(f"error: without a fault, cargo test {mutant.flags} fails: {sound}")
        how, words = test(target, mutant.flags, number)
        return {"caught": None if how == "weights" else how, "run": 1, "device": "tests", "words": words}
    binary = target / "debug/paceline"
    flags = f"{CNN} {mutant.flags}"
    flags += "" if "--nproc" in flags else " --nproc 2"
    expected = train(binary, flags.replace(STREAM, ""), None)
    devices = ["sim", *(f"sim:late,seed={seed}" for seed in range(num_seeds))]
    sound = train(binary, f"{flags} --device {devices[1]}", None)
    if expected[0] != "weights" or sound != expected:
        raise SystemExit(f"error: without a fault, {flags} ends with {expected} and {sound}")
    for run, device in enumerate(devices, 1):
        how, words = train(binary, f"{flags} --device {device}", number)
        if (how, words) != expected:
            how = "digest" if how == "weights" else how  # the ranks agree, and the processor has others
            return {"caught": how, "run": run, "device": device, "words": words}
    return {"caught": None, "run": len(devices)}


def main() -> int:
    parser = arguments_for(__doc__, "mutants.json", rounds=0, has_program=False)
    parser.add_argument("--target-dir", type=Path, default=ROOT / "target/mutants", metavar="DIR", help="where the copy is built")
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="orders of the late mode for each fault (default: 20)")
    args = parser.parse_args()
    begin, record = time.monotonic(), provenance() | {"mutants": []}
    target = Path(os.path.abspath(args.target_dir))
    tree = target / "tree"
    copy_tree(tree)
    replace(tree, [(mutant.file, mutant.after, mutant.wait, switched(number, mutant)) for number, mutant in enumerate(MUTANTS)])
    subprocess.run(["cargo", "build", "--bin", "paceline", "--workspace", "--target-dir", str(target)], cwd=tree, check=True)
    for number, mutant in enumerate(MUTANTS):
        outcome = try_out(target, number, mutant, args.seeds)
        record["mutants"].append({"of": mutant.of, "wait": mutant.what, "file": mutant.file, "flags": mutant.flags,
                                  "redundant": mutant.redundant or None} | outcome)
    rows = [["of", "the wait of", "caught by", "in run", "how"]]
    for of in record["mutants"]:
        by = of["caught"] or ("changes nothing" if of["redundant"] else "NOTHING")
        rows.append([of["of"], of["wait"], by, str(of["run"]) if of["caught"] else "", (of.get("words") or of["redundant"] or "")[:90]])
    needed = [of for of in record["mutants"] if not of["redundant"]]
    used = [of for of in needed if of["of"] != "memory"]
    at_once = [of for of in used if of["caught"] == "claim" and of["run"] == 1]
    write(args.out, record)
    print(aligned(rows, left={0, 1, 2, 4}))
    unseen = [of["wait"] for of in needed if not of["caught"]]
    wrong = [of["wait"] for of in record["mutants"] if of["redundant"] and of["caught"]]
    print(f"{len(needed)} waits that something needs: {len(at_once)} of {len(used)} are claims in the first run, {len(unseen)} stay unseen; "
          f"{len(record['mutants']) - len(needed)} change nothing; {time.monotonic() - begin:.0f} s")
    return 1 if unseen or wrong or len(at_once) < 0.9 * len(used) else 0


if __name__ == "__main__":
    sys.exit(main())
