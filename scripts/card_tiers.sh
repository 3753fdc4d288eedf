#!/usr/bin/env bash
# The three tiers of the tests of cards, a line each: what the compiler says of the kernels, the tests on the emulated card,
# and the tests on a real one.
#
#   scripts/card_tiers.sh LOG     LOG is what `cargo test --workspace` has printed
#
# Without a card the third tier is skipped, with what is missing; with PACELINE_CARD=1 that is an error.
set -euo pipefail
cd "$(dirname "$0")/.."
log=$1
crates=(memory collectives kernels model strategies paceline)

# The tests whose programs are called card or card_..., by how they ended.
count() { awk -v how="$1" '/^ +Running / { of_cards = $2 ~ /\/card(_[a-z]+)?\.rs$/ } of_cards && /^test .* \.\.\. / && $NF == how { n++ } END { print n + 0 }' "$log"; }

compiled=$(grep -m1 -o 'COMPILE: .*' "$log" || true)
echo "${compiled:-COMPILE: skipped (no run-time compiler; see docs/devices.md)}"

passed=$(count ok)
if [ -n "$compiled" ]; then
  echo "EMULATE: $passed passed, $(count FAILED) failed, 0 skipped"
else
  echo "EMULATE: 0 passed, 0 failed, $passed skipped (no run-time compiler; see docs/devices.md)"
fi

# A program that is not there would be taken for one that misses nothing.
program=${CARGO_TARGET_DIR:-target}/debug/paceline
[ -x "$program" ] || { echo "there is no $program: cargo test --workspace builds it" >&2; exit 2; }
missing=$("$program" check --device cuda --nproc 1 2>&1 >/dev/null | sed -n 's/^.*--device cuda: //p' | head -1 || true)
if [ -n "$missing" ]; then
  echo "CARD: 0 passed, 0 failed, $passed skipped ($missing)"
  [ "${PACELINE_CARD:-}" != 1 ]
  exit
fi
on_card=$(mktemp)
trap 'rm -f "$on_card"' EXIT
code=0
for crate in "${crates[@]}"; do
  PACELINE_CARD=1 cargo test --locked --no-fail-fast -p "paceline-$crate" --test 'card*' >>"$on_card" 2>&1 || code=1
done
log=$on_card
[ "$code" = 0 ] || cat "$on_card"
echo "CARD: $(count ok) passed, $(count FAILED) failed, 0 skipped"
exit "$code"
