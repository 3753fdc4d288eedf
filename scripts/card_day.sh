#!/usr/bin/env bash
# Tries everything that needs a card of NVIDIA's, on a machine that has one and may have nothing else.
#
#   scripts/card_day.sh pack FOLDER         builds programs and tests here, and puts them into FOLDER, at most 64 MiB
#   FOLDER/card_day.sh run [RESULTS]        runs the stages for 240 s; the next call goes on where this one ended
#
# The card's machine needs a driver, the run-time compiler and cuBLASLt, and Python; PyTorch 2.11 for the rivals. Without a card the stages
# run on the emulated card, with smaller sizes; that needs the run-time compiler (PACELINE_CUDA_LIBRARIES, see docs/devices.md).
# bench/card_day.py has the stages. RESULTS (default: FOLDER/results) gets a log and a JSON of each, and card_day.json.
set -euo pipefail

case "${1:-} $#" in
  "pack 2")
    # PROFILE=dev packs what `cargo test` has built.
    profile=${PROFILE:-release}
    mkdir -p "$2/bench/peer"
    folder=$(realpath "$2")
    cd "$(dirname "$0")/.."
    copied() { # FILE NAME
      cp "$1" "$folder/$2"
      strip "$folder/$2"
    }
    messages=$(mktemp)
    trap 'rm -f "$messages"' EXIT
    cargo_=(--profile "$profile" --locked --quiet --message-format=json-render-diagnostics)
    cargo build "${cargo_[@]}" -p paceline -p paceline-emulated-card -p paceline-strategies --bin paceline --lib --example card_steps >"$messages"
    for file in $(grep -o '"[^"]*/\(paceline\|card_steps\|libpaceline_emulated_card\.so\)"' "$messages" | tr -d '"' | sort -u); do
      copied "$file" "$(basename "$file")"
    done
    packages=()
    for crate in memory kernels collectives model strategies; do packages+=(-p "paceline-$crate"); done
    cargo test --no-run "${cargo_[@]}" "${packages[@]}" --test 'card*' >"$messages"
    sed -n 's/.*crates\/\([a-z]*\)#.*"executable":"\(.*\/\(card[a-z_]*\)-[^"]*\)".*/\2 test-\1-\3/p' "$messages" >"$messages.tests"
    while read -r file name; do copied "$file" "$name"; done <"$messages.tests"
    rm "$messages.tests"
    cp bench/{common,card,card_day,card_stages,copies,faults,late}.py "$folder/bench/"
    cp bench/peer/{gpu_step,llama}.py "$folder/bench/peer/"
    git describe --always --dirty --abbrev=12 '--exclude=*' >"$folder/COMMIT"
    cp "$0" "$folder/card_day.sh"
    size=$(du -sm --exclude=results "$folder" | cut -f1)
    echo "packed into $2: $size MiB"
    [ "$size" -lt 64 ] || [ "$profile" = dev ]
    ;;
  "run 1" | "run 2")
    folder=$(realpath "$(dirname "$0")")
    exec python3 "$folder/bench/card_day.py" --programs "$folder" --results "${2:-$folder/results}"
    ;;
  *)
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
