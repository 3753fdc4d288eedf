"""Pipelines: beside PyTorch's, and whether the ledger of idle time closes and names planted faults.

    cargo build --release && cargo build --release -p paceline-strategies --example sleeping_stages
    python3 bench/pipelines.py --parts sleeping faults
    python3 bench/pipelines.py --parts peer --out results/pipelines_peer.json

`peer`: a Llama on 2 ranks, batches of 8 micro-batches: our schedules with their best cuts, then PyTorch's with those of `PEER`, in turn. A ratio is a step of theirs
over ours. `sleeping`: more ranks than cores, whose layers sleep; all else is real. Is the plan followed, does the ledger close, is the schedule that the rehearsal calls
best the fastest? `faults`: which cause of idle time grows most when a fault is planted, and by what is expected?

    python3 bench/pipelines.py --parts traces --out results/pipelines_torch.json

`traces`: the same for PyTorch's pipelines, from the traces of its profiler: does the ledger of `paceline analyze` close, on the Llama of `peer` and on stages that sleep,
and which cause grows with a planted fault?
"""
import argparse
import json
import statistics
import tempfile
from pathlib import Path

from common import ROOT, RUN_SECONDS, Record, aligned, arguments_for, parsed, provenance, ranged, run, train, write

SCHEDULES = ("gpipe", "1f1b", "zb_h1", "zb_h2", "interleaved_1f1b", "interleaved_zb", "zbv", "dualpipev", "auto")
LLAMA = (
    "--model llama --layers 4 --width 256 --heads 4 --kv-heads 4 --intermediate 688 --vocab 8192 --seq-len 128"
    " --optimizer adamw --threads 1 --pin-cores --nproc 2 --mesh pp=2 --accumulate 8 --epochs 1 --warmup-steps 3"
)
# The cuts that are best or second best for PyTorch.
PEER = {"1f1b": ["2", "3"], "gpipe": ["3"], "interleaved_1f1b": ["1 2 3", "2 3 4"], "interleaved_zb": ["1 2 3"], "zbv": ["1 2 4", "1 3 4"]}
SLEEPING = [f"--ranks {of}" for of in ("4 --micro-batches 8 --costs 6,6,6", "4 --micro-batches 16 --costs 5,8,4", "4 --micro-batches 12 --costs 8,6,4",
                                       "8 --micro-batches 16 --costs 6,6,6", "8 --micro-batches 24 --costs 5,8,4")]  # fmt: skip
CAUSES = ("fill", "drain", "imbalance", "transfer", "head of line", "late peer", "barrier")
# By name: the cause, runs without and with the fault, and by how many milliseconds idle time grows, unless the clock says.
FAULTS = {
    # Beside stages that are all alike, with as much to do together.
    "a stage twice as slow": ("imbalance", "--costs 10,10,10", "--costs 8,8,8 --slow 2,2", None),
    # One pass in four steps is 60 ms late, and three of four ranks wait for it.
    "a pass 60 ms late, in every fourth step": ("late peer", "--costs 8,8,8", "--costs 8,8,8 --late 1,60", 60 / 4 * 3 / 4),
    "messages of 5 ms": ("transfer", "--costs 8,8,8", "--costs 8,8,8 --link 5", None),
    # The ranks are done one after the other: the first one 8 ms after the second, the others each 16 ms after the next.
    "clipping": ("barrier", "--costs 8,8,8", "--costs 8,8,8 --clip 1", (8 + 24 + 40) / 4),
}
TORCH_SCHEDULES = ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zb", "zbv", "dualpipev")
TORCH_FAULTY = ("1f1b", "zbv")
# The same in stages of PyTorch that sleep, four of them. The last number is the work that a fault adds, on average over ranks; otherwise the longer step is idle time.
TORCH_FAULTS = {
    "a stage twice as slow": ("imbalance", "--sleep 60 120", "--sleep 48 96 --slow 2 2", 0),
    "a pass 720 ms late, in every fourth step": ("late peer", "--sleep 48 96", "--sleep 48 96 --late 1 720", 720 / 4 / 4),
    "messages of 45 ms": ("transfer", "--sleep 48 96", "--sleep 48 96 --link 45", 0),
}


