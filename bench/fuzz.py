"""Gives the readers of what comes from outside arbitrary bytes, and records the outcome of each target.

    python3 bench/fuzz.py --minutes 10 --keep            # every target, one after the other
    python3 bench/fuzz.py store_wire hello --minutes 1

The targets are in fuzz/fuzz_targets. A target starts from the kept inputs in crates/*/tests/corpus/<target>, which `cargo test` replays, and runs on one thread
at a low priority. With --keep, the inputs that reach code that no kept input reaches are stored there, at most --most in all.

results/fuzz.json has an entry for each target, which a later run of that target replaces. Exits with 1 if an input
broke something. That input is left in fuzz/found, and should be added to the kept inputs as `found-...` together with
the fix, and with a line in fuzz/faults.json.
"""
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from common import ROOT, Record, arguments_for, provenance, write

FUZZ = ROOT / "fuzz"
MANIFEST = tomllib.loads((FUZZ / "Cargo.toml").read_text())
# Named, so that build scripts and macros are built without the flags below.
PLATFORM = "x86_64-unknown-linux-gnu"
# What libFuzzer needs to know of an execution, from the pass that LLVM has for it, and Rust's own checks.
COVERAGE = ("level=4", "inline-8bit-counters", "pc-table", "trace-compares")
FLAGS = ["-Cpasses=sancov-module", *(f"-Cllvm-args=-sanitizer-coverage-{what}" for what in COVERAGE), "-Cdebug-assertions", "-Ccodegen-units=1"]
# Kept inputs are small, and bugs in these formats are too. A trace needs some room for a few events.
MAX_BYTES = {"traces": 16384}
MAX_BYTES_OF_OTHERS = 4096
# Larger inputs that the fuzzer finds are not worth their place in the repository.
MAX_KEPT_BYTES = {"traces": 1024}


def main() -> None:
    names = sorted(path.stem for path in (FUZZ / "fuzz_targets").glob("*.rs"))
    parser = arguments_for(__doc__, "fuzz.json", rounds=0, has_program=False)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(names)}; all if none is named")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--keep", action="store_true", help="store inputs that reach new code")
    parser.add_argument("--most", type=int, default=60, help="the most kept inputs of a target")
    args = parser.parse_args()
    if unknown := sorted(set(args.targets) - set(names)):
        parser.error(f"there is no target {unknown[0]}; pass one of {', '.join(names)}")

    found = 0
    for name in args.targets or names:
        record = fuzz(name, args.minutes, args.most if args.keep else 0)
        print(json.dumps(record, indent=2), flush=True)
        store(args.out, record)
        found += len(record["findings"])
    if found:
        sys.exit(f"{found} inputs broke something, see {FUZZ.relative_to(ROOT)}/found")


