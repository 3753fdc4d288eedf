"""Compares Paceline and PyTorch, side by side: training steps on the processor.

    cargo build --release
    python3 bench/first_light.py                        # needs the peer: see bench/README.md
    python3 bench/first_light.py sharding --rounds 3
    python3 bench/first_light.py llama --cases 'ddp' 'ddp, bf16'
    python3 bench/first_light.py limits --before PATH   # an earlier build beside it, and how near each operation comes to its limit

`GROUPS` has the cases: `first_light` is ddp beside DistributedDataParallel, `sharding` and `llama` also `sharded1` beside ZeroRedundancyOptimizer, `sharded2`
beside fully_shard whose units stay whole after the forward pass, and `sharded3` beside fully_shard whose units do not; `tensor` is one rank of two threads, and
two ranks that divide each layer beside parallelize_module.

In each round PyTorch trains for `--seconds` and Paceline as many steps. A round gives one ratio of step times and one of resident memory, since a time alone says
more about the machine than about the program. `of ddp` is our step over that of our ddp in the same round. Exits with 1 if a run fails, or if models differ.
"""
import itertools
import json
import os
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from common import ROOT, RUN_SECONDS, Record, RunFailed, aligned, arguments_for, parsed, program, provenance, ranged, run, train, write

KEPT = ("step_ms_median", "step_ms_p99", "samples_per_s_without_data", "params", "resident_bytes", "steps")
COLUMNS = {"before_ms": lambda ours: ours["step_ms_median"] / ours["before_ms"], "limit_pct": lambda ours: ours["limit_pct"]}
LIMITS = ("limit_pct", "operations")
SHARDING = {"ddp": "none", "sharded1": "zero1", "sharded2": "kept", "sharded3": "resharded"}
CNN32 = "--model cnn --channels 16 32 --hidden 64 --image 32 32 3"
MLP = "--model mlp --input-dim 2048 --hidden-dim 2048 --num-layers 3 --output-dim 1024"


class Case(NamedTuple):
    """Our flags, and the peer's."""

    ours: str
    theirs: str


def case(ours: str, theirs: str, batch: int, precision: str = "f32", ranks: int = 2, threads: int = 1) -> Case:
    amp = "bf16" if precision == "bf16" else "off"
    return Case(
        f"{ours} --batch-size {batch} --precision {precision} --nproc {ranks} --threads {threads} --pin-cores",
        f"{theirs} --batch-size {batch} --amp {amp} --ranks {ranks} --threads {threads}",
    )


def mlp(strategy: str) -> Case:
    theirs = f"--model mlp --features 2048 2048 2048 2048 1024 --optimizer adamw --lr 0.001 --sharding {SHARDING[strategy]}"
    return case(f"{MLP} --optimizer adamw --strategy {strategy}", theirs, 64)


def llama(strategy: str = "ddp", batch: int = 4, seq: int = 128, **how: str | int) -> Case:
    theirs = f"--model llama --seq {seq} --optimizer adamw --lr 0.001 --sharding {SHARDING.get(strategy, 'none')}"
    return case(f"--model llama --seq-len {seq} --optimizer adamw --strategy {strategy}", theirs, batch, **how)


def layout(model: str, layout: str, precision: str) -> Case:
    ours, theirs = {"cnn": "--model cnn", "cnn32": CNN32}[model], "--channels-last" if layout == "nhwc" else "--no-channels-last"
    return case(f"{ours} --layout {layout}", f"--model {model} {theirs}", 64, precision, ranks=1)


GROUPS: dict[str, dict[str, Case]] = {
    "first_light": {
        "cnn": case("--model cnn --lr 0.01", "--model cnn", 64),
        "cnn32": case(f"{CNN32} --lr 0.01", "--model cnn32", 64),
        "mlp": case("--model mlp --lr 0.01", "--model mlp", 256),
    },
    "sharding": {name: mlp(name) for name in SHARDING},
    "llama": {name: llama(name) for name in SHARDING} | {
        "ddp, bf16": llama(precision="bf16"),
        "ddp, batch 32": llama(batch=32),
        "ddp, batch 32, bf16": llama(batch=32, precision="bf16"),
        "1 rank, 2 threads": llama("single", ranks=1, threads=2),
        "1 rank, 1024 tokens, bf16": llama("single", 1, 1024, precision="bf16", ranks=1),
        "1 rank, 2048 tokens, bf16": llama("single", 1, 2048, precision="bf16", ranks=1),
    },
    "limits": {
        f"{name}, {ranks} x {threads}": case(f"{ours} --profile --profile-wait 6 --profile-active 8", theirs, batch, precision, ranks, threads)
        for name, ours, theirs, batch, precision in (
            ("cnn", "--model cnn --lr 0.01", "--model cnn", 64, "f32"),
            ("cnn32", f"{CNN32} --lr 0.01", "--model cnn32", 64, "f32"),
            ("mlp", "--model mlp --lr 0.01", "--model mlp", 256, "f32"),
            ("llama", "--model llama --optimizer adamw", "--model llama --optimizer adamw --lr 0.001", 4, "f32"),
            ("llama, bf16", "--model llama --optimizer adamw", "--model llama --optimizer adamw --lr 0.001", 4, "bf16"),
        )
        for ranks, threads in ((1, 1), (1, 2), (2, 1))
    },
    "tensor": {
        f"{name}, {ranks} x {threads}": case(f"{ours} {'' if ranks == 1 else f'--mesh tp={ranks}'}", f"{theirs} --sharding {'none' if ranks == 1 else 'tensor'}", batch, precision, ranks, threads)
        for name, ours, theirs, batch, precision in (
            ("mlp", "--model mlp --lr 0.01", "--model mlp", 256, "f32"),
            ("llama", "--model llama --optimizer adamw", "--model llama --optimizer adamw --lr 0.001", 4, "f32"),
            ("llama, bf16", "--model llama --optimizer adamw", "--model llama --optimizer adamw --lr 0.001", 4, "bf16"),
        )
        for ranks, threads in ((1, 2), (2, 1))
    },
    "layouts": {" ".join(of): layout(*of) for of in itertools.product(("cnn", "cnn32"), ("nhwc", "nchw"), ("f32", "bf16"))},
}


