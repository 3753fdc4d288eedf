"""Attacks of `attack.py` on runs: features in combination, and kills."""
import json
import math
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

from attacked import GRACE_S, LIMIT_S, Attack, Flags, Ran, digest, error, tree, words
from common import Record, kill_with, ranks_of

NAMED = re.compile(r"^paceline: rank (\d+) \(process \d+\) (.*?) after", re.MULTILINE)
EXACT = ["simple_ddp", "simple_ddp_ga", "simple_ddp_hook", "simple_ddp_async", "bucket_ddp_async", "ddp", "flat_ddp",
         "zero1", "zero2", "zero3", "sharded1", "sharded2", "sharded3"]
SCHEDULES = ["gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "zb_h1", "zb_h2", "interleaved_zb", "zbv", "dualpipev", "auto"]
# Flags that do not decide the weights: without them, and with ddp, a run with an exact strategy ends with the same bits.
NEUTRAL = set(
    "strategy mesh schedule head-at-once nproc transport link profile profile-wait profile-warmup profile-active tensorboard "
    "log-every verbose pin-cores load-ahead save-sync save-budget-mb save-best warmup-steps device pin-memory non-blocking "
    "copy-stream bucket-cap-mb first-bucket-mb no-gradient-view prefetch keep-after-forward accumulate-in checkpoint-activations "
    "evaluate layout".split())
# Flags that a run may have: how likely each is, and its values.
ANY: dict[str, tuple[float, list[object]]] = {
    "transport": (0.5, ["shm", "tcp", "thread", "hybrid"]), "threads": (0.2, [2]), "optimizer": (0.4, ["adamw", "sgd"]),
    "weight-decay": (0.1, [0.01]), "decay-matrices-only": (0.1, [True]), "accumulate": (0.3, [1, 2, 3, 5]),
    "accumulation-order": (0.2, ["tree"]), "clip-grad-norm": (0.3, [0.01, 1, 100]), "lr-schedule": (0.2, ["linear", "cosine"]),
    "lr-warmup-steps": (0.1, [1, 3]), "eval-every": (0.35, [1, 2, 3]), "evaluate": (0.3, [True]), "link": (0.1, ["100mbit,1ms"]),
    "loss-scale": (0.1, ["dynamic", "1024", "dynamic:16777216"]), "seed": (0.3, [0, 2**64 - 1, 12345]), "lr": (0.2, [0.1, 1e-9]),
    "warmup-steps": (0.7, [0, 1, 3]), "steps-per-epoch": (0.2, [1, 3, 7]), "profile": (0.1, [True]), "tensorboard": (0.1, [True]),
    "log-every": (0.1, [1, 3]), "verbose": (0.2, [True]), "pin-cores": (0.1, [True]), "load-ahead": (0.1, [0, 3]),
    "save-sync": (0.1, [True]), "save-budget-mb": (0.05, [16]), "sync-blocks": (0.02, [2]), "no-sync": (0.03, [False]),
    "find-unused-parameters": (0.05, [True]), "device": (0.1, ["sim", "sim:late,seed=7", "sim:copy=16gbit,10us,launch=5us"])}
OF_MODEL: dict[str, dict[str, tuple[float, list[object]]]] = {
    "cnn": {"channels": (1, [[4], [4, 8], [3, 5]]), "hidden": (1, [8, 16]), "samples": (1, [64, 150, 333]), "layout": (0.1, ["nchw"]),
            "batch-norm": (0.4, [True]), "freeze": (0.1, [["conv0"], ["fc0"]]), "fuse": (0.1, ["false"]), "rank-samples": (0.03, [[9, 20]])},
    "mlp": {"input-dim": (1, [7, 16, 64]), "hidden-dim": (1, [16, 33]), "output-dim": (1, [2, 5, 17]), "num-layers": (1, [0, 1, 3, 6]),
            "tie-layers": (0.1, [True])},
    "llama": {"layers": (1, [1, 2, 3, 5]), "width": (1, [32]), "heads": (1, [1, 2, 4]), "intermediate": (1, [32, 48]),
              "kv-heads": (0.2, [1]), "tie-embeddings": (0.3, [True]), "checkpoint-activations": (0.1, [True]),
              "precision": (0.15, ["bf16"])}}
BUCKETS: dict[str, tuple[float, list[object]]] = {"bucket-cap-mb": (0.4, [0.0001, 0.001, 1])}
SHARDS: dict[str, tuple[float, list[object]]] = {"accumulate-in": (0.3, ["whole", "shards"])}
OF_STRATEGY = {
    "ddp": {**BUCKETS, "first-bucket-mb": (0.3, [0.0001, 1]), "no-gradient-view": (0.3, [True])}, "bucket_ddp_async": BUCKETS,
    "top_k": {**BUCKETS, "top-k": (0.5, [0.01, 0.3, 1])}, "fp16": BUCKETS, "zero2": SHARDS, "zero3": SHARDS, "sharded2": SHARDS,
    "local_sgd": {"sync-every": (0.5, [1, 2, 4])},
    "sharded3": {**SHARDS, "prefetch": (0.3, [0, 1, 4]), "keep-after-forward": (0.3, [0, 2])}}
TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "good": 1, "bad": 2, "film": 3}, "unk_token": "[UNK]"}}


