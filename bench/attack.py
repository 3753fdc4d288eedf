"""Attacks drawn at random: features in combination, kills, and what strangers hand over, judged without expected output.

    cargo build --release
    python3 bench/attack.py --minutes 60 --seed 1                   # all kinds in turn
    python3 bench/attack.py --seed 17 --kind kills --times 1        # one attack again

An attack follows from its kind and seed (but for the moments of signals) and runs in a folder of its own. These hold for all:
nothing panics, hangs or ends by a signal, no process is left, nothing outside of the folder changes, and no control character
is printed. The function of each of the `KINDS` says what else must hold.

Prints a finding when its shape (its message without numbers) first appears. `results/attack.json` has up to three of each
shape. The exit code is 1 if there are findings. Only the standard library is needed.
"""
import argparse
import csv
import gzip
import hashlib
import json
import math
import os
import random
import re
import resource
import secrets
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from common import Record, program, provenance
from faults import wait_for_ranks
from kill_ranks import processes_of

LIMIT_S, LIMIT_BYTES = 60.0, 8 << 30
# How long ranks may take to end after their launcher, and a launcher after a rank has died, on a busy machine.
GRACE_S = 8.0
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
ERROR = re.compile(r"^(?:\[rank \d+\] )?error: .*", re.MULTILINE)
BLAMED = re.compile(r"^paceline: rank (\d+) \(process \d+\) (.*?) after", re.MULTILINE)
Flags = dict[str, object]
# The exit code of a command, or "hangs"; and all that it printed.
Ran = tuple[int | str, str]


def words(flags: Flags) -> list[str]:
    lists = ((key, value if isinstance(value, list) else [value]) for key, value in flags.items())
    return [word for key, values in lists for word in (
        [f"--{key}" if values[0] else f"--{key}=false"] if isinstance(values[0], bool) else [f"--{key}", *map(str, values)])]


def error(text: str) -> str:
    return next(iter(ERROR.findall(text)), " | ".join(text.strip().splitlines()[-2:]))[:300]


def digest(ran: Ran) -> str:
    return next(iter(re.findall(r"^Weights: sha256 (\w+)", ran[1], re.MULTILINE)), "none")


def tree(folder: Path) -> dict[str, object]:
    """All that lies there, without the cache of tokens: kind and mode, and the contents or the target."""
    def what(path: Path, mode: int) -> str:
        is_file = stat.S_ISREG(mode)
        return os.readlink(path) if stat.S_ISLNK(mode) else hashlib.sha256(path.read_bytes()).hexdigest() if is_file else ""

    paths = [path for path in folder.rglob("*") if "tokens" not in path.parts]
    return {str(path.relative_to(folder)): (mode := path.lstat().st_mode, what(path, mode)) for path in sorted(paths)}


def differ(before: dict[str, object], after: dict[str, object]) -> str:
    return ", ".join(sorted({key for key, _ in before.items() ^ after.items()})[:5])