def measured(arguments, name: str, of: Case, last: Record | None) -> Record:
    """The peer first, and then ours; in every other round the other way round, since the second of two finds a warmer machine."""
    def peers() -> Record:
        peer = [arguments.peer_python, ROOT / "bench/peer/step.py", *shlex.split(of.theirs), "--seconds", str(arguments.seconds)]
        return json.loads(run(peer, ROOT, RUN_SECONDS).splitlines()[-1])

    is_ours_first = last is not None and "ours_first" not in last
    theirs = last["theirs"] if is_ours_first else peers()
    steps = max(20, round(1e3 * arguments.seconds / theirs["step_ms"]))
    flags = f"{of.ours} --steps {steps} --warmup-steps 5"
    summary = train(arguments.paceline, flags)
    ours = {key: summary[key] for key in KEPT} | {key: summary[key] for key in LIMITS if summary.get(key)}
    if arguments.before:
        ours["before_ms"] = train(arguments.before, flags)["step_ms_median"]
    if is_ours_first:
        theirs = peers()
    if ours["params"] != theirs["params"]:
        raise RunFailed(f"{name}: not the same model: {ours['params']} and {theirs['params']} parameters")
    print(f"{name}: {ours['step_ms_median']:.2f} and {theirs['step_ms']:.2f} ms", file=sys.stderr, flush=True)
    return {"ours": ours, "theirs": theirs} | ({"ours_first": True} if is_ours_first else {})


def table(rounds: list[dict[str, Record]]) -> str:
    rows = [["case", "paceline ms", "PyTorch ms", "times as fast", "memory of theirs", "samples/s: paceline", "PyTorch", "of ddp", "of before", "limit %"]]
    for name in rounds[0]:
        pairs = [(of[name]["ours"], of[name]["theirs"]) for of in rounds]
        rows.append([
            name,
            ranged([ours["step_ms_median"] for ours, _ in pairs]),
            ranged([theirs["step_ms"] for _, theirs in pairs]),
            ranged([theirs["step_ms"] / ours["step_ms_median"] for ours, theirs in pairs]),
            ranged([ours["resident_bytes"] / theirs["resident_bytes"] for ours, theirs in pairs]),
            ranged([ours["samples_per_s_without_data"] for ours, _ in pairs], 0),
            ranged([theirs["samples_per_s"] for _, theirs in pairs], 0),
            ranged([of[name]["ours"]["step_ms_median"] / of["ddp"]["ours"]["step_ms_median"] for of in rounds]) if "ddp" in rounds[0] else "",
            *(ranged([values(ours) for ours, _ in pairs]) if key in pairs[0][0] else "" for key, values in COLUMNS.items()),
        ])
    return aligned(rows, left={0})


def main() -> None:
    parser = arguments_for(__doc__, "GROUP.json", has_peer=True)
    parser.add_argument("group", nargs="?", choices=GROUPS, default="first_light", help="(default: first_light)")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="(default: all of the group)")
    parser.add_argument("--seconds", type=float, default=5, help="of each run (default: 5)")
    parser.add_argument("--before", type=Path, metavar="PATH", help="an earlier build")
    arguments = parsed(parser)
    if arguments.before:
        arguments.before = program(parser, "--before", arguments.before)
    cases = {name: of for name, of in GROUPS[arguments.group].items() if name in (arguments.cases or GROUPS[arguments.group])}
    if not cases:
        parser.error(f"--cases: there are {'; '.join(GROUPS[arguments.group])}")
    # PyTorch's fully_shard would move to a card where there is one.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    rounds: list[dict[str, Record]] = []
    for _ in range(arguments.rounds):
        last = rounds[-1] if rounds else {}
        rounds.append({name: measured(arguments, name, of, last.get(name)) for name, of in cases.items()})
    print(table(rounds))
    out = arguments.out if arguments.out.name != "GROUP.json" else ROOT / f"results/{arguments.group}.json"
    write(out, provenance() | {"cases": {name: of._asdict() for name, of in cases.items()}, "rounds": rounds})


if __name__ == "__main__":
    main()
