#!/usr/bin/env bash
# Makes the pictures of README.md again, docs/images/report.png and docs/images/efficiency.png, from real runs
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
"$program" predict --gradient-bytes 102.4e6 --compute-ms 50 --nproc 2,8,64 --links 10gbe 25gbe 100gbe --charts charts

cp report.png "$images/report.png"
cp charts/predict_efficiency.png "$images/efficiency.png"
ls -l "$images"
