"""One digest: every layout of the same micro-batches ends with the same bits.

    python3 bench/layouts.py                     # all layouts of all models, with a table
    python3 bench/layouts.py --models mlp        # those of one model
    python3 bench/layouts.py --divided           # layers that several ranks divide (tensor parallelism)
    python3 bench/layouts.py --price             # what it costs, against the same layout with --batch-size and --accumulate
    python3 bench/layouts.py --kills 100         # runs that are killed three times, and go on in other layouts
    python3 bench/layouts.py --pairs 1000        # pairs of layouts, compared tensor by tensor

Each model is trained on one global batch per step, cut into micro-batches by the data alone (`--micro-batch-size`). A layout is how many ranks share
them, with which strategy, mesh, schedule, transport and number of threads. The last step of an epoch has fewer samples than the others.
What must end alike is the digest of the weights, the losses as the summary has them, and the norm of the gradients if they are clipped. A way of training that has
other bits (`clipped`, `bf16`) is a row of its own, and all of its layouts have to agree.

`--divided` does the same for models whose layers have parts (`--tp-parts`), of which each rank along the axis tp computes some.

`--price` takes steps in rounds of a run without, one with, and again one without `--micro-batch-size`, and prints the ratio of the medians of their steps.

`--kills` draws a model and a layout, kills all ranks at a moment that is drawn, and goes on from the last checkpoint in another layout: three times, and then to
the end, which has to be that of the run that nobody killed.

`--pairs` draws a model, a way of training and two layouts, and looks for a difference with `paceline check --numerics`. There is none.

The exit code is 1 if a layout ends otherwise than the first of its row, or fails.
"""
import argparse
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import RUN_SECONDS, Record, RunFailed, aligned, arguments_for, each, ended as run_to_end, interval, parsed, provenance, toml, train, write

