#!/usr/bin/env bash
# Makes the pictures of README.md again, docs/images/{report,step,efficiency,memory}.png, from real runs of README's own
# commands. Needs chromium.
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
# picture NAME HEIGHT PAGE: the top of a page.
picture() {
  chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --force-device-scale-factor=0.8 \
    --window-size="1100,$2" --screenshot="$work/$1.png" "file://$work/reports/ddp/$3"
}
picture report 680 summary.html
# Of the same page the section about a step across ranks.
only='<style>header, nav, section:not(#across) { display: none !important } body { padding-top: 0 !important }'
only+=' #across { margin-top: 0 !important }</style>'
sed "s|</head>|$only</head>|" reports/ddp/summary.html >reports/ddp/across.html
picture step 520 across.html
"$program" predict --gradient-bytes 102.4e6 --compute-ms 50 --nproc 2,8,64 --links 10gbe 25gbe 100gbe --charts charts
"$program" bench sharded-optimizer --model mlp --num-layers 12 --input-dim 512 --hidden-dim 512 --output-dim 512 --batch-size 64 \
  --strategies ddp,sharded1,sharded2,sharded3 --rounds 1 --epochs 1 --steps-per-epoch 10 --charts charts

cp report.png step.png "$images"
# chart NAME FILE: a chart, twice as large as its file says.
chart() {
  size=$(grep -oE -m 1 'width="[0-9]+" height="[0-9.]+"' "charts/$2.svg" | grep -oE '[0-9]+' | head -2 | paste -sd,)
  chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --force-device-scale-factor=2 \
    --window-size="$size" --screenshot="$images/$1.png" "file://$work/charts/$2.svg"
}
chart efficiency predict_efficiency
chart memory sharded_optimizer_memory
ls -l "$images"
