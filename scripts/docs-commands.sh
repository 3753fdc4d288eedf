#!/usr/bin/env bash
# Runs the commands of README.md, docs/lessons and docs/commands.md as a reader would: those in blocks marked ```sh, in the
# order in which they stand, each page in one empty folder, with the given program first on PATH.
#
#   scripts/docs-commands.sh target/release/paceline [PAGE...]
#
# A line of a block is a command; a backslash at its end continues it. A command fails if its exit code is
# not 0 or if it takes longer than LIMIT seconds (120 by default). Then its output is shown, and the other
# commands of its page are left out. A comment of the page just before a block changes this:
#
#   <!-- not run: it needs a network -->    the block is left out
#   <!-- exit code: 7 -->                   its commands have to end with this code
#   <!-- output of: paceline ... -->        the block is what this command prints
#
# The blocks marked ```text are compared with what the commands before them print, and blocks of code with their files (docs_shape.py).
#
# --one-folder runs all pages in the same folder, as a reader does who goes through all of them. PAGES is a copy of
# the folder docs, the text that lesson 8 learns from.
set -euo pipefail

one_folder=
[ "${1-}" != --one-folder ] || { one_folder=all; shift; }
[ $# -ge 1 ] || { echo "usage: $0 [--one-folder] PROGRAM [PAGE...]" >&2; exit 2; }
program=$(realpath -e "$1")
shift
root=$(realpath "$(dirname "$0")/..")
limit=${LIMIT:-120}
[ $# -gt 0 ] || set -- "$root"/README.md "$root"/docs/lessons/*.md "$root"/docs/commands.md

# Prints the commands of a page: line, expected exit code ("left out" for none), command; tabs in between.
commands() {
  awk '
    /^<!-- not run: .* -->$/ { mark = "left out"; next }
    /^<!-- exit code: [0-9]+ -->$/ { mark = $4; next }
    /^<!-- output of: .* -->$/ { printf "%d\t0\t%s\n", NR, substr($0, 17, length($0) - 20); next }
    !inside && /^```/ {
      inside = 1
      if ($0 == "```") { printf "%d\tbroken\ta block without a language (sh, text, rust)\n", NR }
      shell = ($0 == "```sh"); expected = (mark == "" ? 0 : mark); mark = ""
      next
    }
    inside && /^```/ { inside = 0; next }
    inside && shell && NF {
      if (command == "") { first = NR }
      if (sub(/\\$/, "")) { command = command $0; next }
      printf "%d\t%s\t%s\n", first, expected, command $0; command = ""
      next
    }
    !inside && NF { mark = "" }
    END { if (inside || command != "") { printf "%d\tbroken\ta block without an end\n", NR } }
  ' "$1"
}

# Counts and shows a failure, which is shown again at the end.
fail() { failed=$((failed + 1)); echo "$*" | tee -a "$work/failures"; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/bin"
ln -s "$program" "$work/bin/paceline"
cp -r "$root/docs" "$work/pages"
# So wide that no table is divided.
export PATH="$work/bin:$PATH" PAGES="$work/pages" COLUMNS=250

failed=0 ran=0 left_out=0
for page; do
  name=$(realpath --relative-to="$root" "$page")
  folder=$work/${one_folder:-$(basename "$page" .md)}
  mkdir -p "$folder"
  found=0
  : >"$work/outputs"
  while IFS=$'\t' read -r -u 3 line expected command; do
    found=$((found + 1))
    if [ "$expected" = "left out" ]; then
      left_out=$((left_out + 1))
      continue
    fi
    if [ "$expected" = broken ]; then
      fail "$name:$line: $command"
      break
    fi
    begin=$(date +%s%N)
    code=0
    (cd "$folder" && exec timeout --kill-after=5 "$limit" bash -c "$command") \
      >"$work/output" 2>&1 </dev/null || code=$?
    ran=$((ran + 1))
    { echo "@@ $line"; cat "$work/output"; } >>"$work/outputs"
    printf '%s:%s: %5.1f s  %s\n' "$name" "$line" "$((($(date +%s%N) - begin) / 100000000))e-1" "$command"
    if [ "$code" != "$expected" ]; then
      if [ "$code" = 124 ]; then why="it took longer than $limit s"; else why="exit code $code instead of $expected"; fi
      sed 's/^/    /' "$work/output"
      fail "$name:$line: $why; its output is above"
      break
    fi
  done 3< <(commands "$page")
  if ! lines=$(python3 "$root/scripts/docs_shape.py" "$page" "$work/outputs"); then
    fail "$name: lines that its commands do not print, or its files do not have:"$'\n'"$lines"
  fi
  if [ "$found" = 0 ] && [ "$name" != docs/lessons/README.md ]; then
    fail "$name: no commands: is a block marked \`\`\`sh?"
  fi
done
echo "$ran commands run, $left_out left out, $failed failures, $SECONDS s"
[ "$failed" = 0 ] || cat "$work/failures"
[ "$failed" = 0 ] && [ "$ran" -gt 0 ]
