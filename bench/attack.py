"""Attacks drawn at random: features in combination, kills, and what strangers hand over, judged without expected output.

    cargo build --release
    python3 bench/attack.py --minutes 60 --seed 1                   # all kinds in turn
    python3 bench/attack.py --seed 17 --kind kills --times 1        # one attack again

An attack follows from its kind and seed (but for the moments of signals) and runs in a folder of its own. These hold for all:
nothing panics, hangs or ends by a signal, no process is left, nothing outside of the folder changes, and no control character
is printed. The function of each of the `KINDS` says what else must hold.

A finding is printed when its shape (its message without numbers) first appears, and up to three of each are written. The exit code is 1 if there are any.
"""
import csv
import gzip
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from attack_runs import TOKENIZER, combinations, draw_model, kills, write_texts
from attacked import LIMIT_S, Attack, digest, tree, words
from common import Record, arguments_for, kill_with, parsed, provenance, write

TRUNCATION = {"max_length": 6, "strategy": "LongestFirst", "stride": 0}


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
        before = tree(folder / "ck")
        ran = attack.run("train", *other, "--save", "ck", "--save-every", 1)
        attack.expect(ran, {2}, "a run with the folder of another one")
        if before != tree(folder / "ck"):
            attack.found("--save changes checkpoints of another run")
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
    recorded = recorded - {"download", "mirror", "token-cache", "warmup-steps"} | {"mesh", "schedule", "stages", "precision", "emulate-fp16", "tf32"}
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


STEP = "--model mlp --input-dim 8 --hidden-dim 8 --output-dim 2 --num-layers 1 --batch-size 2"
PROFILE = "--nproc 2 --steps 6 --steps-per-epoch 9 --profile --profile-wait 1 --profile-warmup 0 --profile-active 4"

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
READERS = {"all": "cat", "gzip": "gzip -9 | gunzip", "late": "sleep 0.5; cat", "head": "head -1"}
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
            kill_with(attack.token)
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
        ["analyze", "bad"], ["analyze", "bad", "--include-last-step", "--link", "10gbe"], ["analyze", "bad", "--against", good, "--steps", "first"],
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
    "combinations": (combinations, 8), "kills": (kills, 2), "strangers": (strangers, 4), "launcher": (launcher, 2),
    "tables": (tables, 1), "texts": (texts, 1), "traces": (traces, 3)}


def main() -> int:
    parser = arguments_for(__doc__, "attack.json", rounds=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="(default: 60)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the first attack; the next ones follow (default: 1)")
    parser.add_argument("--kind", choices=list(KINDS), help="(default: all in turn)")
    parser.add_argument("--times", type=int, default=sys.maxsize, help="at most so many attacks")
    arguments = parsed(parser)
    binary = arguments.paceline
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    turns = [kind for kind, (_, times) in KINDS.items() for _ in range(times)]
    random.Random(0).shuffle(turns)
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    shapes: Counter[str] = Counter()
    findings: list[Record] = []
    begin, seed = time.monotonic(), arguments.seed
    while time.monotonic() < begin + 60 * arguments.minutes and seed < arguments.seed + arguments.times:
        attack = Attack(binary, arguments.kind or turns[seed % len(turns)], seed)
        try:
            counts[attack.kind][KINDS[attack.kind][0](attack)] += 1
        except (KeyError, OSError, StopIteration, ValueError) as problem:
            # A file or a figure of a run that succeeded is not there, or cannot be read.
            counts[attack.kind]["cut off"] += 1
            attack.found(f"the attack is cut off: {problem!r}")
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
    write(arguments.out, record)
    for kind, of in counts.items():
        print(f"{kind}: {of.total()} attacks: " + ", ".join(f"{count} {what}" for what, count in of.most_common()))
    print(f"{len(shapes)} shapes of findings")
    return int(bool(shapes))


if __name__ == "__main__":
    sys.exit(main())