class Attack:
    """A program in a fresh folder, what it was asked to do, and what went wrong."""

    def __init__(self, binary: Path, kind: str, seed: int) -> None:
        self.binary, self.kind, self.seed = binary, kind, seed
        self.chance = random.Random(f"{kind} {seed}")
        self.root = Path(tempfile.mkdtemp(prefix=f"attack_{kind}_{seed}_"))
        self.folder, self.outside = self.root / "work", self.root / "outside"
        for folder in (self.folder, self.outside / "folder", self.root / "home", self.root / "tmp"):
            folder.mkdir(parents=True)
        (self.outside / "precious").write_text("precious\n")
        (self.outside / "folder" / "kept").write_text("kept\n")
        self.before = tree(self.outside)
        self.token = f"attack-{secrets.token_hex(8)}"
        self.environment = {
            "PATH": os.environ["PATH"], "HOME": str(self.root / "home"), "TMPDIR": str(self.root / "tmp"),
            "HF_HUB_OFFLINE": "1", "ATTACK": self.token, "PYTHONUTF8": "1", "LANG": "C.UTF-8"}
        self.commands: list[str] = []
        self.findings: list[Record] = []
        # The last output, and what belongs into every message.
        self.output = self.note = ""

    def start(self, line: list[object], **streams: object) -> subprocess.Popen:
        line = [str(word) for word in line]
        self.commands.append(shlex.join(["paceline", *line])[:2000])
        limits = f"import os,resource,sys; r=resource.setrlimit; r(9,({LIMIT_BYTES},)*2); r(4,(0,0)); os.execv(sys.argv[1],sys.argv[1:])"
        assert (resource.RLIMIT_AS, resource.RLIMIT_CORE) == (9, 4)
        return subprocess.Popen([sys.executable, "-ISc", limits, self.binary, *line], cwd=self.folder, env=self.environment,
                                start_new_session=True, **{"stdin": subprocess.DEVNULL, **streams})

    def run(self, *line: object) -> Ran:
        process = self.start(list(line), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        code: int | str = "hangs"
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
            code = process.returncode
        except subprocess.TimeoutExpired:
            self.kill_all()
            output, _ = process.communicate()
        return self.judged(code, output.decode(errors="replace"))

    def judged(self, code: int | str, text: str) -> Ran:
        """Judges an output by what holds for every command."""
        self.output = text[-4000:]
        command = re.split(" --| # ", self.commands[-1])[0][:50]
        if code == "hangs":
            self.found(f"{command} hangs")
        if "panicked at" in text or code == 101:
            self.found(f"{command} panics: {''.join(re.findall('panicked at .*', text))[:200]}")
        if isinstance(code, int) and code < 0:
            self.found(f"{command} is killed by signal {-code}")
        if control := CONTROL.search(text):
            self.found(f"{command} prints the control character {control[0]!r}")
        return code, text

    def found(self, what: str) -> None:
        what = f"{what}{self.note}"
        shape = re.sub(r"[0-9a-f]{16,}|[\d.]+", "N", f"{self.kind}: {what}")[:160]
        if all(finding["shape"] != shape for finding in self.findings):
            self.findings.append({"kind": self.kind, "seed": self.seed, "shape": shape, "what": what, "commands": self.commands[-8:],
                                  "output": self.output})

    def expect(self, ran: Ran, codes: set[int], what: str) -> bool:
        if ran[0] not in {*codes, "hangs"}:
            self.found(f"{what} ends with {ran[0]}: {error(ran[1])}")
        return ran[0] in codes

    def refused(self, ran: Ran, before: dict[str, object], name: str = "--") -> None:
        """A refusal is one message, which names a flag, and changes nothing."""
        if (count := len(ERROR.findall(ran[1]))) != 1:
            self.found(f"{count} messages of a refusal: {error(ran[1])}")
        elif name not in ran[1]:
            self.found(f"a refusal that does not name {name}: {error(ran[1])}")
        if changed := differ(before, tree(self.root)):
            self.found(f"refused ({error(ran[1])[:60]}), but changed {changed}")

    def kill_all(self) -> None:
        for process in processes_of(self.token):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def end_of_all(self) -> bool:
        deadline = time.monotonic() + GRACE_S
        while (left := processes_of(self.token)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return not left

    def end(self) -> None:
        if not self.end_of_all():
            lines = [Path(f"/proc/{process}/cmdline") for process in processes_of(self.token)]
            names = {line.read_bytes().replace(b"\0", b" ").decode(errors="replace")[:60] for line in lines if line.exists()}
            self.found(f"processes are left: {', '.join(sorted(names))}")
            self.kill_all()
        if changed := differ(self.before, tree(self.outside)):
            self.found(f"changed outside of its folder: {changed}")


# Combinations of features.
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
    "local_sgd": {"sync-every": (0.5, [1, 2, 4]), "local-sgd-as-published": (0.1, [True])},
    "sharded3": {**SHARDS, "prefetch": (0.3, [0, 1, 4]), "keep-after-forward": (0.3, [0, 2])}}
TRUNCATION = {"max_length": 6, "strategy": "LongestFirst", "stride": 0}
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
    if full[0] == 1 and ("not finite" in full[1] or "cannot emulate a link" in full[1]):
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
        check_resumption(attack, full, flags)
        lines += [["checkpoint", "show", "full"], ["checkpoint", "verify", "full"], ["checkpoint", "export", "full", "--to", "w.safetensors"]]
        exported = attack.run("checkpoint", "export", "full", "--hugging-face", "--to", "folder")
        attack.expect(exported, {0} if flags["model"] == "llama" else {2}, "export --hugging-face")
        evaluated = attack.run("evaluate", "--checkpoint", "full", "--json", "evaluated.json")
        if not ("no test part" in evaluated[1] or "local-sgd-as-published" in flags) and attack.expect(evaluated, {0}, "evaluate") and summary["eval_loss"] is not None:
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
    if {"early-stop", "sync-blocks", "local-sgd-as-published"} & flags.keys() or len(saved) < 2:
        return
    again = attack.chance.choice([{key: value for key, value in flags.items() if not key.startswith("profile")}, {"threads": flags.get("threads", 1)}])
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
    flags = {key: value for key, value in flags.items() if not re.match("profile|sync-blocks|verbose|local-sgd-as|schedule|head", key)}
    flags["save-every"] = chance.choice([3, 7, 20])
    begin = time.monotonic()
    full = attack.run("train", *words(flags | {"save": "full"}))
    took_s = time.monotonic() - begin
    if full[0] != 0:
        return "refused" if full[0] == 2 else "failed"
    # Evaluations without a lower loss are counted from --resume on, so only restarts must end at the same step.
    restarts = "early-stop" in flags or chance.random() < 0.4
    line = words(flags | {"save": "saved"} | ({"max-restarts": 3} if restarts else {"resume": "auto"}))
    for number in range(4):
        order = chance.choice(["SIGKILL", "SIGSTOP", *["SIGTERM", "SIGKILL"][restarts:]]) if number < 3 else None
        ran = killed(attack, line, int(str(flags["nproc"])), order, took_s)
        if ran[0] in (0, "hangs") or restarts:
            break
    if ran[0] != 0:
        attack.found(f"{'with restarts' if restarts else 'resumed'}, a run ends with {ran[0]}: {error(ran[1])}")
        return "killed"
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
    ranks = wait_for_ranks(process, count)
    time.sleep(pause_s)
    if order and (process.poll() is not None or not ranks):
        order = None
    if order:
        attack.commands.append(f"# {order} to {'the launcher' if victim == count else f'rank {victim}'} after {pause_s:.2f} s")
        os.kill(ranks.get(victim, process.pid), signal.Signals[order])
    try:
        code: int | str = process.wait(took_s + 2 * GRACE_S + (LIMIT_S if restarts or not order else 0))
    except subprocess.TimeoutExpired:
        code = "hangs"
        attack.kill_all()
        process.wait()
    text = path.read_text(errors="replace")
    if order and victim == count:
        attack.output = text[-4000:]
        if not attack.end_of_all():
            attack.found("ranks live on without their launcher")
        return 137, text
    ran, blamed = attack.judged(code, text), BLAMED.findall(text)
    if order and any(rank != str(victim) for rank, _ in blamed):
        attack.found(f"{order} to a rank: not the rank is blamed: {'; '.join(f'rank {rank} {how}' for rank, how in blamed)}")
    if order in ("SIGKILL", "SIGSTOP") and code != 0 and not blamed:
        attack.found(f"{order} to a rank: nobody is blamed")
    return ran


def strangers(attack: Attack) -> str:
    """Flags of a checkpoint that runs do not record are refused by name; a damaged checkpoint breaks nothing; an old one is kept."""
    chance, folder = attack.chance, attack.folder
    flags = draw_model(attack) | {"nproc": chance.choice([1, 2]), "steps": 6, "lr": 0.001, "save": "ck", "save-every": 2, "save-keep": 9}
    if attack.run("train", *words(flags | ({"eval-every": 3, "save-best": True} if flags["model"] == "cnn" else {})))[0] != 0:
        return "refused"
    (folder / "ck/notes.txt").write_text("mine\n")
    newest = sorted(folder.glob("ck/step-*"))[-1]
    lines: list[list[str]] = [
        ["train", "--resume", "ck"], ["train", "--resume", "auto", "--save", "ck"], ["train", "--resume", f"ck/{newest.name}"],
        ["evaluate", "--checkpoint", "ck"], ["evaluate", "--checkpoint", "ck/best"], ["checkpoint", "verify", "ck"], ["checkpoint", "show", "ck"],
        ["checkpoint", "export", "ck", "--to", "a"], ["checkpoint", "export", "ck", "--hugging-face", "--to", "b"],
        ["generate", "--model", "ck", "--prompt", "a"]]
    what = chance.choice(["flags", "flags", "damaged", "damaged", "older"])
    name = ""
    if what == "flags":
        name = foreign_flag(attack, newest)
        lines = lines[:4] * 3 + lines[6:]
    elif what == "damaged":
        files = [path for path in (folder / "ck").rglob("*") if path.is_file() and path.name != "notes.txt"]
        for path in chance.sample(files, chance.choice([1, 1, 2])):
            damage(attack, path)
    else:
        other = ["--model", "mlp", "--input-dim", 8, "--hidden-dim", 8, "--output-dim", 2, "--num-layers", 1, "--steps", chance.choice([1, 3, 12])]
        before = set(os.listdir(folder / "ck"))
        ran = attack.run("train", *other, "--save", "ck", "--save-every", 1)
        attack.expect(ran, {0, 2}, "a run with the folder of another one")
        if before - set(os.listdir(folder / "ck")):
            attack.found(f"--save deletes checkpoints of another run, {'with' if 'warning: --save' in ran[1] else 'without'} a word")
        return what
    for line in chance.sample(lines, 1 if name else 2):
        before_all = tree(attack.root)
        ran = attack.run(*line, *(["--steps", "8"] if line[0] == "train" else []))
        if name and line[0] in ("train", "evaluate"):
            if attack.expect(ran, {2}, f"{line[0]} with a stranger's --{name}"):
                attack.refused(ran, before_all, name)
        elif attack.expect(ran, {0, 1, 2}, line[0]) and ran[0] == 2:
            attack.refused(ran, before_all, "")
    return what


def sign(path: Path, index: Record) -> None:
    def text(of: Record) -> str:
        return json.dumps(of, separators=(",", ":"), ensure_ascii=False)

    path.write_text(text({"sha256": hashlib.sha256(text(index).encode()).hexdigest(), "index": index}))


def foreign_flag(attack: Attack, newest: Path) -> str:
    """Adds a flag to those that a checkpoint records. Returns its name if runs do not record it."""
    chance, group = attack.chance, ""
    known: dict[str, tuple[str, str]] = {}
    for line in attack.run("train", "--help-all")[1].splitlines():
        if found := re.match(r"([A-Z][a-z ]+):$", line):
            group = found[1]
        elif (found := re.match(r" +(?:-\w, )?--([a-z0-9-]+)[^<]*<?(\w*)", line)) and group != "Options":
            known[found[1]] = (group, found[2])
    recorded = {name for name, (group, _) in known.items() if group in ("Model", "Strategy", "Training", "Data")}
    recorded = recorded - {"download", "mirror", "token-cache", "warmup-steps"} | {"mesh", "schedule", "stages", "precision", "emulate-fp16"}
    name = chance.choice(sorted(set(known) - recorded if chance.random() < 0.7 else recorded - {"decode-us"}))
    paths = ["../outside/precious", "../outside/folder", "../outside/made", "/dev/zero", "made", "auto"]
    values = {"DIR": paths, "FILE": paths, "URL": paths, "BOOL": [True], "N": [1, 2, 0, -1]}.get(known[name][1], [*paths, 1, True, "\x1b[31m"])
    value = chance.choice(values)
    index = json.loads((newest / "index.json").read_text())["index"]
    index["run"]["flags"] = json.dumps(json.loads(index["run"]["flags"]) | {name: value})
    sign(newest / "index.json", index)
    attack.commands.append(f"# run.flags of {newest.name}/index.json gets {name}: {value!r}, and the index is signed again")
    return "" if name in recorded else name


def mutate(chance: random.Random, data: bytes) -> bytes:
    """Cut, changed, repeated, or with another number."""
    how, at = chance.randrange(6), chance.randrange(len(data) + 1)
    numbers = list(re.finditer(rb"-?\d[\d.]*", data)) if how > 2 else []
    if numbers:
        odd = [b"0", b"-1", b"18446744073709551615", b"99999999999999", b"1e400", b"null", b'"x"', b"[]"]
        number = chance.choice(numbers)
        return data[:number.start()] + chance.choice(odd) + data[number.end():]
    changed = data[:at] + chance.randbytes(chance.choice([1, 4, 100])) + data[at + chance.choice([0, 1, 4]):]
    return [data[:at], data + data[at:], changed][how % 3]


def damage(attack: Attack, path: Path) -> None:
    """Changes a file of a checkpoint, or replaces it by something else. Some changed indexes are signed again."""
    chance = attack.chance
    how = chance.choice([*["mutated"] * 6, "gone", "fifo", "folder", "link", "empty"])
    attack.commands.append(f"# {path.relative_to(attack.folder)}: {how}")
    data = path.read_bytes()
    path.unlink()
    if how == "mutated" and path.name == "index.json" and chance.random() < 0.6:
        try:
            sign(path, json.loads(mutate(chance, json.dumps(json.loads(data)["index"]).encode())))
            return
        except ValueError:
            pass
    if how == "fifo":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "link":
        path.symlink_to(attack.outside / chance.choice(["precious", "folder", "made"]))
    elif how != "gone":
        path.write_bytes(mutate(chance, data) if how == "mutated" else b"")


# Commands that write, in a folder with texts, and a run with traces and a checkpoint in `have`.
STEP = "--model mlp --input-dim 8 --hidden-dim 8 --output-dim 2 --num-layers 1 --batch-size 2"
PROFILE = "--nproc 2 --steps 6 --steps-per-epoch 9 --profile --profile-wait 1 --profile-warmup 0 --profile-active 4"
WRITERS = [
    f"train {STEP} {PROFILE} --save ck --save-every 2 --json s.json --name run --tensorboard",
    "train --channels 4 --hidden 8 --samples 64 --steps 4 --nproc 2 --batch-size 4 --save ck --name run --eval-every 1 --save-best",
    "train --model llama --layers 1 --width 32 --heads 2 --intermediate 32 --vocab 256 --steps 2 --data text --data-dir texts "
    "--tokenizer bytes --seq-len 16 --name run --batch-size 2 --nproc 1", f"train {STEP} --ddp-choice all --steps 6 --name all",
    "launch -n 2 --log-dir logs -- echo text", "launch -n 2 --max-restarts 1 --log-dir logs --tee -- false",
    "checkpoint export have/ck --to out/w.safetensors", "checkpoint export have/ck --to out/w.safetensors --force",
    "analyze have/profile/ddp", "analyze have/profile/ddp --output report", "analyze diff have/profile/ddp have/profile/ddp --output diff",
    "trace merge have/profile/ddp -o m.json.gz", "trace merge have/profile/ddp -o m.json.gz --force", "compare have/runs/run --json c.json --output compared",
    "schedule zbv --csv plan.csv", "tokenizer train --data-dir texts --vocab 300 --to t.json --force", "new project",
    f"sweep --vary lr=0.1,0.2 --rounds 1 --output swept --steps 6 {STEP}", "bench all_reduce -b 4K -e 8K -f 2 --json b.json",
    f"bench scaling --nproc 1,2 --rounds 1 --charts charts --output o --steps-per-epoch 7 --epochs 1 {STEP}",
    "predict --gradient-bytes 1e6 --compute-ms 5 --nproc 2,4 --charts charts"]


def planted(attack: Attack) -> str:
    """A link, a FIFO or a folder lies where a command writes: what is linked stays, nothing waits, and success means written."""
    chance, folder = attack.chance, attack.folder
    line = chance.choice(WRITERS).split()
    (folder / "out").mkdir()
    write_texts(folder / "texts", ["the good film and the bad film"] * 40)
    if "have/" in " ".join(line):
        attack.run("train", *f"{STEP} {PROFILE} --save have/ck --run-dir have/runs --name run --profile-dir have/profile".split())
    shutil.copytree(folder, attack.root / "clean")
    before = tree(folder)
    clean = attack.run(*line)
    made = [name for name in tree(folder) if name not in before and not re.search(r"20\d{6}-", name)]
    if not attack.expect(clean, {0, 1}, line[0]) or not made:
        return "refused"
    name = chance.choice(made)
    path, is_folder = folder / name, (folder / name).is_dir()
    shutil.rmtree(folder)
    (attack.root / "clean").rename(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Users may well link a folder that they name elsewhere, but not one within a checkpoint.
    links = {"link to a file": "precious", "link to nowhere": "made"} | ({"link to a folder": "folder"} if "step-" in name else {})
    how = chance.choice([*links, "fifo", *([] if is_folder else ["folder"])])
    attack.commands.append(f"# {name}: {how}")
    attack.note = f" ({line[0]} {line[1]}, with a {how} at {name})"
    if how == "fifo":
        os.mkfifo(path)
    elif how == "folder":
        (path / "inner").mkdir(parents=True)
    else:
        path.symlink_to(attack.outside / links[how])
    ran = attack.run(*line)
    attack.expect(ran, {0, 1, 2, 3}, "it")
    now = stat.S_IFMT(path.lstat().st_mode) if os.path.lexists(path) else 0
    if ran[0] == clean[0] == 0 and now != (stat.S_IFDIR if is_folder else stat.S_IFREG) and not re.search("warning|could not|cannot|runs/(run|all)-2", ran[1]):
        attack.found("success, but nothing is written")
    return how


# What each rank runs: it prints, starts a child that may keep the streams (1), leave the session (2), ignore SIGTERM (4), and ends or stays.
PROGRAM = r"""
import os, signal, subprocess, sys, time
lines, length, errors, child, stays, code = map(int, sys.argv[1:])
for at in range(lines):
    sys.stdout.write(f"{at:07d} " + "\u00e9" * length + "\n")
sys.stdout.flush()
for at in range(errors):
    sys.stderr.write(f"e{at:07d}\n")
if child:
    streams = {} if child & 1 else {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = "trap '' TERM; sleep 1000; sleep 1000" if child & 4 else "sleep 1000"
    subprocess.Popen(["sh", "-c", command], start_new_session=bool(child & 2), **streams)
if stays == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if stays == 1 or stays == 2 and os.environ["RANK"] != "0":
    time.sleep(1000)
sys.exit(code)
"""
READERS = {"all": "cat", "gzip": "gzip -9 | gunzip", "slow": "while dd bs=65536 count=1 2>&3 | grep -q . ; do sleep 0.01; done; cat",
           "late": "sleep 2; cat", "head": "head -1"}
READERS["slow"] = f"{sys.executable} -c 'import sys, time\nwhile d := sys.stdin.buffer.read1(65536): sys.stdout.buffer.write(d); time.sleep(0.01)'"


def launcher(attack: Attack) -> str:
    """All bytes arrive at a reader that reads, the code is that of the rank that failed, and no process is left."""
    chance, folder = attack.chance, attack.folder
    (folder / "program.py").write_text(PROGRAM)
    count, reader, code = chance.randint(1, 4), chance.choice(list(READERS)), chance.choice([0, 0, 1, 7, 255])
    lines, length = chance.choice([(1, 0), (1000, 80), (20_000, 30), (300, 9000), (1, 3_000_000)])
    is_asked = chance.random() < 0.25
    stays = 1 if is_asked else chance.choice([0, 0, 2]) if code else 0
    line = [sys.executable, "program.py", lines, length, chance.choice([0, 100]), chance.choice([0, 0, *range(8)]), stays, code]
    logs = ["--log-dir", "logs", "--tee"] if chance.random() < 0.3 else []
    ended: int | str = "hangs"
    with (folder / "read").open("wb") as output, (folder / "errors").open("wb") as errors:
        process = attack.start(["launch", "-n", count, "--grace", 1, *logs, "--", *line], stdout=subprocess.PIPE, stderr=errors)
        attack.commands.append(f"# read by {READERS[reader]}{', SIGTERM after 1 s' if is_asked else ''}")
        reading = subprocess.Popen(["sh", "-c", READERS[reader]], stdin=process.stdout, stdout=output, start_new_session=True)
        process.stdout.close()
        if is_asked:
            time.sleep(1.0)
            process.send_signal(signal.SIGTERM)
        try:
            ended = process.wait(LIMIT_S)
            reading.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            attack.kill_all()
            os.killpg(reading.pid, signal.SIGKILL)
            process.wait()
    attack.judged(ended, (folder / "errors").read_text(errors="replace"))
    if reader == "head" or is_asked or ended == "hangs":
        return reader
    if ended != code:
        attack.found(f"the launcher ends with {ended}, the rank that failed with {code}")
    # Ranks that are stopped for another one may be cut off; the one that fails is not. Long lines arrive in parts.
    for rank in range(count if code == 0 else 1 if count == 1 or stays else 0):
        begin = f"[rank {rank}] ".encode()
        heard = b"".join(part[len(begin):] for part in (folder / "read").read_bytes().splitlines() if part.startswith(begin))
        right = b"".join(f"{at:07d} ".encode() + "é".encode() * length for at in range(lines))
        if heard != right:
            attack.found(f"{len(heard)} of {len(right)} bytes arrive from a rank")
    return reader


def tables(attack: Attack) -> str:
    """A table trains or is refused; with other units, origins or constants, its columns train alike."""
    chance, folder = attack.chance, attack.folder
    labels = chance.choice([["0", "1", "2"], ["1", "2", "3", "4", "5"], ["yes", "no"], ["日本", "中国"], ["🙂", "a\x1b[31m"]])
    names = [chance.choice(["x", "名前", "🙂🙂", "n" * 100_000, "e\x1b[2J", 'quoted, "name"', "\u202er"]) + str(at) for at in range(3)]
    usual = ["plain", "unix", "ids", "unit", "constant"]
    kinds = [chance.choice(usual if chance.random() < 0.93 else ["huge", "tiny", "word", "empty"]) for _ in names]
    shown: dict[str, Callable[[int], str]] = {
        "plain": str, "unix": lambda value: str(1_764_000_000 + value), "ids": lambda value: str((1 << 26) + value), "zero": lambda _: "0",
        "unit": lambda value: f"{value}e3", "huge": lambda value: f"{value}e30", "tiny": lambda value: f"{value}e-300",
        "constant": lambda _: "0.1", "word": lambda _: "word", "empty": lambda _: ""}
    rows = [[chance.randrange(1000) for _ in names] for _ in range(chance.choice([1, 40, 200]))]
    mark, ending, cut = chance.choice(["", "\ufeff"]), chance.choice(["\n", "\r\n"]), chance.choice([0, 0, 0, 1, 7])
    line = ["--label-column", "label", "--model", "mlp", "--input-dim", 3, "--hidden-dim", 16, "--output-dim", len(labels), "--num-layers", 1,
            "--batch-size", 4, "--epochs", 4, "--lr", 0.05, "--nproc", 1, "--evaluate", "--warmup-steps", 0, "--data", "csv", "--data-dir"]
    attack.commands.append(f"# columns {kinds}, labels {labels}, {len(rows)} rows, cut {cut}")
    losses = []
    for to in ("run", "alike"):
        (folder / to).mkdir()
        for name in ("train.csv", "test.csv"):
            with (folder / to / name).open("w", newline="") as file:
                file.write(mark)
                # The label follows from the first column.
                table = csv.writer(file, lineterminator=ending)
                table.writerows([[*names, "label"], *([*(shown[kind](value) for kind, value in zip(kinds, row)),
                                                       labels[row[0] * len(labels) // 1000]] for row in rows)])
            os.truncate(folder / to / name, (folder / to / name).stat().st_size - cut)
        ran = attack.run("train", *line, to, "--name", to, "--save", f"ck-{to}")
        if not attack.expect(ran, {0, 2}, f"a table of {kinds}") or ran[0] == 2:
            return "refused"
        losses.append(json.loads((folder / f"runs/{to}/summary.json").read_text())["train_loss"])
        kinds = [{"unix": "plain", "ids": "plain", "unit": "plain", "constant": "zero"}.get(kind, kind) for kind in kinds]
    if abs(losses[0] - losses[1]) > 1e-3 * losses[1]:
        attack.found(f"columns train to a loss of {losses[0]:.4f}, plain ones of the same to {losses[1]:.4f}")
    for other in (["show", "runs/run"], ["compare", "runs/run"], ["evaluate", "--checkpoint", "ck-run"], ["checkpoint", "show", "ck-run"]):
        attack.expect(attack.run(*other), {0}, other[0])
    return "table"


def texts(attack: Attack) -> str:
    """Texts train or are refused in bounded time; what a tokenizer cuts off changes nothing."""
    chance, folder = attack.chance, attack.folder
    side = chance.choice(["Left", "Right", ""])
    kind: Record = TOKENIZER | {
        "truncation": TRUNCATION | {"direction": side} if side else None, "normalizer": chance.choice([None, {"type": "Lowercase"}, {"type": "NFKC"}]),
        "pre_tokenizer": chance.choice([{"type": "WhitespaceSplit"}, {"type": "Whitespace"}, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}])}
    odd = chance.choice(["x" * 200_000, "good" * 50_000, " " * 200_000, "日" * 70_000, "a\x1b[31m\u202eb", "\u0301" * 50_000, "good,\n" * 30_000, ""])
    if chance.random() < 0.5:
        merges = [["x", "x"], ["xx", "xx"], ["g", "o"], ["go", "o"], ["goo", "d"]]
        vocab = ["[UNK]", *sorted(set("goodbadfilmx▁")), *("".join(pair) for pair in merges)]
        kind["model"] = {"type": "BPE", "vocab": {token: at for at, token in enumerate(vocab)}, "merges": merges, "unk_token": "[UNK]"}
    (folder / "tokenizer.json").write_text(json.dumps(kind))
    rows = [" ".join(chance.choice(["good", "bad", "film"]) for _ in range(20)) for _ in range(16)]
    far = " ".join(chance.choice(["film", "bad"]) for _ in range(chance.choice([10, 3000])))
    line = words({"model": "llama", "layers": 1, "width": 32, "heads": 2, "intermediate": 32, "num-labels": 2, "vocab": 64, "data": "text",
                  "tokenizer": "tokenizer.json", "max-length": 6, "epochs": 1, "batch-size": 2, "nproc": 2, "seed": 3})
    ran = []
    for name in ("one", "two"):
        longer = [row if name == "one" else f"{far} {row}" if side == "Left" else f"{row} {far}" for row in rows]
        write_texts(folder / name, [odd, *longer])
        ran.append(attack.run("train", *line, "--data-dir", name, "--name", name))
        if not attack.expect(ran[-1], {0, 2}, "texts") or ran[-1][0] == 2:
            return "refused"
    if digest(ran[0]) != digest(ran[1]):
        attack.found(f"what lies beyond --max-length changes the weights: {side or 'no'} truncation, {kind['model']['type']}")
    (folder / "long.txt").write_text(odd + " " + rows[0] * 9)
    attack.expect(attack.run("tokenizer", "train", "--data-dir", "long.txt", "--vocab", 300, "--to", "t.json"), {0, 2}, "tokenizer train")
    return "texts"


def traces(attack: Attack) -> str:
    """Whatever is done to traces, commands that read them end."""
    chance, folder = attack.chance, attack.folder
    if chance.random() < 0.5:
        attack.run("train", *STEP.split(), *PROFILE.split(), "--strategy", chance.choice(["ddp", "sharded3", "zero3"]))
    else:
        cuda = [sys.executable, Path(__file__).parent / "peer/cuda_trace.py", "--out", folder / "profile/cuda", "--layers", "2", "--steps", chance.choice(["2", "2", "120"])]
        subprocess.run(cuda, check=True, capture_output=True)
    source = next((folder / "profile").iterdir())
    (folder / "bad").mkdir()
    for number, path in enumerate(sorted(source.rglob("*.json.gz")) * chance.choice([1, 1, 1, 2])):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        for _ in range(chance.choice([0, 1, 1, 5, 50])):
            change_trace(chance, trace)
        text = json.dumps(trace).encode()
        packed = gzip.compress(mutate(chance, text) if chance.random() < 0.15 else text)
        (folder / f"bad/rank{number}.json.gz").write_bytes(mutate(chance, packed) if chance.random() < 0.1 else packed)
    good = str(source.relative_to(folder))
    lines = [
        ["analyze", "bad"], ["analyze", "bad", "--include-last-step", "--link", "10gbe"], ["analyze", "diff", "bad", good],
        ["analyze", "bad", "--against", good], ["analyze", good, "--against", "bad"], ["trace", "merge", "bad", "-o", "merged/rank_0.json", "--force"],
        ["predict", "--trace", "bad", "--nproc", "4", "--links", "25gbe"], ["analyze", "merged"], ["analyze", "bad", "--kind", "sharding", "--select", "all"]]
    (folder / "merged").mkdir()
    for line in sorted(chance.sample(lines, 4), key=lambda line: line[0] != "trace"):
        attack.expect(attack.run(*line), {0, 1, 2}, " ".join(line[:2]))
    return "traces"


def change_trace(chance: random.Random, trace: Record) -> None:
    """Changes, repeats, removes or reorders events, or changes what is said about the trace."""
    events, odd = trace["traceEvents"], chance.choice([0, -1, 1e18, 2**63, -2**63, 2**64, 1e-9, "", "7", "\x1b[31mred", None, [], {}, True, "🙂" * 300])
    event = chance.choice(events or [{}])
    how = chance.choice(["field", "field", "args", "args", "repeat", "remove", "header", "rank", "order", "overlap", "same"])
    inner = event.get("args") if how == "args" else {key: 0 for key in trace if key != "traceEvents"} if how == "header" else event
    if isinstance(inner, dict) and inner and how in ("field", "args", "header"):
        (trace if how == "header" else inner)[chance.choice(list(inner))] = odd
    elif how == "repeat":
        events += [json.loads(json.dumps(event)) for _ in range(chance.choice([1, 3, 3000]))]
    elif how == "remove" and events:
        events.remove(event)
    elif how == "rank":
        trace["distributedInfo"] = {"rank": chance.choice([0, 1, odd]), "world_size": chance.choice([2, odd])}
    elif how == "same" and event.get("args"):
        # Identifiers that should differ, for one.
        key = chance.choice([*event["args"], *["correlation"] * ("correlation" in event["args"]) * 9])
        for other in events:
            if isinstance(other.get("args"), dict) and key in other["args"]:
                other["args"][key] = event["args"][key]
        events += [event | {"ts": at / 7} for at in range(chance.choice([0, 30_000]))]
    elif how == "order":
        chance.shuffle(events)
    elif how == "overlap":
        begin = [event.get("ts", 0), chance.uniform(-1e6, 1e9)][chance.randrange(2)]
        events += [event | {"ts": begin, "dur": chance.choice([0, 1, 1e9, -5])} for _ in range(9)]


# Each kind, and its turns among the others.
KINDS: dict[str, tuple[Callable[[Attack], str], int]] = {
    "combinations": (combinations, 8), "kills": (kills, 2), "strangers": (strangers, 4), "planted": (planted, 3), "launcher": (launcher, 2),
    "tables": (tables, 1), "texts": (texts, 1), "traces": (traces, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Attack a build with what a generator draws.")
    parser.add_argument("--paceline", type=Path, default=Path("target/release/paceline"), metavar="PATH")
    parser.add_argument("--minutes", type=float, default=60.0, help="(default: 60)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the first attack; the next ones follow (default: 1)")
    parser.add_argument("--kind", choices=list(KINDS), help="(default: all in turn)")
    parser.add_argument("--times", type=int, default=sys.maxsize, help="at most so many attacks")
    parser.add_argument("--out", type=Path, default=Path("results/attack.json"), metavar="FILE")
    arguments = parser.parse_args()
    binary = program(parser, "--paceline", arguments.paceline)
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    turns = [kind for kind, (_, times) in KINDS.items() for _ in range(times)]
    random.Random(0).shuffle(turns)
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    shapes: Counter[str] = Counter()
    findings: list[Record] = []
    begin, seed = time.monotonic(), arguments.seed
    while time.monotonic() < begin + 60 * arguments.minutes and seed < arguments.seed + arguments.times:
        attack = Attack(binary, arguments.kind or turns[seed % len(turns)], seed)
        counts[attack.kind][KINDS[attack.kind][0](attack)] += 1
        attack.end()
        for finding in attack.findings:
            shapes[finding["shape"]] += 1
            findings += [finding] if shapes[finding["shape"]] <= 3 else []
            if shapes[finding["shape"]] == 1:
                print(f"--seed {seed} --kind {attack.kind}: {finding['what'][:300]}", flush=True)
        shutil.rmtree(attack.root, ignore_errors=True)
        seed += 1
    record: Record = {
        **provenance(), "version": version, "first_seed": arguments.seed, "minutes": round((time.monotonic() - begin) / 60, 1),
        "kinds": {kind: dict(of.most_common()) for kind, of in counts.items()}, "shapes": dict(shapes.most_common()), "findings": findings}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    for kind, of in counts.items():
        print(f"{kind}: {of.total()} attacks: " + ", ".join(f"{count} {what}" for what, count in of.most_common()))
    print(f"{len(shapes)} shapes of findings: {arguments.out}")
    return int(bool(shapes))


if __name__ == "__main__":
    sys.exit(main())