COMMON = "--global-batch-size 32 --micro-batch-size 4 --warmup-steps 0 --simd portable"
MODELS = {
    "cnn": "--batch-norm --channels 4 20 --hidden 72 --samples 84 --steps 5 --momentum 0.9 --evaluate",
    "mlp": "--model mlp --input-dim 48 --hidden-dim 136 --output-dim 40 --num-layers 5 --steps-per-epoch 2 --steps 4 --optimizer adamw",
    "llama": "--model llama --layers 4 --width 32 --heads 4 --kv-heads 2 --intermediate 88 --vocab 301 --seq-len 16 --samples 84 --steps 5 --optimizer adamw",
}
WAYS = {"plain": "", "clipped": "--clip-grad-norm 0.01", "bf16": "--precision bf16"}
PIPELINE = "--mesh pp=2 --nproc 2"
LAYOUTS = {
    "1 rank": "--nproc 1",
    "1 rank, 2 threads": "--nproc 1 --threads 2",
    **{f"{ranks} ranks, ddp": f"--nproc {ranks}" for ranks in (2, 3, 4, 6, 8)},
    **{
        f"{ranks} ranks, {name}": f"--nproc {ranks} --strategy {name}"
        for ranks, names in (
            (2, ("simple_ddp", "simple_ddp_ga", "simple_ddp_hook", "zero2", "sharded1", "sharded3")),
            (3, ("simple_ddp_async", "flat_ddp", "zero1", "zero3", "sharded2", "sharded3")),
            (4, ("bucket_ddp_async", "flat_ddp", "zero1", "zero3", "sharded2", "sharded3")),
            (6, ("simple_ddp", "bucket_ddp_async", "zero2", "sharded1", "sharded3")),
            (8, ("simple_ddp_async", "zero3", "sharded2")),
        )
        for name in names
    },
    "2 ranks, tcp": "--nproc 2 --transport tcp",
    "3 ranks, tcp": "--nproc 3 --transport tcp",
    "6 ranks, tcp, sharded3": "--nproc 6 --transport tcp --strategy sharded3",
    "3 ranks, thread": "--nproc 3 --transport thread",
    "4 ranks, hybrid": "--nproc 4 --transport hybrid --hosts 2",
    "6 ranks, hybrid": "--nproc 6 --transport hybrid --hosts 2",
    "2 ranks, 2 threads": "--nproc 2 --threads 2",
    "4 ranks, small buckets": "--nproc 4 --bucket-cap-mb 0.01",
    "4 ranks, 2 replicas of 2 shards": "--nproc 4 --strategy sharded3 --mesh dp=2,shard=2",
    "6 ranks, 3 replicas of 2 shards": "--nproc 6 --strategy sharded2 --mesh dp=3,shard=2",
    "8 ranks, 4 replicas of 2 shards": "--nproc 8 --strategy sharded1 --mesh dp=4,shard=2",
    **{f"2 stages, {name}": f"{PIPELINE} --schedule {name}" for name in ("gpipe", "1f1b", "zb_h1", "zbv", "looped_bfs")},
    "2 stages, 2 replicas": "--nproc 4 --mesh pp=2,dp=2 --schedule 1f1b",
    "2 stages, 3 replicas": "--nproc 6 --mesh pp=2,dp=3 --schedule zb_h1",
    "2 stages, 2 shards": "--nproc 4 --mesh pp=2,shard=2 --strategy sharded2",
}
# Ranks, the samples of a micro-batch, and how many of these a rank has.
PRICES = {
    f"{model}, {ranks} x {count}": (f"{flags} --nproc {ranks} --warmup-steps 4 --pin-cores", ranks, size, count)
    for model, flags, size in (
        ("CNN", "--steps 60", 32),
        ("MLP", "--model mlp --input-dim 512 --hidden-dim 512 --output-dim 512 --num-layers 3 --steps 60", 64),
        ("Llama", "--recipe tiny-llama --steps 60", 8),
    )
    for ranks, count in ((1, 4), (2, 1), (2, 2))
}
# Models whose layers can be divided, and the parts.
DIVIDED = {
    "mlp, 4 parts": "--model mlp --input-dim 45 --hidden-dim 92 --output-dim 7 --num-layers 5 --steps-per-epoch 2 --steps 4 --optimizer adamw --tp-parts 4",
    "mlp, 3 parts": "--model mlp --input-dim 45 --hidden-dim 93 --output-dim 7 --num-layers 4 --steps-per-epoch 2 --steps 4 --optimizer adamw --tp-parts 3",
    "llama, 4 parts": "--model llama --layers 4 --width 32 --heads 8 --kv-heads 4 --intermediate 88 --vocab 300 --seq-len 15 --samples 84 --steps 5 --optimizer adamw --tp-parts 4",
    "tied llama, 3 parts": "--model llama --layers 2 --width 48 --heads 6 --kv-heads 3 --intermediate 96 --vocab 300 --seq-len 15 --samples 84 --steps 5 --optimizer adamw --tie-embeddings --tp-parts 3",
}  # fmt: skip
AXES = {
    4: ("tp=1", "tp=2", "tp=4", "dp=2,tp=2", "tp=2,dp=2", "dp=2,tp=4", "dp=3,tp=2", "pp=2,tp=2", "tp=4,pp=2", "dp=2,pp=2,tp=2", "shard=2,tp=2", "dp=2,shard=2,tp=2", "pp=2,shard=2,tp=2"),
    3: ("tp=1", "tp=3", "dp=2,tp=3", "shard=2,tp=3", "dp=2,shard=2,tp=3"),
}  # fmt: skip
HOW = ("", "--transport thread", "--transport tcp", "--transport hybrid --hosts 2", "--overlap-tp", "--sequence-parallel off", "--threads 2", "--device sim --transport thread")


def divided_layouts(model: str) -> dict[str, str]:
    """Every mesh in some ways. A mesh with shards takes turns between the strategies that shard."""
    layouts: dict[str, str] = {}
    for at, axes in enumerate(AXES[4 if "4 parts" in model else 3]):
        sizes = [int(size) for size in re.findall(r"=(\d+)", axes)]
        ranks = math.prod(sizes)
        strategy = f" --strategy {('sharded1', 'sharded2', 'sharded3')[at % 3]}" if "shard" in axes else ""
        for how in HOW:
            # Two hosts have as many ranks; one rank has nobody to talk to.
            if not (ranks == 1 and ("transport" in how or "tp" in how) and "sim" not in how) and not ("hosts" in how and ranks % 2):
                layouts[f"{axes}{strategy} {how}".strip()] = f"--nproc {ranks} --mesh {axes}{strategy} {how}"
    return layouts


