"""Compares Paceline and PyTorch, side by side: the training step with each stage of sharding.

    cargo build --release
    python3 bench/sharding.py                   # needs the peer: see bench/README.md
    python3 bench/sharding.py --model llama --batch-size 32 --out results/llama_32.json
    python3 bench/sharding.py --model llama --precision bf16 --strategies ddp --out results/llama_bf16.json
    python3 bench/sharding.py --model llama --ranks 1 --seq-len 1024 --batch-size 1 --out results/llama_long.json

The model is an MLP of three 2048-wide layers with 14.7 million parameters, batch 64 per rank, or a Llama of 4 blocks of width
256 with 7.4 million parameters, batch 4 of 128 tokens per rank (`--seq-len`). It is trained with AdamW, on 2 ranks of 1 thread, each
pinned to its own core, or on 1 rank of 1 or 2 threads. In every round each of our strategies runs, and then each counterpart in PyTorch:

    single     no group (`--ranks 1`)

    ddp        DistributedDataParallel
    sharded1   ZeroRedundancyOptimizer on top of it
    sharded2   fully_shard, each layer or block a unit, which stays whole after the forward pass
    sharded3   fully_shard, each layer or block a unit, which is sharded again after the forward pass

A round gives one ratio of step times for each pair, and for each of our strategies the ratio to our `ddp`. Ratios
are used because a time alone says more about the machine than about the program. The memory of a rank is its proportional set size.

With `--precision bf16`, PyTorch uses autocast. Both sides use AMX where the processor has it.

Prints two tables and writes the raw records of all runs with date, machine, versions and commands to
`results/sharding.json`, or `results/llama.json`. Run it from the root of the repository; only the standard library is needed. Exits with 1 if
something could not be run or the two sides did not train the same model, and with 2 on a wrong argument.
"""
import argparse
import datetime
import json
import os
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

from common import ROOT, Record, RunFailed, aligned, commit, machine, run, shown

FEATURES = (2048, 2048, 2048, 2048, 1024)
BATCH_SIZE = {"mlp": 64, "llama": 4}  # per rank
WARMUP_STEPS = 5
TIMEOUT_SECONDS = 300
PEER_SCRIPT = Path(__file__).resolve().with_name("peer") / "step.py"
COUNTERPARTS = {"single": "none", "ddp": "none", "sharded1": "zero1", "sharded2": "kept", "sharded3": "resharded"}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare a sharded training step with PyTorch's, interleaved.")
    parser.add_argument("--paceline", type=Path, default=Path("target/release/paceline"), metavar="PATH")
    parser.add_argument("--peer-python", type=Path, default=Path(".peer/bin/python"), metavar="PATH")
    parser.add_argument("--model", choices=list(BATCH_SIZE), default="mlp")
    parser.add_argument("--batch-size", type=int, help="per rank (default: 64 for mlp, 4 for llama)")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens of a sequence of the llama (default: 128)")
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--ranks", type=int, choices=[1, 2], default=2, help="(default: 2)")
    parser.add_argument("--threads", type=int, choices=[1, 2], default=1, help="of each rank; 2 with --ranks 1 only (default: 1)")
    parser.add_argument("--strategies", nargs="+", choices=list(COUNTERPARTS), help="(default: all for this number of ranks)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each strategy and side (default: 5)")
    parser.add_argument("--seconds", type=float, default=5, help="timed seconds of each run of the peer (default: 5)")
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each of our runs (default: 60)")
    parser.add_argument("--ours-only", action="store_true", help="compare our strategies with each other only")
    parser.add_argument("--out", type=Path, metavar="FILE", help="(default: results/sharding.json or results/llama.json)")
    arguments = parser.parse_args()
    arguments.batch_size = arguments.batch_size or BATCH_SIZE[arguments.model]
    possible = [name for name in COUNTERPARTS if (name == "single") == (arguments.ranks == 1)]
    arguments.strategies = arguments.strategies or possible
    if not set(arguments.strategies) <= set(possible):
        parser.error(f"--strategies: with --ranks {arguments.ranks} there are {', '.join(possible)}")
    if arguments.ranks * arguments.threads > 2:
        parser.error("--threads 2 needs --ranks 1")
    arguments.out = arguments.out or Path("results") / {"mlp": "sharding.json", "llama": "llama.json"}[arguments.model]
    if arguments.rounds < 1 or arguments.steps < 1 or arguments.seconds <= 0:
        parser.error("--rounds, --steps and --seconds must be above zero")
    if not arguments.paceline.is_file():
        parser.error(f"--paceline {arguments.paceline}: no such file; `cargo build --release` makes it")
    if not arguments.ours_only and not arguments.peer_python.is_file():
        parser.error(f"--peer-python {arguments.peer_python}: no such file; bench/README.md says how to set it up")
    return arguments


def our_arguments(arguments: argparse.Namespace, strategy: str) -> list[str]:
    total = arguments.steps + WARMUP_STEPS
    model = f"--model llama --seq-len {arguments.seq_len}"
    if arguments.model == "mlp":
        model = (
            f"--model mlp --input-dim {FEATURES[0]} --hidden-dim {FEATURES[1]} --num-layers {len(FEATURES) - 2}"
            f" --output-dim {FEATURES[-1]}"
        )
    return shlex.split(
        f"train {model} --batch-size {arguments.batch_size} --optimizer adamw --strategy {strategy} --nproc {arguments.ranks}"
        f" --threads {arguments.threads} --pin-cores --epochs 1 --steps-per-epoch {total} --warmup-steps {WARMUP_STEPS} --quiet"
        f" --precision {arguments.precision} --json step.json"
    )


