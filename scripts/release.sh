#!/usr/bin/env bash
# Builds the program for others: target/dist/paceline-VERSION-TARGET.tar.gz, with the stripped program, the completions of
# shells, the README and the licenses.
#
#   scripts/release.sh
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}/dist")
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
