#!/usr/bin/env bash
# Tries everything that needs a card of NVIDIA's, on a machine that has one and may have nothing else.
#
#   scripts/gpu_check.sh pack FOLDER          builds programs and tests here, and puts them into FOLDER
#   FOLDER/gpu_check.sh run FOLDER [RESULTS]  runs them where the card is: a driver, the run-time compiler and cuBLASLt are needed
#
# Each stage is a process with a time limit; a stage that fails does not stop the next one. What a stage prints goes to
# RESULTS/STAGE.log as it goes (default: FOLDER/results). Ends with one table, and RESULTS/gpu_check.json. Exits with 0 if all
# stages passed, with 1 if not, with 2 on a wrong argument. Takes 5 minutes on an H200.
set -euo pipefail

usage() { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }

pack() {
  cd "$(dirname "$0")/.."
  mkdir -p "$1"
  cargo build --release --locked
  cargo build --release --locked -p paceline-strategies --example card_steps
  cp target/release/paceline target/release/examples/card_steps "$1/"
  for test in "paceline-memory card" "paceline-kernels card" "paceline-kernels card_products" "paceline-kernels card_attention" \
    "paceline-collectives card" "paceline-strategies card" "paceline-strategies card_graphs"; do
    read -r package name <<<"$test"
    # The last line of the messages for a test names its program.
    program=$(cargo test --release --locked --no-run --message-format=json -p "$package" --test "$name" 2>/dev/null |
      sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -1)
    [ -n "$program" ] || { echo "error: $package has no test $name" >&2; exit 1; }
    cp "$program" "$1/$package-$name"
  done
  mkdir -p "$1/bench/peer"
  cp bench/common.py bench/card.py "$1/bench/"
  cp bench/peer/gpu_step.py bench/peer/llama.py "$1/bench/peer/"
  cp "$0" "$1/gpu_check.sh"
  echo "packed into $1: $(du -sh "$1" | cut -f1)"
}

# stage NAME SECONDS COMMAND...
stage() {
  local name=$1 limit=$2 begin=$SECONDS outcome=passed
  shift 2
  # A function of this script needs a shell of its own for the limit.
  timeout --kill-after=5 "$limit" bash -c '"$@"' stage "$@" >"$results/$name.log" 2>&1 || {
    outcome="failed ($?)"
    failed=1
  }
  printf '%-22s %-14s %4d s  %s\n' "$name" "$outcome" $((SECONDS - begin)) "$(tail -n 1 "$results/$name.log" | cut -c1-80)" |
    tee -a "$results/table.txt"
  rows+=("{\"stage\":\"$name\",\"outcome\":\"$outcome\",\"seconds\":$((SECONDS - begin))}")
}

# Two ranks on one card end with the same weights, whatever the strategy.
same_weights() {
  local weights
  weights=$(for strategy in ddp simple_ddp zero3 sharded3; do
    "$1" train --nproc 2 --device cuda --steps-per-epoch 10 --epochs 1 --strategy "$strategy" | grep '^Weights:'
  done)
  echo "$weights"
  [ "$(wc -l <<<"$weights")" = 4 ] && [ "$(sort -u <<<"$weights" | wc -l)" = 1 ]
}

refused() {
  local code=0
  "$@" || code=$?
  [ $code = 2 ]
}

run() {
  cd "$1"
  results=${2:-$PWD/results}
  mkdir -p "$results"
  : >"$results/table.txt"
  export PACELINE_CARD=1 RUST_BACKTRACE=1
  export -f same_weights refused
  failed=0 rows=()
  local card
  card=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1 || echo unknown)
  echo "card and driver: $card"
  local bin=$PWD
  stage probe 60 "$bin/paceline" check --device cuda
  for test in memory-card kernels-card kernels-card_products kernels-card_attention collectives-card strategies-card \
    strategies-card_graphs; do
    stage "$test" 120 "$bin/paceline-$test"
  done
  work=$(mktemp -d)
  cd "$work"
  stage two_ranks 60 same_weights "$bin/paceline"
  # Errors before a rank starts: exit code 2.
  stage no_such_card 10 refused "$bin/paceline" train --nproc 1 --device cuda:99
  if python3 -c 'import torch' 2>/dev/null; then
    stage beside_pytorch 240 python3 "$bin/bench/card.py" --paceline "$bin/paceline" --steps "$bin/card_steps" --rounds 1 --out "$results/card.json"
  fi
  cd / && rm -rf "$work"
  printf '{"date":"%s","card":"%s","stages":[%s]}\n' "$(date -u +%FT%TZ)" "$card" "$(IFS=,; echo "${rows[*]}")" >"$results/gpu_check.json"
  echo
  cat "$results/table.txt"
  return $failed
}

case ${1:-} in
  pack) [ $# = 2 ] || usage; pack "$2" ;;
  run) [ $# -ge 2 ] || usage; run "$2" "${3:-}" ;;
  *) usage ;;
esac
