#!/usr/bin/env bash
# Applies the patches of scripts/extensions, one for each kind of addition, to a copy of the tracked files, builds it once, and
# runs what they add.
#
#   scripts/extensions.sh
#
# The copy is CARGO_TARGET_DIR/extensions. Takes about three minutes on two cores once the tests of the workspace are built: the packages
# from elsewhere are those of the workspace.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
copy=$target/extensions
trace=$PWD/crates/analysis/tests/fixtures/hta/rank_0.pt.trace.json.gz
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "$1: the extension does not work"; exit 1; }

# With the times of the files, so that a second build compiles the patched crates and those above them only.
rm -rf "$copy"
mkdir -p "$copy"
git ls-files -z | tar --create --null --files-from - | tar --extract --directory "$copy"
for patch in "$PWD"/scripts/extensions/*.patch; do
  # Not as a part of the repository that the copy lies in.
  GIT_CEILING_DIRECTORIES=$target git -C "$copy" apply "$patch"
  echo "$(basename "$patch" .patch), added lines: $(git apply --numstat "$patch" | awk '{ printf "%s%s %s", (NR > 1 ? ", " : ""), $3, $1 }')"
done
cd "$copy"
cargo fmt --check
# Another version, because cargo would take these crates for those of the workspace, which have the same places in it.
sed -i '/^\[workspace.package\]$/,/^$/s/^version = .*/version = "0.1.0+extended"/' Cargo.toml
CARGO_TARGET_DIR=$copy/built CARGO_BUILD_BUILD_DIR=$target cargo build --quiet --offline -p paceline
echo "built after $SECONDS s"
paceline=$copy/built/debug/paceline

cd "$work"
small="--nproc 2 --batch-size 2 --steps 3 --warmup-steps 0 --timeout 60"
images="train $small --channels 4 --hidden 8 --samples 64"
for strategy in ddp reverse_ddp; do
  "$paceline" $images --quiet --strategy "$strategy" --json summary.json
  grep '"weights_sha256"' summary.json >>digests
done
[ "$(uniq digests | wc -l)" = 1 ] || fail strategy
"$paceline" $images >plain
"$paceline" $images --no-advice >without
{ grep -q '^Advice: ' plain && ! grep -q '^Advice: ' without; } || fail flag
printf 'good\t1\nbad\t0\nfine\t1\nawful\t0\n' >train.tsv
"$paceline" train $small --model llama --layers 1 --width 32 --heads 4 --kv-heads 2 --intermediate 48 --max-length 16 \
  --num-labels 2 --data text --data-dir . --tokenizer bytes --quiet || fail format
zcat "$trace" | sed 's/sgemm_0(float const\*)/Memcpy DtoD (Device -> Device)/' >rank_0.json
"$paceline" analyze --trace-files rank_0.json | grep -q '^advice: Tensors are copied within the device' || fail cause
"$paceline" bench threads --counts 1,2 --rounds 1 --batch-size 4 --channels 4 --hidden 8 --samples 64 --steps-per-epoch 3 --warmup-steps 0 |
  grep -q '^2 threads ' || fail study
echo "each extension works, after $SECONDS s"