def ours(arguments: argparse.Namespace, schedule: str, micro_batch: int) -> Record:
    cut = "" if schedule == "auto" else "--stages measured"
    summary = train(arguments.paceline, f"{LLAMA} --schedule {schedule} {cut} --global-batch-size {micro_batch} --samples {8 * micro_batch * 24}")
    return {name: value for name, value in summary.items() if name in ("step_ms_median", "weights_sha256") or name.startswith("bubble_")}


def theirs(arguments: argparse.Namespace, schedule: str, cut: str, batch: int) -> float:
    command = [arguments.peer_python, ROOT / "bench/peer/pipeline.py", "--schedule", schedule, "--cut", *cut.split(), "--batch-size", str(batch)]
    return json.loads(run(command, ROOT, RUN_SECONDS).splitlines()[-1])["step_ms"]


def peer(arguments: argparse.Namespace) -> Record:
    found: Record = {}
    for micro_batch in (4, 1):
        batch, rounds = 8 * micro_batch, []
        for _ in range(arguments.rounds):
            of_ours = {name: ours(arguments, name, micro_batch) for name in SCHEDULES}
            rounds.append({"ours": of_ours, "theirs": {name: {cut: theirs(arguments, name, cut, batch) for cut in cuts} for name, cuts in PEER.items()}})
        rows = [["ours", "step ms", "fastest of theirs", "its namesake", "unexplained, % of the step"]]
        for name in SCHEDULES:
            steps = [one["ours"][name]["step_ms_median"] for one in rounds]
            fastest = ranged([min(min(of.values()) for of in one["theirs"].values()) / step for one, step in zip(rounds, steps)])
            namesake = ranged([min(one["theirs"][name].values()) / step for one, step in zip(rounds, steps)]) if name in PEER else "-"
            rest = max(abs(one["ours"][name]["bubble_rest_ms"]) / step for one, step in zip(rounds, steps))
            rows.append([name, ranged(steps, 1), fastest, namesake, f"{100 * rest:.2f}"])
        print(f"\nbatch {batch} in 8 micro-batches, 2 ranks\n{aligned(rows, {0})}")
        found[f"batch_{batch}"] = rounds
    return found


def sleep(arguments: argparse.Namespace, flags: str) -> list[Record]:
    example = arguments.paceline.parent / "examples/sleeping_stages"
    return [json.loads(line) for line in run([example, *flags.split()], ROOT, RUN_SECONDS).splitlines()]


def sleeping(arguments: argparse.Namespace) -> list[Record]:
    found, rows = [], [["ranks, micro-batches, costs", "best by rehearsal", "fastest", "apart %", "unexplained at most %", "as planned"]]
    for flags in SLEEPING:
        rounds = [sleep(arguments, flags) for _ in range(arguments.rounds)]
        step = {runs[0]["schedule"]: statistics.median(one["step_ms"] for one in runs) for runs in zip(*rounds)}
        # The program prints its own choice first.
        chosen, fastest = rounds[0][0]["schedule"], min(step, key=step.get)
        rest = max(one["rest_most_pct"] for runs in rounds for one in runs)
        planned = all(one["as_planned"] for runs in rounds for one in runs)
        rows.append([flags, chosen, fastest, f"{100 * (step[chosen] / step[fastest] - 1):.1f}", f"{rest:.2f}", str(planned)])
        found.append({"flags": flags, "rounds": rounds})
    print(f"\nlayers that sleep\n{aligned(rows, {0, 1, 2})}")
    return found


def faults(arguments: argparse.Namespace) -> Record:
    found, rows = {}, [["fault", "grows most", "grows by, ms", "expected, ms", "off %"]]
    for name, (cause, without, fault, expected) in FAULTS.items():
        before, after = (sleep(arguments, f"--ranks 4 --micro-batches 8 --schedule 1f1b --steps 18 {flags}")[0] for flags in (without, fault))
        grown = {one: after[one] - before[one] for one in CAUSES}
        if expected is None:
            # The idle time as the clock has it, without a ledger.
            expected = (after["step_ms"] - after["busy"]) - (before["step_ms"] - before["busy"])
        rows.append([name, max(grown, key=grown.get), f"{grown[cause]:.2f}", f"{expected:.2f}", f"{100 * (grown[cause] / expected - 1):+.1f}"])
        found[name] = {"without": before, "with": after, "cause": cause, "grown": grown, "expected_ms": expected}
    print(f"\nplanted faults, ms of idle time, means over ranks\n{aligned(rows, {0, 1})}")
    return found


