"""Gives the reader of traces arbitrary bytes for some minutes, and records the outcome.

    rustup toolchain install nightly && cargo install cargo-fuzz
    python3 bench/fuzz_traces.py --minutes 10 --keep

The fuzzer starts from the kept inputs in crates/analysis/tests/corpus, which `cargo test` replays. It runs on one
thread at the lowest priority. Inputs that reach code that no kept input reaches are counted and, with --keep,
stored there if they are small. Exits with 1 if an input broke something. That input is left in
crates/analysis/fuzz, and should be added to the corpus together with the fix.
"""
import argparse
import datetime
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, commit, machine

FUZZ = ROOT / "crates" / "analysis" / "fuzz"
KEPT = ROOT / "crates" / "analysis" / "tests" / "corpus"
# Larger than the largest kept input.
MAX_BYTES = 16384
# Larger inputs are not worth their place in the repository.
MAX_KEPT_BYTES = 1024
MAX_NEW = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--keep", action="store_true", help="store small inputs that reach new code")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "fuzz_traces.json")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as work:
        found, small, artifacts = (Path(work, name) for name in ("found", "small", "artifacts"))
        for folder in (found, small, artifacts):
            folder.mkdir()
        began, version_fuzzed = datetime.datetime.now(datetime.timezone.utc), commit()
        log = fuzz(
            [found, KEPT],
            f"-max_total_time={round(args.minutes * 60)}",
            f"-max_len={MAX_BYTES}",
            f"-dict={FUZZ / 'dictionary'}",
            f"-artifact_prefix={artifacts}/",
            "-timeout=10",
            "-rss_limit_mb=2048",
            "-print_final_stats=1",
        )
        stats = dict(re.findall(r"^stat::(\w+):\s+(\d+)", log, re.MULTILINE))
        broken = sorted(artifacts.iterdir())
        if "number_of_executed_units" not in stats and not broken:
            sys.exit(f"the fuzzer did not run:\n{log[-3000:]}")
        if not broken:
            fuzz([small, KEPT, found], "-merge=1", f"-max_len={MAX_BYTES}")
        kept = {path.read_bytes() for path in KEPT.iterdir()}
        new = [path for path in sorted(small.iterdir()) if path.read_bytes() not in kept]
        stored = sorted((p for p in new if p.stat().st_size <= MAX_KEPT_BYTES), key=lambda p: p.stat().st_size)
        # The same number of inputs of every size, because most inputs are short, and short inputs test little.
        stored = stored[:: math.ceil(len(stored) / MAX_NEW) or 1] if args.keep else []
        record = {
            "what": "arbitrary bytes given to the reader of traces (crates/analysis/fuzz)",
            "date": began.isoformat(timespec="seconds"),
            "commit": version_fuzzed,
            "machine": machine(),
            "compiler": version("rustc", "+nightly", "--version"),
            "fuzzer": version("cargo", "fuzz", "--version"),
            "threads": 1,
            "minutes": args.minutes,
            "inputs": int(stats.get("number_of_executed_units", 0)),
            "inputs_per_s": int(stats.get("average_exec_per_sec", 0)),
            "peak_rss_mb": int(stats.get("peak_rss_mb", 0)),
            "kept_inputs_before": len(kept),
            "inputs_that_reach_new_code": len(new),
            "inputs_stored": len(stored),
            "findings": [path.name for path in broken],
        }
        for path in stored:
            name = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            shutil.copy(path, KEPT / f"fuzz_{name}.json")
        for path in broken:
            shutil.copy(path, FUZZ / path.name)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=2) + "\n")
        print(json.dumps(record, indent=2))
        if broken:
            sys.exit(f"an input broke something, see crates/analysis/fuzz:\n{log[-3000:]}")


def fuzz(folders: list[Path], *options: str) -> str:
    """Runs the fuzzer over folders of inputs, adds new inputs to the first folder, and returns the output."""
    command = ["nice", "-n", "19", "cargo", "+nightly", "fuzz", "run", "read", *map(str, folders), "--", *options]
    return subprocess.run(command, cwd=FUZZ.parent, text=True, capture_output=True).stderr


def version(*command: str) -> str:
    return subprocess.run(command, text=True, capture_output=True).stdout.strip()


if __name__ == "__main__":
    main()