def pick(chance: random.Random, of: dict[str, tuple[float, list[object]]]) -> Flags:
    return {key: chance.choice(values) for key, (likely, values) in of.items() if chance.random() < likely}


def write_texts(folder: Path, texts: list[str]) -> None:
    folder.mkdir()
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text, "label": at % 2}) + "\n" for at, text in enumerate(texts)))


def draw_model(attack: Attack) -> Flags:
    """The flags of a model and its data. Texts have unequal lengths."""
    chance = attack.chance
    model = chance.choice(["cnn", "mlp", "llama", "llama"])
    flags: Flags = {"model": model, "batch-size": chance.randint(1, 5)} | pick(chance, OF_MODEL[model])
    if "batch-norm" in flags and chance.random() < 0.5:
        flags["sync-batch-norm"] = True
    if chance.random() < 0.06:
        flags |= {"precision": "fp16", "emulate-fp16": True}
    if model != "llama":
        return flags
    data = chance.choice(["tokens", "texts", "running", "reviews"])
    if data == "tokens":
        return flags | {"vocab": 64, "seq-len": chance.choice([1, 7, 16])}
    if data == "reviews":
        return flags | {"data": "reviews", "num-labels": 2, "vocab": 1024}
    lengths = [chance.choice([1, 2, 5, 30]) for _ in range(chance.randint(20, 60))]
    texts = [" ".join(chance.choice(["good", "bad", "film", "né", "日本"]) for _ in range(length)) for length in lengths]
    write_texts(attack.folder / "texts", texts)
    (attack.folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    if data == "running":
        return flags | {"data": "text", "data-dir": "texts", "tokenizer": "bytes", "vocab": 256, "test-samples": 5, "seq-len": chance.choice([7, 16])}
    return flags | {"data": "text", "data-dir": "texts", "tokenizer": "tokenizer.json", "vocab": 8, "num-labels": 2,
                    "max-length": chance.choice([4, 16])} | pick(chance, {"group-by-length": (0.3, [True])})


def draw(attack: Attack, least_ranks: int = 1) -> Flags:
    """The flags of a run. Of what would be refused, most is left out."""
    chance = attack.chance
    ranks = max(least_ranks, chance.choice([1, 2, 2, 3, 4, 4]))
    flags = draw_model(attack) | {"nproc": ranks, "steps": chance.randint(4, 12)} | pick(chance, ANY)
    if (flags["model"] == "mlp" or "seq-len" in flags and flags.get("data") != "text") and chance.random() < 0.95:
        flags = {key: value for key, value in flags.items() if key not in ("eval-every", "evaluate")}
    if "device" in flags:
        flags |= pick(chance, {key: (0.3, [True]) for key in ("pin-memory", "non-blocking", "copy-stream", "generate-on-host")})
    if ranks > 1:
        strategy = flags["strategy"] = chance.choice(EXACT if chance.random() < 0.75 else ["top_k", "fp16", "bf16", "local_sgd", "no_sync"])
        flags |= pick(chance, OF_STRATEGY.get(str(strategy), {}))
        if chance.random() < 0.45:
            is_even = str(strategy).startswith("sharded")
            shape = chance.choice(["pp={0}", "pp={1},dp={2}", "dp={2},pp={1}"]
                                  + ["dp={1},shard={2}", "shard={0}", "pp={1},shard={2}", "shard={2},dp={1}"] * is_even)
            half = 2 if ranks == 4 else ranks
            flags["mesh"] = shape.format(ranks, half, ranks // half)
            if "pp" in shape:
                flags |= {"accumulate": chance.randint(1, 9)} | pick(chance, {"schedule": (0.7, list(SCHEDULES)), "head-at-once": (0.1, [True])})
    if "profile" in flags:
        flags |= {"profile-wait": 1, "profile-warmup": 0, "profile-active": 2}
    if "eval-every" in flags:
        flags |= pick(chance, {"early-stop": (0.4, [1, 2, 3]), "save-best": (0.4, [True])})
    return flags


def num_stages(flags: Flags) -> int:
    return int(next(iter(re.findall(r"pp=(\d+)", str(flags.get("mesh")))), 1))


def combinations(attack: Attack) -> str:
    """A combination is refused as a whole, or trains; then it goes on, compares, evaluates and exports as it should."""
    flags = draw(attack)
    saves, before = flags.get("strategy") != "no_sync", tree(attack.root)
    if not saves:
        flags = {key: value for key, value in flags.items() if not key.startswith("save")}
    saving: Flags = {"save": "full", "save-every": attack.chance.randint(1, 4), "save-keep": 100} if saves else {}
    full = attack.run("train", *words(flags | saving | {"name": "full", "json": "full.json"}))
    if full[0] == 2:
        attack.refused(full, before)
        return "refused"
    if full[0] == 1 and re.search("not finite|cannot emulate a link|in a row overflowed", full[1]):
        return "ended"
    if not attack.expect(full, {0}, "train"):
        return "failed"
    summary = json.loads((attack.folder / "full.json").read_text())
    check_summary(attack, full, flags, summary)
    check_exactness(attack, full, flags)
    lines = [["show", "runs/full"], ["compare", "runs/full"]]
    if "profile" in flags:
        lines.append(["analyze", f"profile/{flags.get('strategy', 'single')}"])
    if saves:
        check_resumption(attack, full, flags | saving)
        lines += [["checkpoint", "show", "full"], ["checkpoint", "verify", "full"], ["checkpoint", "export", "full", "--to", "w.safetensors"]]
        exported = attack.run("checkpoint", "export", "full", "--hugging-face", "--to", "folder")
        attack.expect(exported, {0} if flags["model"] == "llama" else {2}, "export --hugging-face")
        evaluated = attack.run("evaluate", "--checkpoint", "full", "--json", "evaluated.json")
        if "no test part" not in evaluated[1] and attack.expect(evaluated, {0}, "evaluate") and summary["eval_loss"] is not None:
            loss = json.loads((attack.folder / "evaluated.json").read_text())["loss"]
            if abs(loss - summary["eval_loss"]) > 1e-4 * abs(loss) + 1e-6:
                attack.found(f"evaluate: a loss of {loss}, after training {summary['eval_loss']}")
    for line in lines:
        attack.expect(attack.run(*line), {0}, " ".join(line[:2]))
    return "trained"


def check_summary(attack: Attack, full: Ran, flags: Flags, summary: Record) -> None:
    """The figures of a run agree with each other, and none is negative."""
    lines = [json.loads(line) for line in (attack.folder / "runs/full/metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if "step_ms" in line][int(str(flags.get("warmup-steps", 5))):]
    if summary["weights_sha256"] != digest(full) or summary["steps"] != len(measured):
        attack.found(f"summary.json has {summary['steps']} measured steps and metrics.jsonl {len(measured)}, or digests differ")
    for key, value in summary.items():
        if isinstance(value, float) and (not math.isfinite(value) or value < -1e-6 and not key.startswith("bubble")):
            attack.found(f"{key} is {value} in summary.json")
    for line in re.findall(r".*(?<![\w.)])-\d[\d.,]* (?:ms|s|MB|samples)\b.*", full[1]):
        if "predicted" not in line:
            attack.found(f"a negative quantity: {line[:120]}")
    if not measured or flags.get("strategy") in ("local_sgd", "no_sync"):
        return
    of_all = summary["samples_per_s"] * summary["wall_ms"] * summary["steps"] / 1e3 / sum(line["samples"] for line in measured)
    if not 0.2 < of_all < 1.01:
        attack.found(f"samples/s times the time of all steps is {of_all:.2f} of the samples")
    if flags["model"] == "llama":
        tokens, length = (summary["tokens_per_s"] or 0) / summary["samples_per_s"], flags.get("seq-len", flags.get("max-length", 64))
        if not (abs(tokens - length) < 1e-6 * length if "seq-len" in flags else 1 <= tokens <= length):
            attack.found(f"{tokens:.3f} tokens in a sample of {length}{'' if num_stages(flags) == 1 else ', in stages'}")


def check_resumption(attack: Attack, full: Ran, flags: Flags) -> None:
    """A run that goes on from any checkpoint, with or without its flags, ends with the same weights."""
    saved = sorted(path.name for path in (attack.folder / "full").glob("step-*"))
    if "sync-blocks" in flags or len(saved) < 2:
        return
    again = attack.chance.choice([{key: value for key, value in flags.items() if not key.startswith("profile")}, {"threads": flags.get("threads", 1), "save-every": flags["save-every"]}])
    ran = attack.run("train", *words(again | {"resume": f"full/{attack.chance.choice(saved[:-1])}", "save": "again", "name": "again"}))
    how = f"{'' if 'model' in again else ' without flags'}{' in stages' if num_stages(flags) > 1 else ''}"
    if attack.expect(ran, {0}, f"train --resume{how}") and digest(ran) != digest(full):
        attack.found(f"--resume{how} ends with other weights: {flags.get('strategy')}")


def check_exactness(attack: Attack, full: Ran, flags: Flags) -> None:
    """An exact strategy ends with the bits of ddp, or of one rank where all others are stages."""
    strategy, shares = flags.get("strategy", "single"), int(str(flags["nproc"])) // num_stages(flags)
    shard = re.search(r"dp=(\d+),shard=(\d+)|shard=.*dp=", str(flags.get("mesh", "")))
    if (strategy not in [*EXACT, "single"] or "sync-blocks" in flags or "no-sync" in flags or flags.get("accumulate-in") == "shards"
            or shard and shard[0].startswith("shard") or shard and shard[1] != "1" and shard[2] == "3"
            or num_stages(flags) > 1 and ("tie-embeddings" in flags or "tie-layers" in flags)
            or flags.get("schedule") == "looped_bfs" and flags.get("accumulation-order") != "tree"):
        return
    same = {key: value for key, value in flags.items() if key not in NEUTRAL} | {"nproc": shares, "run-dir": "reference", "warmup-steps": 0}
    if strategy == "simple_ddp_ga":
        same["accumulate"] = flags.get("accumulate", 4)
    if "device" in flags and "generate-on-host" not in flags:
        same["device"] = "sim"
    ran = attack.run("train", *words({key: value for key, value in same.items() if key != "generate-on-host"}))
    if attack.expect(ran, {0}, "the run with ddp") and digest(ran) != digest(full):
        attack.found(f"{strategy} {flags.get('mesh', '')} {flags.get('device', '')} has other bits than ddp: {flags['model']}")


def kills(attack: Attack) -> str:
    """The right rank is named, nothing is left, and a run that goes on ends like one that was not disturbed."""
    chance = attack.chance
    flags = draw(attack, least_ranks=2) | {"steps": chance.choice([60, 120]), "link": "1gbit,500us", "timeout": 2, "lr": 0.001}
    if flags.get("transport") == "thread" or flags.get("strategy") == "no_sync":
        flags |= {"transport": "shm", "strategy": "ddp", "mesh": f"dp={flags['nproc']}"}
    flags = {key: value for key, value in flags.items() if not re.match("profile|sync-blocks|verbose|schedule|head", key)}
    flags["save-every"] = chance.choice([3, 7, 20])
    begin = time.monotonic()
    full = attack.run("train", *words(flags | {"save": "full"}))
    took_s = time.monotonic() - begin
    if full[0] != 0:
        return "refused" if full[0] == 2 else "failed"
    restarts = chance.random() < 0.4
    line = words(flags | {"save": "saved"} | ({"max-restarts": 3} if restarts else {"resume": "auto"}))
    for number in range(4):
        order = chance.choice(["SIGKILL", "SIGSTOP", *["SIGTERM", "SIGKILL"][restarts:]]) if number < 3 else None
        ran = killed(attack, line, int(str(flags["nproc"])), order, took_s)
        if ran[0] in (0, "hangs") or restarts:
            break
    if ran[0] != 0:
        attack.found(f"{'with restarts' if restarts else 'resumed'}, a run ends with {ran[0]}: {error(ran[1])}")
        return "killed"
    attack.expect(attack.run("checkpoint", "verify", "saved"), {0}, "checkpoint verify")
    stray = [name for name in os.listdir(attack.folder / "saved") if not re.match(r"step-\d{9}$|latest$|good$|best$|checkpoint.lock$", name)]
    if stray:
        attack.found(f"the folder of checkpoints is left with {', '.join(stray)}")
    ends = [(attack.folder / name / "latest").read_text() for name in ("full", "saved")]
    if digest(ran) != digest(full) or ends[0] != ends[1]:
        attack.found(f"{'with restarts' if restarts else 'resumed'}: {'other weights' if ends[0] == ends[1] else 'ends at another step'}"
                     f"{', early stop' if 'early-stop' in flags else ''}")
    return "killed"


def killed(attack: Attack, line: list[str], count: int, order: str | None, took_s: float) -> Ran:
    """Starts a run, sends a signal to a rank or kills the launcher, and judges who is blamed."""
    chance, path = attack.chance, attack.folder / "output.txt"
    restarts = "--max-restarts" in line
    victim, pause_s = chance.randrange(count + (order == "SIGKILL" and not restarts)), chance.uniform(0, took_s)
    with path.open("w") as output:
        process = attack.start(["train", *line], stdout=output, stderr=subprocess.STDOUT)
    deadline, ranks = time.monotonic() + LIMIT_S, {}
    while len(ranks) != count and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.001)
        ranks = ranks_of(process.pid)
    if not ranks and process.poll() is None:
        attack.found("no ranks seen")
    time.sleep(pause_s)
    if order and (process.poll() is not None or not ranks):
        order = None
    if order:
        attack.commands.append(f"# {order} to {'the launcher' if victim == count else f'rank {victim}'} after {pause_s:.2f} s")
        try:
            os.kill(ranks.get(victim, process.pid), signal.Signals[order])
        except ProcessLookupError:
            order = None
    try:
        code: int | str = process.wait(took_s + 2 * GRACE_S + (LIMIT_S if restarts or not order else 0))
    except subprocess.TimeoutExpired:
        code = "hangs"
        kill_with(attack.token)
        process.wait()
    text = path.read_text(errors="replace")
    if order and victim == count:
        attack.output = text[-4000:]
        if not attack.end_of_all():
            attack.found("ranks live on without their launcher")
        return 137, text
    ran, blamed = attack.judged(code, text), NAMED.findall(text)
    if order and any(rank != str(victim) for rank, _ in blamed):
        attack.found(f"{order} to a rank: not the rank is blamed: {'; '.join(f'rank {rank} {how}' for rank, how in blamed)}")
    if order in ("SIGKILL", "SIGSTOP") and code != 0 and not blamed:
        attack.found(f"{order} to a rank: nobody is blamed")
    return ran
