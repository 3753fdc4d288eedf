"""The tests of the crates with unsafe code under AddressSanitizer, ThreadSanitizer and Miri, and what each of them found.

    python3 scripts/sanitizers.py --unit                                   # unit tests only
    python3 scripts/sanitizers.py --tools address --crates memory

The sanitizers come with stable Rust for x86-64 Linux, and RUSTC_BOOTSTRAP=1 lets it use them. AddressSanitizer sees the accesses of our code, not
those within the standard library. ThreadSanitizer must see how the standard library orders threads, or else it takes each wait of a Condvar,
each message of a channel and each last Arc for a race. So it builds the standard library too, and is left out where there is no source of it
(`rustup component add rust-src`). It knows memory by its address, and ranks of `shm` have theirs at different ones, so it checks ranks that are threads;
how processes wait for each other is checked by loom. Miri is a part of nightly Rust, and is left out where there is none.

Builds in CARGO_TARGET_DIR/sanitizers. Prints a line for each tool and crate, and writes `results/sanitizers.json`, where an entry replaces
the one of the same tool and crate. The exit code is 1 if a tool found a fault, or a test failed. Only the standard library is needed.
"""
import argparse
import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CRATES = ("memory", "collectives", "kernels")
OF_MIRI = ("numeric", "memory")
SOURCE = "lib/rustlib/src/rust/library"
TOOLS = ("address", "thread", "miri")
REPORT = re.compile(r"^(?:=+\n)?(?:WARNING: ThreadSanitizer|.*ERROR: AddressSanitizer|error: Undefined Behavior).*$", re.MULTILINE)
RESULT = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed", re.MULTILINE)
OPTIONS = {
    # Memory of work that has failed is never freed, since a peer may still write there.
    "ASAN_OPTIONS": "detect_leaks=0",
    "MIRIFLAGS": "-Zmiri-disable-isolation",
}


def command(tool: str, crate: str, kinds: list[str], target: Path) -> tuple[list[str], dict[str, str]]:
    of_crate = ["--locked", "-p", f"paceline-{crate}", *kinds, "--no-fail-fast"]
    if tool == "miri":
        return ["cargo", "+nightly", "miri", "test", *of_crate], {"CARGO_TARGET_DIR": str(target)}
    flags = f"-Zsanitizer={tool} -Cunsafe-allow-abi-mismatch=sanitizer"
    if tool == "thread":
        # Calls of the system that it can see: else memory that is mapped where other memory was seems to be the same.
        flags += " --cfg=rustix_use_libc"
    # With a named platform, macros and build scripts are built without the flags.
    words = ["cargo", "test", *of_crate, "--target=x86_64-unknown-linux-gnu", *(["-Zbuild-std"] if tool == "thread" else [])]
    return words, {"RUSTC_BOOTSTRAP": "1", "RUSTFLAGS": flags, "CARGO_TARGET_DIR": str(target / tool), "CARGO_INCREMENTAL": "0"}


def missing(tool: str) -> str | None:
    """What a tool needs and this machine lacks."""
    if tool == "miri" and subprocess.run(["cargo", "+nightly", "miri", "--version"], capture_output=True).returncode != 0:
        return "nightly Rust with Miri"
    root = Path(subprocess.run(["rustc", "--print=sysroot"], capture_output=True, text=True, check=True).stdout.strip())
    return "source of the standard library (rust-src)" if tool == "thread" and not (root / SOURCE).is_dir() else None


def checked(tool: str, crate: str, kinds: list[str], target: Path) -> dict[str, Any]:
    """What a tool says about the tests of a crate, whose log stays in the target folder."""
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    entry: dict[str, Any] = {"tool": tool, "crate": crate, "tests": " ".join(kinds), "date": date}
    if lacks := missing(tool):
        return {**entry, "outcome": f"left out: there is no {lacks}"}
    words, variables = command(tool, crate, kinds, target)
    log = target / f"{tool}_{crate}.log"
    with log.open("w") as file:
        code = subprocess.run(words, cwd=ROOT, env={**os.environ, **OPTIONS, **variables}, stdout=file, stderr=subprocess.STDOUT).returncode
    said = log.read_text(errors="replace")
    counts = [(int(passed), int(failed)) for passed, failed in RESULT.findall(said)]
    passed, failed = (sum(of) for of in zip(*counts)) if counts else (0, 0)
    reports = sorted({report.strip("=\n") for report in REPORT.findall(said)})
    outcome = "no fault" if code == 0 and not reports else "faults" if counts else "could not be built or run"
    return {**entry, "outcome": outcome, "passed": passed, "failed": failed, "reports": reports}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests of crates with unsafe code under sanitizers and Miri.")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--crates", nargs="+", choices=sorted({*CRATES, *OF_MIRI}), help="(default: memory, collectives and kernels; numeric and memory for Miri)")
    parser.add_argument("--unit", action="store_true", help="only the tests within the crates")
    parser.add_argument("--json", type=Path, default=ROOT / "results/sanitizers.json", metavar="FILE")
    arguments = parser.parse_args()
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).absolute() / "sanitizers"
    target.mkdir(parents=True, exist_ok=True)
    entries = json.loads(arguments.json.read_text()) if arguments.json.is_file() else []
    is_good = True
    for tool in arguments.tools:
        for crate in arguments.crates or (OF_MIRI if tool == "miri" else CRATES):
            entry = checked(tool, crate, ["--lib"] if arguments.unit else ["--lib", "--tests"], target)
            counted = f", {entry['passed']} passed, {entry['failed']} failed" if "passed" in entry else ""
            print(f"{tool} {crate}: {entry['outcome']}{counted}", *entry.get("reports", []), sep="\n  ", flush=True)
            is_good &= entry["outcome"].startswith(("no fault", "left out"))
            entries = [of for of in entries if (of["tool"], of["crate"]) != (tool, crate)] + [entry]
            arguments.json.write_text(json.dumps(entries, indent=1) + "\n")
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