def peer_arguments(arguments: argparse.Namespace, strategy: str) -> list[str]:
    model = f"--model llama --seq {arguments.seq_len}"
    if arguments.model == "mlp":
        model = f"--model mlp --features {' '.join(map(str, FEATURES))}"
    return shlex.split(
        f"{model} --batch-size {arguments.batch_size} --optimizer adamw --lr 0.001 --ranks {arguments.ranks}"
        f" --threads {arguments.threads} --amp {'bf16' if arguments.precision == 'bf16' else 'off'}"
        f" --sharding {COUNTERPARTS[strategy]} --warmup-steps {WARMUP_STEPS} --seconds {arguments.seconds:g}"
    )


def measure_ours(arguments: argparse.Namespace, strategy: str) -> Record:
    # A run writes its run folder into the current folder, which is temporary here.
    with tempfile.TemporaryDirectory(prefix="sharding_") as folder:
        command = [arguments.paceline.absolute(), *our_arguments(arguments, strategy)]
        run(command, Path(folder), TIMEOUT_SECONDS)
        record = json.loads(Path(folder, "step.json").read_text())
    kept = ("step_ms_median", "step_ms_p99", "params", "peak_bytes", "resident_bytes", "weights_sha256", "steps")
    return {key: record[key] for key in kept if key in record} | {"step_ms": record["step_ms_median"]}


def measure_peer(arguments: argparse.Namespace, strategy: str, failures: list[str]) -> Record:
    """One run, repeated once if it fails; `failures` records that."""
    command = [arguments.peer_python.absolute(), PEER_SCRIPT, *peer_arguments(arguments, strategy)]
    for is_last in (False, True):
        try:
            return json.loads(run(command, ROOT, TIMEOUT_SECONDS).strip().splitlines()[-1])
        except (RunFailed, ValueError, IndexError) as error:
            failures.append(f"{strategy}: {error}")
            if is_last:
                raise RunFailed(f"PyTorch's counterpart of {strategy}: {error}") from None
    raise AssertionError("the last try returns or raises")


def one_round(arguments: argparse.Namespace, failures: list[str]) -> dict[str, Record]:
    """A record for each side of each strategy."""
    records: dict[str, Record] = {}
    for strategy in arguments.strategies:
        records[strategy] = {"ours": measure_ours(arguments, strategy)}
        if not arguments.ours_only:
            theirs = measure_peer(arguments, strategy, failures)
            records[strategy]["theirs"] = theirs
            if theirs["params"] != records[strategy]["ours"]["params"]:
                raise RunFailed(f"{strategy}: not the same model: {records[strategy]['ours']['params']} and {theirs['params']}")
    digests = {record["ours"]["weights_sha256"] for record in records.values()}
    if len(digests) > 1:
        raise RunFailed(f"our strategies ended with different weights: {digests}")
    return records


def summary(ratios: list[float]) -> Record:
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios), "ratios": ratios}


def ratio_text(of: Record) -> str:
    return f"{of['median']:.3f} [{of['least']:.3f}-{of['most']:.3f}]"


def median_ms(rounds: list[dict[str, Record]], strategy: str, side: str) -> str:
    return f"{statistics.median(of[strategy][side]['step_ms'] for of in rounds):.1f}"


def main() -> int:
    arguments = parse_arguments()
    # PyTorch's fully_shard would move to a card where there is one.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    failures: list[str] = []
    rounds: list[dict[str, Record]] = []
    try:
        for number in range(1, arguments.rounds + 1):
            rounds.append(one_round(arguments, failures))
            steps = {name: [of["step_ms"] for of in record.values()] for name, record in rounds[-1].items()}
            print(f"round {number} of {arguments.rounds}: {steps}", file=sys.stderr)
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    names: list[str] = arguments.strategies
    to_ddp = {} if "ddp" not in names else {
        name: summary([of[name]["ours"]["step_ms"] / of["ddp"]["ours"]["step_ms"] for of in rounds]) for name in names
    }
    speedups = {} if arguments.ours_only else {
        name: summary([of[name]["theirs"]["step_ms"] / of[name]["ours"]["step_ms"] for of in rounds]) for name in names
    }
    memory = {} if arguments.ours_only else {
        name: summary([of[name]["ours"]["resident_bytes"] / of[name]["theirs"]["resident_bytes"] for of in rounds])
        for name in names
    }
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "commit": commit(),
        "commands": {
            name: {
                "ours": shlex.join([shown(arguments.paceline), *our_arguments(arguments, name)]),
                "theirs": shlex.join([shown(PEER_SCRIPT), *peer_arguments(arguments, name)]),
            }
            for name in names
        },
        "to_ddp": to_ddp,
        "speedups": speedups,
        "memory": memory,
        "peer_failures": failures,
        "rounds": rounds,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    if to_ddp:
        ours = [("strategy", "ms", "of our ddp [min-max]")]
        ours += [(name, median_ms(rounds, name, "ours"), ratio_text(to_ddp[name])) for name in names]
        print(aligned(ours, left={0}))
    if speedups:
        both = [("strategy", "paceline ms", "PyTorch ms", "times as fast [min-max]", "memory of theirs [min-max]")]
        both += [
            (
                name, median_ms(rounds, name, "ours"), median_ms(rounds, name, "theirs"), ratio_text(speedups[name]),
                ratio_text(memory[name]),
            )
            for name in names
        ]
        print("\n" + aligned(both, left={0}))
    print(f"\nraw records: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
