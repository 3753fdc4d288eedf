"""Builds the wheel as maturin does, with the program and the hook of `paceline record` beside the library."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import maturin
from maturin import *  # noqa: F403

ROOT = Path(__file__).resolve().parent.parent
# pip puts the files of these folders beside its Python, and where Python finds modules. maturin wants the folders whatever it does.
PROGRAMS, MODULES = (ROOT / "python/paceline.data" / folder for folder in ("scripts", "purelib"))
for folder in (PROGRAMS, MODULES):
    folder.mkdir(parents=True, exist_ok=True)


def add_program():
    subprocess.run(["cargo", "build", "--profile", "dist", "--locked", "-p", "paceline"], cwd=ROOT, check=True)
    shutil.copy(ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "dist/paceline", PROGRAMS)
    shutil.copy(ROOT / "crates/paceline/src/commands/record/paceline_record.py", MODULES)


def get_requires_for_build_wheel(config_settings=None):
    if shutil.which("cargo") is None:
        sys.exit("paceline: to build it, install Rust 1.95 or later (https://rustup.rs)")
    return []


def build_wheel(*arguments, **named):
    add_program()
    return maturin.build_wheel(*arguments, **named)
