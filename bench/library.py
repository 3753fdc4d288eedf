"""How light the library is to compile, and how fast layers made of functions are beside loops by hand.

    python3 bench/library.py functions
    python3 bench/library.py builds --features none,cli

`functions` runs a test of the crate `paceline-kernels` as `cargo test` builds it, and takes a minute. `builds` compiles a program outside
of the workspace in an empty folder for each choice of features, in debug with the profiles of `paceline new`, from the packages that
are on this machine: minutes each. Seconds of processor time are those of all compilers. Results: one file each.
"""
import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import common
from common import ROOT, Record


def functions() -> Record:
    test = "function::by_hand_tests::times_of_functions_and_of_loops_by_hand"
    command = ["cargo", "test", "-p", "paceline-kernels", "--lib", "--", "--ignored", "--nocapture", "--exact", test]
    lines = common.run(command, ROOT, 1800).splitlines()
    cases = [json.loads(line[line.index("{") :]) for line in lines if '{"function"' in line]
    for case in cases:
        around = [(before + after) / 2 for before, _, after in case["ns"]]
        ratios = [of / by_hand for (_, of, _), by_hand in zip(case["ns"], around)]
        noise = [after / before for before, _, after in case["ns"]]
        case |= {"over_by_hand": statistics.median(ratios), "by_hand_over_by_hand": statistics.median(noise)}
        where = f"{case['function']} {case['pass']}, {case['threads']} threads, {case['kib']} KiB"
        print(f"{where:40} {common.ranged(ratios)} of the time by hand; by hand again {common.ranged(noise)}")
    return {"cases": cases}


def built(features: str, program: Path) -> Record:
    """A project of `paceline new` with these features: its template with the command line, a loop of its own without."""
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as folder:
        project = Path(folder) / "light"
        common.run([program, "new", project, "--path", ROOT], ROOT, 60)
        chosen = [] if features == "none" else features.split("+")
        manifest = (project / "Cargo.toml").read_text()
        before, found, after = manifest.partition("/crates/paceline'" if "/crates/paceline'" in manifest else '/crates/paceline"')
        (project / "Cargo.toml").write_text(f"{before}{found}, default-features = false, features = {json.dumps(chosen)}{after}")
        shutil.copy(ROOT / "Cargo.lock", project)
        if "cli" not in chosen:
            shutil.copy(ROOT / "crates/paceline/examples/own_loop.rs", project / "src/main.rs")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("CARGO_PROFILE")}
        environment["CARGO_TARGET_DIR"] = str(project / "target")
        tree = ["cargo", "tree", "--offline", "--edges", "normal,build", "--prefix", "none", "--format", "{p}"]
        listed = subprocess.run(tree, cwd=project, env=environment, check=True, capture_output=True, text=True).stdout
        # Without the program itself.
        packages = {line.split(" (")[0] for line in listed.splitlines() if line} - {"light v0.1.0"}
        begin, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(["cargo", "build", "--quiet", "--offline"], cwd=project, env=environment, check=True)
        wall_s, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        files = [path.stat() for path in (project / "target").rglob("*") if path.is_file() and not path.is_symlink()]
        size = sum({of.st_ino: of.st_blocks * 512 for of in files}.values())
        cpu_s = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
        binary = (project / "target/debug/light").stat().st_size
        print(f"{features}: {len(packages)} packages, {cpu_s:.0f} s of processor time, {size / 1e6:.0f} MB, program {binary / 1e6:.0f} MB")
        return {"features": chosen, "packages": len(packages), "cpu_s": cpu_s, "wall_s": wall_s, "target_bytes": size, "program_bytes": binary}


def main() -> None:
    parser = common.arguments_for(__doc__, "NAME.json", rounds=0)
    parser.add_argument("part", choices=("functions", "builds"))
    parser.add_argument("--features", default="none,cli", metavar="LIST", help="for builds: choices, with + between features (default: none,cli)")
    parser.set_defaults(paceline=ROOT / "target/debug/paceline")
    arguments: argparse.Namespace = parser.parse_args()
    if arguments.out.name == "NAME.json":
        arguments.out = ROOT / "results" / f"{'functions' if arguments.part == 'functions' else 'light_builds'}.json"
    if arguments.part == "functions":
        record = functions()
    else:
        record = {"builds": [built(features, arguments.paceline) for features in arguments.features.split(",")]}
    common.write(arguments.out, common.provenance() | record)


if __name__ == "__main__":
    main()