def fuzz(name: str, minutes: float, most: int) -> Record:
    """Builds and runs a target, and keeps at most `most` inputs."""
    [kept] = ROOT.glob(f"crates/*/tests/corpus/{name}")
    max_len = f"-max_len={MAX_BYTES.get(name, MAX_BYTES_OF_OTHERS)}"
    dictionary = FUZZ / "fuzz_targets" / f"{name}.dict"
    words = [f"-dict={dictionary}"] if dictionary.exists() else []
    with tempfile.TemporaryDirectory() as work:
        new, small, broken = (Path(work, part) for part in ("new", "small", "broken"))
        for folder in (new, small, broken):
            folder.mkdir()
        program = build(name, Path(work))
        began_s, origin, before = time.monotonic(), provenance(), len(list(kept.iterdir()))
        limits = [f"-max_total_time={round(minutes * 60)}", max_len, "-timeout=10", "-rss_limit_mb=1024"]
        log = run(program, *limits, *words, f"-artifact_prefix={broken}/", "-print_final_stats=1", new, kept)
        seconds = round(time.monotonic() - began_s)
        stats = dict(re.findall(r"^stat::(\w+):\s+(\d+)", log, re.MULTILINE))
        findings = sorted(broken.iterdir())
        if "number_of_executed_units" not in stats and not findings:
            sys.exit(f"{name}: the fuzzer did not run:\n{log[-3000:]}")
        if findings:
            print(f"{name}: {findings[0].name}\n{log[-3000:]}", file=sys.stderr)
        for path in findings:
            (FUZZ / "found").mkdir(exist_ok=True)
            shutil.copy(path, FUZZ / "found" / f"{name}-{path.name}")
        if most and not findings:
            run(program, "-set_cover_merge=1", max_len, small, kept, new)
            keep(small, kept, most, MAX_KEPT_BYTES.get(name, MAX_BYTES_OF_OTHERS))
        reached = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)/", log) or [(0, 0, 0)]
        counters = re.search(r"\((\d+) inline 8-bit counters\)", log)
        return {
            "target": name, **origin, "compiler": subprocess.check_output(["rustc", "--version"], text=True).strip(),
            "fuzzer": f"libFuzzer of libfuzzer-sys {locked('libfuzzer-sys')}", "threads": 1, "seconds": seconds,
            "executions": int(stats.get("number_of_executed_units", 0)), "executions_per_s": int(stats.get("average_exec_per_sec", 0)),
            "counters": int(counters[1]) if counters else 0,
            **dict(zip(("counters_reached", "features_reached", "corpus_at_the_end"), map(int, reached[-1]))),
            "peak_rss_mb": int(stats.get("peak_rss_mb", 0)),
            "kept_inputs_before": before, "kept_inputs": len(list(kept.iterdir())),
            "findings": [path.name for path in findings],
            "faults_fixed": json.loads((FUZZ / "faults.json").read_text()).get(name, []),
        }


def build(name: str, folder: Path) -> Path:
    """Builds a target. The program is copied, so that it stays the same while others are built."""
    environment = os.environ | {"RUSTFLAGS": " ".join(FLAGS)}
    [needs] = [own["required-features"] for own in MANIFEST["bin"] if own["name"] == name]
    command = ["cargo", "build", "--release", "--locked", "--target", PLATFORM, "--bin", name, "--features", ",".join(needs)]
    subprocess.run(command, cwd=FUZZ, env=environment, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", FUZZ / "target"))
    return Path(shutil.copy(target / PLATFORM / "release" / name, folder))


def run(program: Path, *words: str | Path) -> str:
    """Runs the fuzzer, which adds new inputs to the first folder, and returns its output."""
    command = ["nice", "-n", "10", program, *words]
    return subprocess.run(command, cwd=program.parent, text=True, errors="replace", capture_output=True).stderr


def keep(small: Path, kept: Path, most: int, max_bytes: int) -> None:
    """Stores inputs of `small` that are not in `kept`, and not longer than `max_bytes`."""
    known = [path.read_bytes() for path in kept.iterdir()]
    inputs = {path.read_bytes() for path in small.iterdir()}.difference(known)
    ordered = sorted((data for data in inputs if len(data) <= max_bytes), key=lambda data: (len(data), data))
    room = max(most - len(known), 0)
    # The same number of inputs of every size, because most inputs are short, and short inputs test little.
    chosen = ordered[:: math.ceil(len(ordered) / room) or 1] if room else []
    for data in chosen:
        (kept / f"fuzz-{hashlib.sha256(data).hexdigest()[:16]}").write_bytes(data)


def store(out: Path, record: Record) -> None:
    """Replaces the entry of the target in the file of results."""
    entries = json.loads(out.read_text())["targets"] if out.exists() else []
    entries = [entry for entry in entries if entry["target"] != record["target"]] + [record]
    entries.sort(key=lambda entry: entry["target"])
    what = "arbitrary bytes given to the readers of what comes from outside (fuzz/fuzz_targets)"
    write(out, {"what": what, "targets": entries})


def locked(package: str) -> str:
    packages = tomllib.loads((FUZZ / "Cargo.lock").read_text())["package"]
    return next(of["version"] for of in packages if of["name"] == package)


if __name__ == "__main__":
    main()