RECOMPUTED = {"1 rank, recomputed": "--nproc 1 --checkpoint-activations", "3 ranks, recomputed": "--nproc 3 --checkpoint-activations --strategy sharded3"}


def ended(found: Record) -> list[object]:
    """What must not depend on the layout."""
    return [found["weights_sha256"][:16], *(found[key] for key in ("train_loss", "eval_loss", "grad_norm") if found.get(key) is not None)]


def compared(binary: Path, model: str, way: str, layouts: dict[str, str]) -> Record:
    models = MODELS | DIVIDED
    ends: dict[str, list[object] | str] = {}
    for name, flags in layouts.items():
        try:
            ends[name] = ended(train(binary, f"{models[model]} {COMMON} {WAYS[way]} {flags}"))
        except RunFailed as error:
            ends[name] = f"failed: {error}"
    first = next(iter(ends.values()))
    others = {name: end for name, end in ends.items() if end != first}
    return {"model": model, "way": way, "end": first, "layouts": len(ends), "others": others}


def price(binary: Path, case: str, rounds: int) -> Record:
    """The ratio of steps with micro-batches to steps without, and of steps without to themselves."""
    flags, ranks, size, count = PRICES[case]
    without = f"{flags} --batch-size {size} --accumulate {count}"
    with_them = f"{flags} --global-batch-size {ranks * size * count} --micro-batch-size {size}"
    taken = [tuple(train(binary, of)["step_ms_median"] for of in (without, with_them, without)) for _ in range(rounds)]
    return {
        "case": case,
        "step_ms": taken,
        "with_over_without": interval([with_it / ((first + again) / 2) for first, with_it, again in taken]),
        "without_over_itself": interval([again / first for first, _, again in taken]),
    }


def prices(arguments: argparse.Namespace) -> int:
    results, failures = each(PRICES, lambda case: price(arguments.paceline, case, arguments.rounds))
    cells = [["model, ranks x micro-batches", "with / without", "95 % interval", "without / itself", "95 % interval"]]
    for result in results:
        ratios = [result["with_over_without"], result["without_over_itself"]]
        cells.append([result["case"], *(text for of in ratios for text in (f"{of['median']:.3f}", f"{of['low']:.3f}-{of['high']:.3f}"))])
    print(aligned(cells, left={0}), *failures, sep="\n")
    write(arguments.out.with_stem("layouts_price"), provenance() | {"results": results, "failures": failures})
    return int(bool(failures))


def long(model: str) -> str:
    """The flags of a run that is long enough to be killed."""
    return re.sub(r"--steps \d+", "--steps 60", f"{MODELS[model]} {COMMON}")


