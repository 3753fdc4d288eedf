"""Do the tables of `paceline analyze` have the figures of TensorBoard's plugin for PyTorch and of TraceLens?

    python3 bench/tables.py --peer-python PYTHON TRACE...    # a Python with torch_tb_profiler and TraceLens

TRACE is a trace of PyTorch with record_shapes=True, and with with_stack=True for modules. All three read it. Calls have to be equal, and times to 0.1 % and
half a microsecond per call, the precision of older traces. Of TraceLens, calls, floating-point operations and bytes of each operator are compared. Differences
are listed, with both figures. The exit code is 1 if something could not be run.
"""
import json
import sys
import tempfile
from pathlib import Path

from common import Record, aligned, arguments_for, parsed, provenance, run, write

TIMES = ("self_device_ms", "device_ms", "self_host_ms", "host_ms")
# Where both count the same call, they may name another operator: the one that runs within.
NAMES = {"aten::convolution": ("aten::cudnn_convolution", "aten::miopen_convolution", "aten::mkldnn_convolution")}
LIMIT_S = 900


def ours(args, trace: Path) -> Record:
    with tempfile.TemporaryDirectory() as folder:
        run([args.paceline, "analyze", "--trace-files", trace, "--output", folder], Path(folder), LIMIT_S)
        tables = json.loads((Path(folder) / "summary.json").read_text())["tables"]
    return {name: tables.get(name, {}).get("rows", []) for name in ("operators", "modules", "operations")}


def timed(rows: list, theirs: dict) -> Record:
    """Operators or modules: which calls and times differ. The steps divide ours: the calls of both say how many there are."""
    mine = {row["name"]: row for row in rows}
    common = [name for name in theirs if name in mine]
    ratios = sorted(theirs[name][0] / mine[name]["calls"] for name in common)
    steps = round(ratios[len(ratios) // 2]) if ratios else 1
    differences, equal = [], 0
    for name in common:
        calls, *times = theirs[name]
        own = [mine[name]["calls"] * steps, *(1e3 * steps * mine[name].get(key, 0) for key in TIMES)]
        # Nested times of older traces are rounded to a microsecond each.
        is_equal = abs(own[0] - calls) < 1e-6 * calls and all(abs(a - b) <= 0.001 * b + 0.5 * calls + 1 for a, b in zip(own[1:], times))
        equal += is_equal
        if not is_equal:
            differences.append({"name": name, "paceline": [round(of, 1) for of in own], "theirs": [round(of, 1) for of in [calls, *times]]})
    return {
        "steps": steps, "compared": len(common), "equal": equal, "differences": differences,
        "only_theirs": sorted(set(theirs) - set(mine)), "only_paceline": sorted(set(mine) - set(theirs)),
    }  # fmt: skip


def counted(rows: list, theirs: dict, steps: int) -> Record:
    """Operators that TraceLens knows: which FLOP and bytes differ."""
    differences, equal, compared = [], {"flop": 0, "bytes": 0}, 0
    for name, (calls, flop, num_bytes) in theirs.items():
        names = NAMES.get(name, (name,))
        mine = [row for row in rows if row["name"] in names]
        if not mine:
            continue
        compared += 1
        own = [steps * sum(row[key] for row in mine) * unit for key, unit in (("calls", 1), ("gflop", 1e9), ("mb", 1e6))]
        same = [abs(a - b) <= 0.005 * max(b, 1) for a, b in zip(own, (calls, flop, num_bytes))]
        equal["flop"] += same[1]
        equal["bytes"] += same[2]
        if not all(same):
            differences.append({"name": name, "paceline": own, "theirs": [calls, flop, num_bytes]})
    return {"compared": compared, **{f"equal_{key}": count for key, count in equal.items()}, "differences": differences}


def main() -> int:
    parser = arguments_for(__doc__, "tables.json", rounds=0, has_peer=True)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    args = parsed(parser)
    rows, lines = [], [["trace", "operators", "equal", "modules", "equal", "TraceLens", "FLOP", "bytes"]]
    for trace in args.traces:
        mine = ours(args, trace.resolve())
        theirs = json.loads(run([args.peer_python, Path(__file__).parent / "peer/tables_report.py", trace.resolve()], Path.cwd(), LIMIT_S))
        operators = timed(mine["operators"], theirs["tensorboard"]["operators"])
        modules = timed(mine["modules"], theirs["tensorboard"]["modules"])
        lens = counted(mine["operations"], (theirs["tracelens"] or {"sums": {}})["sums"], operators["steps"])
        name = "/".join(trace.resolve().parts[-3:])
        rows.append({"trace": name, "operators": operators, "modules": modules, "tracelens": lens})
        figures = [operators["compared"], operators["equal"], modules["compared"], modules["equal"], lens["compared"], lens["equal_flop"], lens["equal_bytes"]]
        lines.append([name, *map(str, figures)])
    print(aligned(lines, left={0}))
    write(args.out, provenance() | {"traces": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
