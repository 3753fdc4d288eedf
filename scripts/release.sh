#!/usr/bin/env bash
# Builds the program for others:
#
#   target/dist/paceline-VERSION-TARGET.tar.gz    the stripped program, the completions of shells, the README and the licenses
#   target/dist/paceline-VERSION-*.whl            the same program for pip, the hook of `record`, and the backend of torch.distributed
#   target/dist/paceline-VERSION.tar.gz           the source distribution of the wheel
#
#   scripts/release.sh
#
# The wheel needs Python 3.10 or later with pip, which installs maturin into the target folder.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(realpath -m "${CARGO_TARGET_DIR:-target}")
target=$build/dist
cargo build --profile dist --locked -p paceline
triple=$(rustc -vV | sed -n 's/^host: //p')
version=$("$target/paceline" --version | awk '{ print $2 }')
name=paceline-$version-$triple
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/$name" "$work/$name/completions"
cp "$target/paceline" "$work/$name/paceline"
for shell in bash zsh fish; do
  "$target/paceline" completions "$shell" >"$work/$name/completions/$shell"
done
cp README.md CHANGELOG.md LICENSE-APACHE LICENSE-MIT "$work/$name"
size=$(stat -c %s "$work/$name/paceline")
tar -C "$work" -czf "$target/$name.tar.gz" "$name"
echo "$target/$name.tar.gz: the program has $size bytes"

[ -x "$build/maturin/bin/maturin" ] || python3 -m venv "$build/maturin"
"$build/maturin/bin/pip" install --quiet --disable-pip-version-check maturin==1.16.0
export CARGO_TARGET_DIR=$build
PYTHONPATH=python "$build/maturin/bin/python" -c 'import build_wheel; build_wheel.add_program()'
"$build/maturin/bin/maturin" build --quiet --out "$target"
"$build/maturin/bin/maturin" sdist --out "$target"
ls -l "$target"/paceline-"$version"-*.whl "$target"/paceline-"$version".tar.gz