def killed(binary: Path, model: str, seconds: float, draw: random.Random) -> Record:
    """The end of a run that was killed three times, each within so many seconds, and where."""
    layouts = LAYOUTS | (RECOMPUTED if model == "llama" else {})
    with tempfile.TemporaryDirectory(prefix="killed_") as folder:
        stops, flags = [], f"{long(model)} --save saved --save-every 1 --resume auto"
        for _ in range(3):
            name, after = draw.choice(list(layouts)), draw.uniform(0.1, seconds)
            command = [binary, "train", *shlex.split(f"{flags} {layouts[name]} --quiet")]
            ranks = subprocess.Popen(command, cwd=folder, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(after)
            os.killpg(ranks.pid, signal.SIGKILL)
            ranks.wait()
            stops.append({"layout": name, "after_s": round(after, 2), "checkpoints": sorted(path.name for path in Path(folder).glob("saved/*"))})
        name = draw.choice(list(layouts))
        found = train(binary, f"{flags} {layouts[name]}", Path(folder))
        return {"model": model, "stops": stops, "last": name, "end": [found["weights_sha256"][:16], found.get("eval_loss")]}


def kills(arguments: argparse.Namespace) -> int:
    whole, seconds, draw = {}, {}, random.Random(arguments.seed)
    for model in arguments.models:
        begin = time.monotonic()
        found = train(arguments.paceline, f"{long(model)} --nproc 2 --save saved --save-every 1")
        seconds[model] = time.monotonic() - begin
        whole[model] = [found["weights_sha256"][:16], found.get("eval_loss")]
    drawn = {f"run {at}": draw.choice(arguments.models) for at in range(arguments.kills)}
    results, failures = each(drawn, lambda run: killed(arguments.paceline, drawn[run], seconds[drawn[run]], draw))
    others = [result for result in results if result["end"] != whole[result["model"]]]
    print(f"{len(results)} runs, killed three times each: {len(others)} end otherwise, {len(failures)} failed", *others, *failures, sep="\n")
    write(arguments.out.with_stem("layouts_killed"), provenance() | {"seed": arguments.seed, "ends": whole, "results": results, "failures": failures})
    return int(bool(others or failures))


def pair(binary: Path, model: str, way: str, names: list[str]) -> str:
    """What the finder says of two layouts without a bug, if it is not that they agree."""
    with tempfile.TemporaryDirectory(prefix="pair_") as folder:
        files = [Path(folder, f"{side}.toml") for side in "ab"]
        for file, name in zip(files, names):
            file.write_text(toml(f"{MODELS[model]} {COMMON} {WAYS[way]} {(LAYOUTS | RECOMPUTED)[name]}"))
        code, output, errors = run_to_end([binary, "check", "--numerics", *files, "--steps", "2"], Path(folder), RUN_SECONDS, text=True)
        return "" if code == 0 and "No difference in" in output else f"{code}: {output}{errors}"


def pairs(arguments: argparse.Namespace) -> int:
    draw, alarms, begin = random.Random(arguments.seed), [], time.monotonic()
    record = provenance() | {"seed": arguments.seed, "alarms": alarms}
    for count in range(1, arguments.pairs + 1):
        model, way = draw.choice(arguments.models), draw.choice(arguments.ways)
        names = draw.sample(list(LAYOUTS | (RECOMPUTED if model == "llama" else {})), 2)
        said = pair(arguments.paceline, model, way, names)
        if said:
            alarms.append({"model": model, "way": way, "layouts": names, "said": said})
            print(alarms[-1], file=sys.stderr, flush=True)
        if count % 50 == 0 or count == arguments.pairs:
            print(f"{count} pairs in {time.monotonic() - begin:.0f} s: {len(alarms)} with a difference", flush=True)
            write(arguments.out.with_stem("layouts_pairs"), record | {"pairs": count})
    return int(bool(alarms))


def main() -> int:
    parser = arguments_for(__doc__, "layouts.json", rounds=9)
    parser.add_argument("--divided", action="store_true", help="take models whose layers are divided instead")
    parser.add_argument("--price", action="store_true", help="measure steps instead")
    parser.add_argument("--kills", type=int, metavar="N", help="kill so many runs instead, three times each")
    parser.add_argument("--pairs", type=int, metavar="N", help="compare so many pairs of layouts tensor by tensor instead")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (default: 1)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    arguments: argparse.Namespace = parsed(parser)
    if arguments.rounds < 6:
        parser.error("--rounds must be at least 6, for an interval of 95 %")
    if arguments.price:
        return prices(arguments)
    if arguments.kills:
        return kills(arguments)
    if arguments.pairs:
        return pairs(arguments)
    rows = []
    for model in DIVIDED if arguments.divided else arguments.models:
        for way in arguments.ways:
            begin = time.monotonic()
            layouts = divided_layouts(model) if arguments.divided else LAYOUTS | (RECOMPUTED if model == "llama" else {})
            rows.append(compared(arguments.paceline, model, way, layouts))
            print(f"{model}, {way}: {len(layouts)} layouts in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    print(aligned([["model", "", "digest", "layouts", "end otherwise"], *([row["model"], row["way"], str(row["end"][0]), str(row["layouts"]), str(len(row["others"]))] for row in rows)], left={0, 1, 2}))
    for row in rows:
        for name, end in row["others"].items():
            print(f"{row['model']}, {row['way']}, {name}: {end}")
    if arguments.divided:
        write(arguments.out.with_stem("layouts_divided"), provenance() | {"models": DIVIDED, "rows": rows})
    elif (set(arguments.models), set(arguments.ways)) == (set(MODELS), set(WAYS)):
        write(arguments.out, provenance() | {"layouts": LAYOUTS | RECOMPUTED, "rows": rows})
    return int(any(row["others"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
