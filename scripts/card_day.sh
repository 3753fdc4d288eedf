#!/usr/bin/env bash
# Tries everything that needs a card of NVIDIA's, on a machine that has one and may have nothing else.
#
#   scripts/card_day.sh pack FOLDER         builds programs and tests here, and puts them into FOLDER, and FOLDER.tgz: at most 64 MiB
#   FOLDER/card_day.sh run [RESULTS]        runs the stages for 240 s; the next call goes on where this one ended
#
# The card's machine needs a driver, the run-time compiler and cuBLASLt, and Python; PyTorch 2.11 for the rivals. Without a card the stages
# run on the emulated card, with smaller sizes; that needs the run-time compiler (PACELINE_CUDA_LIBRARIES, see docs/devices.md).
# bench/card_day.py has the stages. RESULTS (default: FOLDER/results) gets a log and a JSON of each, and card_day.json.
set -euo pipefail

pack() {
  # PROFILE=dev packs what `cargo test` has built.
  local profile=${PROFILE:-release} size packages=()
  # For a trap, which knows no variables of a function that has ended.
  messages=$(mktemp -d)
  trap 'rm -rf "$messages"' EXIT
  mkdir -p "$1/bench/peer"
  local cargo_=(--profile "$profile" --locked --quiet --message-format=json-render-diagnostics)
  for crate in memory kernels collectives model strategies; do packages+=(-p "paceline-$crate"); done
  (
    cd "$root"
    cargo build "${cargo_[@]}" -p paceline -p paceline-emulated-card -p paceline-strategies --bin paceline --lib --example card_steps >"$messages/all"
    cargo test --no-run "${cargo_[@]}" "${packages[@]}" --test 'card*' >"$messages/tests"
  )
  {
    sed -n 's/.*"\([^"]*\/\(paceline\|card_steps\|libpaceline_emulated_card\.so\)\)".*/\1 \2/p' "$messages/all" | sort -u
    sed -n 's/.*crates\/\([a-z]*\)#.*"executable":"\(.*\/\(card[a-z_]*\)-[^"]*\)".*/\2 test-\1-\3/p' "$messages/tests"
  } | while read -r file name; do strip -o "$1/$name" "$file"; done
  cp "$root"/bench/{common,card,card_day,card_stages,late}.py "$1/bench/"
  cp "$root"/bench/peer/{gpu_step,models}.py "$1/bench/peer/"
  cp "$root/scripts/card_day.sh" "$1/"
  git -C "$root" describe --always --dirty --abbrev=12 '--exclude=*' >"$1/COMMIT"
  tar -C "$(dirname "$1")" --exclude=results -czf "$1.tgz" "$(basename "$1")"
  size=$(du -m "$1.tgz" | cut -f1)
  echo "packed into $1.tgz: $size MiB"
  [ "$size" -lt 64 ]
}

# The stages that are nothing but programs and their exit codes. Each writes its JSON to $out; $small is empty on a real card.
left_out() { echo "left out: $*"; exit 77; }
failed() { echo "failed: $*"; exit 1; }

probe() {
  local code=0
  "$root/paceline" check --device cuda --nproc 1
  "$root/paceline" train --nproc 1 --device cuda:99 || code=$?
  [ "$code" = 2 ] || failed "a card that is not there ends with $code"
  echo '{"finds_card": true, "refuses_others": true}' >"$out"
  echo "the card is found, and a card 99 is refused"
}

tests() {
  local limit=85 lines=$out.lines
  # An emulated card interprets each instruction.
  [ -z "$small" ] || limit=$((5 * limit))
  # No test measures time, so several programs run at once where there are many cores.
  printf '%s\n' "$root"/test-* | xargs -P $((($(nproc) + 3) / 4)) -I{} bash -c '
    name=$(basename "$1") code=0 begin=$SECONDS
    timeout --kill-after=5 "$2" "$1" >"$3/$name.log" 2>&1 || code=$?
    passed=$(sed -n "s/.* \([0-9]*\) passed;.*/\1/p" "$3/$name.log")
    echo "{\"program\": \"$name\", \"code\": $code, \"passed\": ${passed:-0}, \"seconds\": $((SECONDS - begin))}"
  ' tests {} "$limit" "$(dirname "$out")" | tee "$lines"
  echo "[$(paste -sd, "$lines")]" >"$out"
  ! grep -v '"code": 0,' "$lines" || failed "the programs above"
  echo "$(wc -l <"$lines") programs, $(grep -o '"passed": [0-9]*' "$lines" | awk '{ n += $2 } END { print n }') tests passed"
  rm "$lines"
}

