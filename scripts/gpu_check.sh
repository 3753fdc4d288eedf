#!/usr/bin/env bash
# Tries everything that needs a card of NVIDIA's, on a machine that has one and may have nothing else.
#
#   scripts/gpu_check.sh pack FOLDER          builds programs and tests here, and puts them into FOLDER
#   FOLDER/gpu_check.sh run FOLDER [RESULTS]  runs them where the card is: a driver, the run-time compiler and cuBLASLt are needed
#
# Each stage is a process with a time limit; a stage that fails does not stop the next one. What a stage prints goes to
# RESULTS/STAGE.log as it goes (default: FOLDER/results). Ends with one table, and RESULTS/gpu_check.json. Exits with 0 if all
# stages passed, with 1 if not, with 2 on a wrong argument. Takes under 8 minutes.
set -euo pipefail

usage() { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }

pack() {
  cd "$(dirname "$0")/.."
  mkdir -p "$1"
  cargo build --release --locked
  cp target/release/paceline "$1/"
  for test in "paceline-memory card" "paceline-kernels card" "paceline-kernels card_products" "paceline-collectives card" \
    "paceline-strategies card" "paceline-strategies card_graphs"; do
    read -r package name <<<"$test"
    # The last line of the messages for a test names its program.
    program=$(cargo test --release --locked --no-run --message-format=json -p "$package" --test "$name" 2>/dev/null |
      sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -1)
    [ -n "$program" ] || { echo "error: $package has no test $name" >&2; exit 1; }
    cp "$program" "$1/$package-$name"
  done
  cp bench/peer/gpu_step.py "$1/"
  cp "$0" "$1/gpu_check.sh"
  echo "packed into $1: $(du -sh "$1" | cut -f1)"
}

# stage NAME SECONDS COMMAND...
stage() {
  local name=$1 limit=$2 begin=$SECONDS outcome=passed
  shift 2
  timeout --kill-after=5 "$limit" "$@" >"$results/$name.log" 2>&1 || {
    outcome="failed ($?)"
    failed=1
  }
  printf '%-22s %-14s %4d s  %s\n' "$name" "$outcome" $((SECONDS - begin)) "$(tail -n 1 "$results/$name.log" | cut -c1-80)" |
    tee -a "$results/table.txt"
  rows+=("{\"stage\":\"$name\",\"outcome\":\"$outcome\",\"seconds\":$((SECONDS - begin))}")
}

run() {
  cd "$1"
  results=${2:-$PWD/results}
  mkdir -p "$results"
  : >"$results/table.txt"
  export PACELINE_CARD=1 RUST_BACKTRACE=1
  failed=0 rows=()
  local card
  card=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1 || echo unknown)
  echo "card and driver: $card"
  local bin=$PWD cnn mlp
  cnn="--channels 64 128 256 --hidden 512 --image 32 32 3 --batch-size 512 --steps-per-epoch 30 --epochs 1"
  mlp="--model mlp --input-dim 4096 --hidden-dim 4096 --output-dim 4096 --batch-size 4096 --steps-per-epoch 30 --epochs 1"
  stage probe 60 "$bin/paceline" check --device cuda
  stage memory 60 "$bin/paceline-memory-card" --test-threads 1
  stage kernels 90 "$bin/paceline-kernels-card" --test-threads 1
  stage products 90 "$bin/paceline-kernels-card_products" --test-threads 1
  stage training 120 "$bin/paceline-strategies-card" --test-threads 1
  work=$(mktemp -d)
  cd "$work"
  stage two_ranks 60 "$bin/paceline" train --nproc 2 --device cuda --steps-per-epoch 20 --epochs 1
  for type in f32 bf16; do
    # shellcheck disable=SC2086
    stage "cnn_$type" 60 "$bin/paceline" train --nproc 1 --device cuda --precision "$type" $cnn --json "$results/cnn_$type.json"
    # shellcheck disable=SC2086
    stage "mlp_$type" 60 "$bin/paceline" train --nproc 1 --device cuda --precision "$type" $mlp --json "$results/mlp_$type.json"
    if python3 -c 'import torch' 2>/dev/null; then
      stage "torch_$type" 90 python3 "$bin/gpu_step.py" --precision "$type" --json "$results/torch_$type.json"
    fi
  done
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
