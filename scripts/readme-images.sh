#!/usr/bin/env bash
# Makes the pictures of README.md anew, docs/images/report.png and docs/images/all_reduce.png, from real runs
# of README's own commands. Needs chromium.
#
#   scripts/readme-images.sh target/release/paceline
set -euo pipefail
program=$(realpath -e "${1:?usage: $0 PROGRAM}")
images=$(realpath "$(dirname "$0")/..")/docs/images
mkdir -p "$images"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

"$program" train --link 1gbit,50us --evaluate --profile
"$program" analyze profile/ddp
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --force-device-scale-factor=0.8 --window-size=1100,680 \
  --screenshot="$work/report.png" "file://$work/reports/ddp/summary.html"
"$program" bench all_reduce --transport shm,tcp -b 1K -e 16M -f 4 --charts charts

cp report.png "$images/report.png"
cp charts/busbw.png "$images/all_reduce.png"
ls -l "$images"
