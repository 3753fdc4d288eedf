#!/usr/bin/env bash
# Records a run with Nsight Systems, and says how long steps, their parts and the kernels of the card took.
#
#     scripts/nsys_capture.sh [--out FOLDER] -- paceline train --device cuda
#
# paceline marks its steps and their parts (forward, backward, grad_sync, exposed, optimizer_step) as ranges of NVTX whenever a
# profiler asks for them, so the run needs no flag. Needs nsys.
#
# Writes FOLDER/report.nsys-rep (nsys-ui FOLDER/report.nsys-rep) and prints the sums of ranges, kernels and copies.
set -euo pipefail

out="nsys-capture"
usage() { sed -n '2,4p' "$0" >&2; exit 2; }
while [ $# -gt 0 ]; do
    case "$1" in
        --out) [ $# -gt 1 ] || usage; out="$2"; shift 2 ;;
        --) shift; break ;;
        *) usage ;;
    esac
done
[ $# -gt 0 ] || usage
command -v nsys >/dev/null || { echo "error: nsys is not installed; install Nsight Systems (developer.nvidia.com/nsight-systems)" >&2; exit 2; }
mkdir -p "$out"

# The ranks are processes that the run starts, and nsys follows them.
nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --force-overwrite=true -o "$out/report" "$@"
nsys stats --force-export=true --report nvtx_pushpop_sum,cuda_gpu_kern_sum,cuda_gpu_mem_time_sum "$out/report.nsys-rep"
echo
echo "File: $out/report.nsys-rep"
