"""Does `paceline plan` put layouts in the right order, and how near is its memory?

    cargo build --release
    python3 bench/planning.py

Layouts are drawn by a seed from the list of `plan --on 2xthis --json` on an emulated link, and run in turn. Two layouts differ if their ranges over the rounds do not
overlap. Such a pair is ordered right if the plan has it in the same order. Memory is the most bytes in tensors of a rank in its
steps, measured over predicted.
"""
import argparse
import itertools
import json
import random
import shlex
import statistics
import tempfile
from pathlib import Path

from common import Record, aligned, arguments_for, parsed, provenance, ranged, run, train, write

MODEL = "--model llama --layers 6 --width 256 --heads 4 --kv-heads 4 --intermediate 688 --vocab 4096 --seq-len 128 --optimizer adamw --global-batch-size 16"


def planned(arguments: argparse.Namespace) -> Record:
    """The plan of all layouts that fit."""
    words = f"plan --on {arguments.ranks}xthis --link {arguments.link} --top 100000 --json plan.json {arguments.model}"
    with tempfile.TemporaryDirectory(prefix="plan_") as folder:
        run([arguments.paceline, *shlex.split(words)], Path(folder), 3600)
        return json.loads((Path(folder) / "plan.json").read_text())


def name(row: Record) -> str:
    axes = " ".join(f"{axis}{row[axis]}" for axis in ("pp", "dp", "tp") if row[axis] > 1)
    again = " recompute" if row["checkpoint_activations"] else ""
    return f"{axes} {row['strategy']} {row['schedule'] or ''} {row['accumulate']}x{row['micro_batch']}{again}".replace("  ", " ")


def measured(arguments: argparse.Namespace, rows: list[Record]) -> None:
    """Runs the layouts in rounds, every second one backward."""
    for number in range(arguments.rounds):
        for row in rows if number % 2 == 0 else rows[::-1]:
            flags = row["command"].removeprefix("paceline train ")
            summary = train(arguments.paceline, f"{flags} --steps {arguments.steps} --warmup-steps 3")
            row.setdefault("steps_ms", []).append(summary["step_ms_median"])
            phases = [phase for rank in summary["memory"] for phase in rank["phases"] if phase["phase"] != "initialization"]
            row["peak_bytes"] = max(row.get("peak_bytes", 0), *(phase["peak_bytes"]["total"] for phase in phases))


def pairs(rows: list[Record]) -> list[Record]:
    """The pairs that differ, and whether the plan has them in the measured order."""
    found = []
    for a, b in itertools.combinations(rows, 2):
        if max(a["steps_ms"]) < min(b["steps_ms"]) or max(b["steps_ms"]) < min(a["steps_ms"]):
            is_right = (a["step_ms"] < b["step_ms"]) == (max(a["steps_ms"]) < min(b["steps_ms"]))
            found.append({"layouts": [name(a), name(b)], "is_right": is_right})
    return found


def main() -> None:
    parser = arguments_for(__doc__ or "", "planning.json")
    parser.add_argument("--ranks", type=int, default=2, help="(default: 2)")
    parser.add_argument("--link", default="1gbit,100us", help="(default: 1gbit,100us)")
    parser.add_argument("--layouts", type=int, default=10, help="(default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
    parser.add_argument("--model", default=MODEL, metavar="FLAGS", help="of the model and of a step (default: a Llama of 9 million parameters)")
    parser.add_argument("--steps", type=int, default=6, help="of a run (default: 6)")
    arguments = parsed(parser)
    plan = planned(arguments)
    fitting = [row for row in plan["rows"] if row["over_bytes"] == 0]
    rows = random.Random(arguments.seed).sample(fitting, min(arguments.layouts, len(fitting)))
    rows.sort(key=lambda row: row["step_ms"])
    measured(arguments, rows)
    table = [["layout", "predicted ms", "measured ms", "off %", "memory MB", "measured over predicted"]]
    for row in rows:
        row["memory_ratio"] = row["peak_bytes"] / row["bytes"]["total"]
        off = 100 * (statistics.median(row["steps_ms"]) / row["step_ms"] - 1)
        table.append([name(row), f"{row['step_ms']:.2f}", ranged(row["steps_ms"]), f"{off:+.1f}", f"{row['bytes']['total'] / 1e6:.1f}", f"{row['memory_ratio']:.3f}"])
    print(aligned(table, {0}))
    differing = pairs(rows)
    right = sum(pair["is_right"] for pair in differing)
    most_off = max(abs(row["memory_ratio"] - 1) for row in rows)
    print(f"{right} of {len(differing)} pairs that differ are in the right order; memory is off by at most {100 * most_off:.2f} %")
    record = {
        **provenance(), "model": arguments.model, "link": arguments.link, "ranks": arguments.ranks, "seed": arguments.seed, "listed": len(fitting),
        "layouts": rows, "pairs": differing, "right": right, "memory_off_most": most_off,
    }
    write(arguments.out, record)


if __name__ == "__main__":
    main()
