"""Whether the packages that we build with may be used: their licenses, where they come from, and advisories about them.

    python3 scripts/packages.py
    python3 scripts/packages.py --advisories FOLDER

Input: `cargo metadata` of the workspace and of `fuzz`, for Linux, and RustSec's advisories in FOLDER, or else fetched by git into the target
folder. If they cannot be fetched, the script says so, and checks the rest. The exit code is 1 if a license is not in the list below,
a package comes from elsewhere than crates.io, or an advisory names a vulnerability of a version in a Cargo.lock. Advisories
about packages that nobody maintains are only shown. Only the standard library is needed.
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MANIFESTS = (ROOT / "Cargo.toml", ROOT / "fuzz/Cargo.toml")
ADVISORIES = "https://github.com/rustsec/advisory-db"
CRATES_IO = "registry+https://github.com/rust-lang/crates.io-index"
# Each lets a program under MIT or Apache-2.0 contain the package.
LICENSES = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CDLA-Permissive-2.0", "IJG",
    "ISC", "MIT", "NCSA", "Unicode-3.0", "Unlicense", "Zlib",
}  # fmt: skip
WORD = re.compile(r"\(|\)|AND\b|OR\b|[\w.+-]+(?: WITH [\w.+-]+)?")


def is_allowed(license: str | None) -> bool:
    """Whether an expression of licenses leaves a choice of allowed ones."""
    words = WORD.findall((license or "none").replace("/", " OR "))
    # Nothing but brackets, `and`, `or`, `True` and `False` is evaluated.
    terms = [word.lower() if word in ("AND", "OR") else word if word in "()" else str(word in LICENSES) for word in words]
    return bool(eval(" ".join(terms)))


def packages(manifest: Path) -> list[dict[str, Any]]:
    command = ["cargo", "metadata", "--locked", "--format-version=1", "--all-features", "--filter-platform=x86_64-unknown-linux-gnu"]
    asked = subprocess.run([*command, "--manifest-path", manifest], capture_output=True, text=True)
    if asked.returncode != 0:
        sys.exit(f"cargo metadata of {manifest.relative_to(ROOT)}: {asked.stderr.strip()}")
    return json.loads(asked.stdout)["packages"]


def version(text: str) -> tuple[int, int, int, bool]:
    """A version as something to compare: one before a release is less than the release."""
    numbers, _, before = text.partition("+")[0].partition("-")
    major, minor, patch = [*map(int, numbers.split(".")), 0, 0][:3]
    return (major, minor, patch, not before)


def meets(found: str, requirement: str) -> bool:
    """Whether a version meets a requirement such as `>= 1.2, < 1.4`."""
    has = version(found)
    for part in requirement.split(","):
        operator, bound = re.fullmatch(r"\s*([<>=^~]*)\s*(.*?)\s*", part).groups()
        if bound == "*":
            continue
        least, parts = version(bound), bound.partition("-")[0].split(".")
        # The next version that a caret, which is the default, or a tilde leaves out.
        keeps = next((at for at, number in enumerate(least[:3]) if number), len(parts) - 1) if operator in ("", "^") else min(len(parts) - 1, 1)
        most = (*least[:keeps], least[keeps] + 1, *[0] * (2 - keeps), False)
        holds = {">=": has >= least, ">": has > least, "<=": has <= least, "<": has < least, "=": has == least}
        if not holds.get(operator, least <= has < most):
            return False
    return True


def fetched() -> Path | None:
    """RustSec's advisories, as git fetches them. `None` if there is no way to them."""
    folder = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "advisories"
    command = ["git", "-C", folder, "pull", "--quiet"]
    if not (folder / ".git").exists() or not (folder / "crates").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        command = ["git", "clone", "--quiet", "--depth=1", ADVISORIES, folder]
    try:
        subprocess.run(command, check=True, timeout=60, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return folder


def advisories(folder: Path, locked: dict[str, set[str]]) -> list[dict[str, str]]:
    """The advisories about versions that are locked."""
    found = []
    for path in sorted(folder.glob("crates/*/*.md")):
        if path.parent.name not in locked:
            continue
        stated = tomllib.loads(path.read_text().partition("```toml")[2].partition("```")[0])
        advisory, versions = stated["advisory"], stated["versions"]
        fine = versions["patched"] + versions.get("unaffected", [])
        for has in locked[path.parent.name]:
            if "withdrawn" not in advisory and not any(meets(has, requirement) for requirement in fine):
                kind = advisory.get("informational", "vulnerability")
                found.append({"id": advisory["id"], "package": path.parent.name, "version": has, "kind": kind})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Check licenses, sources and advisories of all packages.")
    parser.add_argument("--advisories", type=Path, metavar="FOLDER", help="a clone of RustSec's advisory-db (default: fetched)")
    arguments = parser.parse_args()
    # Those of path dependencies are ours.
    foreign = {(of["name"], of["version"]): of for manifest in MANIFESTS for of in packages(manifest) if of["source"]}
    faults = [f"{name} {has}: the license {of['license']}" for (name, has), of in foreign.items() if not is_allowed(of["license"])]
    faults += [f"{name} {has}: comes from {of['source']}" for (name, has), of in foreign.items() if of["source"] != CRATES_IO]
    locked: dict[str, set[str]] = {}
    for manifest in MANIFESTS:
        for of in tomllib.loads(manifest.with_name("Cargo.lock").read_text())["package"]:
            locked.setdefault(of["name"], set()).add(of["version"])
    folder = arguments.advisories or fetched()
    for of in advisories(folder, locked) if folder else []:
        line = f"{of['package']} {of['version']}: {of['kind']}, https://rustsec.org/advisories/{of['id']}"
        print(line)
        faults += [line] if of["kind"] == "vulnerability" else []
    print(f"{len(foreign)} packages for Linux, {len(locked)} in all; {len(faults)} faults", *faults, sep="\n  ")
    if not folder:
        print(f"advisories are left out: {ADVISORIES} could not be fetched")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
