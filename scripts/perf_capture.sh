#!/usr/bin/env bash
# Records a run with perf, and says which functions the processor was in during each part of a step.
#
#     scripts/perf_capture.sh [--steps FIRST-LAST] [--out FOLDER] -- paceline train --nproc 1
#
# paceline marks its steps and their parts (--mark-ranges: forward, backward, grad_sync, optimizer_step, ...) in the trace of the
# kernel; perf samples the functions by the same clock. Only samples within the marks of the chosen steps count (by default all but
# the first five). Needs perf, and tracefs that this user can write to (root, usually).
#
# Writes FOLDER/perf.data (perf report -i FOLDER/perf.data), samples.txt, marks.txt and parts.txt.
set -euo pipefail

steps="6-1000000000"
out="perf-capture"
usage() { sed -n '2,4p' "$0" >&2; exit 2; }
while [ $# -gt 0 ]; do
    case "$1" in
        --steps) [ $# -gt 1 ] || usage; steps="$2"; shift 2 ;;
        --out) [ $# -gt 1 ] || usage; out="$2"; shift 2 ;;
        --) shift; break ;;
        *) usage ;;
    esac
done
[ $# -gt 0 ] || usage
[[ "$steps" =~ ^[0-9]+-[0-9]+$ ]] || { echo "error: --steps $steps: pass FIRST-LAST, as 10-20" >&2; exit 2; }
command -v perf >/dev/null || { echo "error: perf is not installed; install linux-perf (Debian) or perf (Fedora)" >&2; exit 2; }
mkdir -p "$out"

tracefs=/sys/kernel/tracing
[ -w "$tracefs/trace" ] || { echo "error: cannot write to $tracefs: mount it (mount -t tracefs nodev $tracefs), and be root" >&2; exit 2; }
# Marks and samples need one clock. What was set before comes back.
clock=$(sed 's/.*\[\(.*\)\].*/\1/' "$tracefs/trace_clock")
size=$(cat "$tracefs/buffer_size_kb")
restore() { echo "$clock" > "$tracefs/trace_clock"; echo "${size%% *}" > "$tracefs/buffer_size_kb"; }
trap restore EXIT
echo mono > "$tracefs/trace_clock"
echo 16384 > "$tracefs/buffer_size_kb"
echo > "$tracefs/trace"

# The clock of the processor works in virtual machines too, where cycles often cannot be counted.
perf record -q -k mono -F 999 -e cpu-clock -o "$out/perf.data" -- "$@" --mark-ranges
grep tracing_mark_write "$tracefs/trace" > "$out/marks.txt" || { echo "error: the run has marked nothing" >&2; exit 1; }
perf script -i "$out/perf.data" -F tid,time,ip,sym > "$out/samples.txt" 2>/dev/null

# TIME THREAD mark NAME, and TIME THREAD sample FUNCTION, in the order of time.
{
    sed -n 's/^.*-\([0-9]*\) *\[[0-9]*\] *[^ ]* *\([0-9.]*\): tracing_mark_write: \(.*\)$/\2 \1 mark \3/p' "$out/marks.txt"
    sed -n 's/^ *\([0-9]*\) *\([0-9.]*\): *[0-9a-f]* *\(.*\)$/\2 \1 sample \3/p' "$out/samples.txt"
} | sort -n | awk -v first="${steps%-*}" -v last="${steps#*-}" '
    $3 == "mark" {
        thread = $2
        if ($4 ~ /^B\|/) {
            name = $0; sub(/^[^|]*\|[0-9]+\|/, "", name)
            stack[thread, ++depth[thread]] = name
            if (name ~ /^step [0-9]+$/) {
                split(name, of, " ")
                counts[thread] = (of[2] >= first && of[2] <= last)
                marked += counts[thread]
            }
        } else if (depth[thread] > 0) {
            if (stack[thread, depth[thread]] ~ /^step /) counts[thread] = 0
            depth[thread]--
        }
        next
    }
    counts[$2] {
        part = depth[$2] > 1 ? stack[$2, depth[$2]] : "rest of the step"
        symbol = $0; sub(/^[^ ]* [^ ]* sample /, "", symbol)
        samples[part]++; functions[part SUBSEP symbol]++; total++
    }
    END {
        if (total == 0) { print "no sample lies in the chosen steps: pass --steps within the run, and more steps"; exit 1 }
        printf "%d samples in %d marked steps\n", total, marked
        for (part in samples) printf "%6.1f %%  %s\n", 100 * samples[part] / total, part | "sort -rn"
        close("sort -rn")
        print ""
        for (key in functions) if (functions[key] * 100 >= total) {
            split(key, of, SUBSEP)
            printf "%6.1f %%  %-16s %s\n", 100 * functions[key] / total, of[1], of[2] | "sort -rn"
        }
    }
' > "$out/parts.txt" || { cat "$out/parts.txt" >&2; exit 1; }
cat "$out/parts.txt"
echo
echo "Files in $out: perf.data, samples.txt, marks.txt, parts.txt"