# One of two ranks on the card is killed: the launcher names it, and the card serves the next run as before.
kill_rank() {
  local cnn="--image 8 8 3 --channels 4 8 --hidden 16 --batch-size 4 --device cuda --quiet" code=0 before after launcher rank
  alone() { "$root/paceline" train $cnn --nproc 1 --steps 8 --json run.json >&2; grep -E '"(weights_sha256|card_used_bytes)"' run.json; }
  before=$(alone)
  "$root/paceline" train $cnn --nproc 2 --epochs 1000000 --save saved --save-every 5 2>errors &
  launcher=$!
  # The limit of the stage ends this, if need be.
  until [ -e saved/latest ]; do kill -0 "$launcher" || failed "two ranks do not train"; sleep 0.05; done
  rank=$(for pid in $(cat "/proc/$launcher/task/$launcher/children"); do ! grep -qz '^RANK=1$' "/proc/$pid/environ" || echo "$pid"; done)
  kill -9 "$rank"
  wait "$launcher" || code=$?
  cat errors
  [ "$code" = 137 ] && grep -q '^paceline: rank 1 ' errors || failed "the launcher ended with $code"
  after=$(alone)
  [ "$after" = "$before" ] || failed "after a rank was killed, a run has $after instead of $before"
  echo "{\"exit_code\": $code, ${before%,}}" >"$out"
  echo "rank 1 is named, and the next run has the same weights and takes as much memory"
}

sanitizer() {
  [ -z "$small" ] || left_out "an emulated card checks each access, barrier and wait itself, in the stage tests"
  local tool code rest clean=0 slow=0 limit=25
  tool=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer) || left_out "there is no compute-sanitizer on this machine"
  timeout "$limit" "$tool" "$root/paceline" check --device cuda --nproc 1 >first 2>&1 || true
  grep -q 'ERROR SUMMARY' first || left_out "compute-sanitizer cannot run here: $(grep -m1 '^=====' first || tail -1 first)"
  for program in "$root"/test-*; do
    code=124 rest=$((limit - SECONDS))
    [ "$rest" -le 0 ] || { timeout $((rest < 6 ? rest : 6)) "$tool" --error-exitcode 9 "$program" && code=0; } || code=$?
    [ "$code" != 9 ] || failed "$(basename "$program"): compute-sanitizer found errors"
    if [ "$code" = 0 ]; then clean=$((clean + 1)); else slow=$((slow + 1)); fi
  done
  echo "{\"clean\": $clean, \"not_ended\": $slow}" >"$out"
  echo "$clean programs ended without an error, $slow did not end in time, or failed for another reason"
}

# The ten kernels that take the most time, and their shares of the peak of arithmetic and of memory, weighted by time.
hottest() {
  [ -z "$small" ] || left_out "an emulated card has no counters of the hardware"
  local tool case metrics=gpu__time_duration.sum,sm__throughput.avg.pct_of_peak_sustained_elapsed
  metrics+=,gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed
  tool=$(PATH=$PATH:/usr/local/cuda/bin command -v ncu) || left_out "there is no ncu on this machine"
  for case in cnn/bf16 llama/bf16; do
    timeout 18 "$tool" --csv --page raw --print-units base --clock-control none --metrics "$metrics" --launch-skip 1500 --launch-count 400 \
      "$root/card_steps" "$case" >page 2>&1 || true
    # The row after the heading has units and no ID.
    awk -F '","' -v row='{"case": "%s", "kernel": "%s", "launches": %d, "ms": %.4f, "compute_pct": %.1f, "memory_pct": %.1f}' -v case_="$case" '
      !/^"/ { next }
      { gsub(/^"|"$/, "") }
      !known { for (i = 1; i <= NF; i++) of[$i] = i; known = 1; next }
      $1 != "" {
        name = $of["Kernel Name"]; ns = number("gpu__time_duration.sum"); time[name] += ns; count[name]++
        compute[name] += ns * number("sm__throughput.avg.pct_of_peak_sustained_elapsed")
        memory[name] += ns * number("gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed")
      }
      function number(what) { gsub(/,/, "", $of[what]); return $of[what] }
      END {
        for (name in time)
          printf "%.0f " row "\n", time[name], case_, name, count[name], time[name] / 1e6, compute[name] / time[name], memory[name] / time[name]
      }' page | sort -gr | head -10 | cut -d' ' -f2- >>kernels
    grep -q "\"$case\"" kernels || left_out "ncu cannot run here: $(tail -1 page)"
  done
  cat kernels
  echo "[$(paste -sd, kernels)]" >"$out"
}

# The folder of the programs, once packed.
root=$(realpath "$(dirname "$0")")
case "${1:-} $#" in
  "pack 2") root=$(dirname "$root"); pack "$2" ;;
  "run 1" | "run 2") exec python3 "$root/bench/card_day.py" --programs "$root" --results "${2:-$root/results}" ;;
  probe\ * | tests\ * | kill_rank\ * | sanitizer\ * | hottest\ *) out=$2 small=${3:-}; "$1" ;;
  *) sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
