"""Is the backend of torch.distributed as good as Gloo, and faster? Needs the wheel of `scripts/release.sh` in the Python with torch:

    .peer/bin/pip install target/dist/paceline-*.whl
    python3 bench/torch_backend.py

Runs features of PyTorch with both backends, and measures operations and steps: the backends take turns within the
same processes, and a second group of Gloo shows the noise. Then compares the weights of runs with large and small buckets.
"""
import atexit
import json
import os
import sys
from pathlib import Path

from common import ROOT, RUN_SECONDS, Record, aligned, arguments_for, parsed, provenance, run, spinning, write

# The backend without shared storage, and Gloo again, which shows the noise.
SIDES = "gloo,paceline,paceline#private,gloo#2"


def lines(python: Path, script: str, *words: str, limit_s: float = RUN_SECONDS) -> list[Record]:
    output = run([python, "-W", "ignore", ROOT / "bench/peer" / script, *words], ROOT, limit_s)
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def main() -> int:
    parser = arguments_for(__doc__ or "", "torch_backend.json", rounds=0, has_peer=True, has_program=False, has_busy=True)
    parser.add_argument("--seconds", type=float, default=6, metavar="S", help="for each case (default: 6)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="(default: 2)")
    arguments = parsed(parser)
    # With --busy, every core has another program, not only the first.
    for core in range(1, os.cpu_count() or 1) if arguments.busy else ():
        atexit.register(spinning(core, 0).close)
    python = arguments.peer_python
    features = lines(python, "torch_features.py", "gloo,paceline", "2")
    record = provenance() | {"ranks": arguments.ranks, "seconds": arguments.seconds, "features": features}
    for part in ("operations", "steps"):
        record[part] = lines(python, "torch_collectives.py", SIDES, part, str(arguments.seconds), str(arguments.ranks))
    record["bits"] = lines(python, "torch_collectives.py", "gloo,paceline", "bits", "0", "3")
    rows = [["case", "gloo us", "p10", "paceline us", "p10", "paceline/gloo", "private/gloo", "gloo/gloo"]]
    for case in record["operations"] + record["steps"]:
        gloo, ours, private, again = (case[side] for side in SIDES.split(","))
        times = [f"{side[key]:,.0f}" for side in (gloo, ours) for key in ("median_us", "p10_us")]
        rows.append([case["case"], *times, *(f"{side['median_us'] / gloo['median_us']:.2f}" for side in (ours, private, again))])
    print(aligned(rows, {0}))
    same = sum(feature["same"] for feature in features)
    print(f"{same} of {len(features)} features give the same numbers as Gloo")
    for case in record["bits"]:
        print(f"{case['case']}: {case['differ']} of {case['weights']} weights differ between buckets of 25 and 0.02 MB")
    write(arguments.out, record)
    return 0 if same == len(features) else 1


if __name__ == "__main__":
    sys.exit(main())