def traced(arguments: argparse.Namespace, flags: str) -> Record:
    """The idle time of a pipeline of PyTorch, from its traces: means over the ranks, and the largest rest of a rank in percent of its step."""
    with tempfile.TemporaryDirectory(prefix="pipeline_") as folder:
        run([arguments.peer_python, ROOT / "bench/peer/pipeline.py", *flags.split(), "--profile", f"{folder}/traces"], ROOT, RUN_SECONDS)
        run([arguments.paceline, "analyze", f"{folder}/traces", "--output", f"{folder}/report"], ROOT, RUN_SECONDS)
        rows = json.loads(Path(folder, "report/summary.json").read_text())["tables"]["bubble"]["rows"]
    names = [name for name in rows[0] if name != "rank"]
    mean = {name.removesuffix("_ms").replace("_", " "): statistics.mean(row[name] for row in rows) for name in names}
    return mean | {"rest_most_pct": max(100 * abs(row["rest_ms"]) / row["step_ms"] for row in rows)}


def traces(arguments: argparse.Namespace) -> Record:
    cuts = {name: f"--cut {PEER[name][0] if name in PEER else '1 2 3'}" for name in TORCH_SCHEDULES}
    found: Record = {"closes": {}, "faults": {}}
    rows = [["schedule", "stages", "step ms", "bubble %", "unexplained at most %"]]
    for name, cut in cuts.items():
        for stages, flags in (("Llama, 2 ranks", f"{cut} --batch-size 8"), ("sleeping, 4 ranks", "--ranks 4 --sleep 24 48")):
            all = [traced(arguments, f"--schedule {name} {flags}") for _ in range(arguments.rounds)]
            rest = max(one["rest_most_pct"] for one in all)
            rows.append([name, stages, ranged([one["step"] for one in all], 1), ranged([100 * (1 - one["busy"] / one["step"]) for one in all], 1), f"{rest:.2f}"])
            found["closes"][f"{name}, {stages}"] = all
    print(f"\nledgers from traces of PyTorch\n{aligned(rows, {0, 1})}")
    rows = [["schedule", "fault", "grows most", "grows by, ms", "expected, ms", "off %"]]
    for schedule in TORCH_FAULTY:
        for name, (cause, without, fault, work) in TORCH_FAULTS.items():
            pairs = [[traced(arguments, f"--schedule {schedule} --ranks 4 {flags}") for flags in (without, fault)] for _ in range(arguments.rounds)]
            before, after = ({key: statistics.median(pair[at][key] for pair in pairs) for key in pairs[0][at]} for at in (0, 1))
            grown = {one: after[one] - before[one] for one in CAUSES}
            expected = after["step"] - before["step"] - work
            rows.append([schedule, name, max(grown, key=grown.get), f"{grown[cause]:.2f}", f"{expected:.2f}", f"{100 * (grown[cause] / expected - 1):+.1f}"])
            found["faults"][f"{schedule}, {name}"] = {"without": before, "with": after, "cause": cause, "grown": grown, "expected_ms": expected}
    print(f"\nplanted faults, ms of idle time, means over ranks\n{aligned(rows, {0, 1, 2})}")
    return found


PARTS = {"peer": peer, "sleeping": sleeping, "faults": faults, "traces": traces}


def main() -> None:
    parser = arguments_for(__doc__, "pipelines.json", rounds=3, has_peer=True, has_busy=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: all)")
    arguments = parsed(parser)
    found = {part: PARTS[part](arguments) for part in arguments.parts}
    write(arguments.out, provenance() | {"busy": arguments.busy} | found)


if __name__ == "__main__":
    main()
