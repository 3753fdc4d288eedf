"""Stories for `cases.py`: what reading, use and attacks found. Each takes a build in an empty folder, and says in a few words how it ends."""
from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cases import Case

TINY = "--model mlp --input-dim 16 --hidden-dim 16 --output-dim 4 --num-layers 1 --batch-size 4 --steps-per-epoch 4 --epochs 1"
LLAMA = "--model llama --layers 1 --width 16 --heads 2 --intermediate 32"
TEXT = f"{LLAMA} --num-labels 2 --data text --epochs 1 --batch-size 1 --nproc 2"
TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "good": 1, "bad": 2, "film": 3}, "unk_token": "[UNK]"},
}
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 4, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}


def output(case: Case, words: str, **rest) -> tuple[str | int, str]:
    """The exit code, or "hangs"; and all that was printed."""
    rest = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | rest
    process = case.start(words, **rest)
    try:
        text, _ = process.communicate(timeout=60)
        return process.returncode, text or ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "hangs", ""


def peak_mb(case: Case, words: str) -> tuple[str | int, float]:
    """The exit code, and the largest resident memory of a process of the command. What takes more than 12 GB is ended."""
    limited = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30)); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", limited, case.binary, *words.split()], cwd=case.folder,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )
    deadline, peak = time.monotonic() + 60, 0.0
    while process.poll() is None and time.monotonic() < deadline:
        for folder in os.listdir("/proc"):
            if folder.isdigit():
                try:
                    status = open(f"/proc/{folder}/status").read()
                    session = open(f"/proc/{folder}/stat").read().rsplit(")", 1)[1].split()[3]
                except OSError:
                    continue
                if int(session) == process.pid and (found := re.search(r"VmHWM:\s+(\d+)", status)):
                    peak = max(peak, int(found[1]) / 1000)
        time.sleep(0.01)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "hangs", peak
    return process.returncode, peak


def by_hand(case: Case, words: list[str]) -> list[tuple[str | int, str]]:
    """Ranks that are started by hand, each with its own flags, as on hosts of their own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PACELINE_SECRET": "cases"}
    environment |= {"WORLD_SIZE": str(len(words)), "LOCAL_WORLD_SIZE": str(len(words))}
    ranks = [case.start(f"train --quiet {flags}", env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank, flags in enumerate(words)]
    return [case.end(rank) for rank in ranks]


def other_settings(flag: str, here: str, there: str) -> Callable[[Case], str]:
    def story(case: Case) -> str:
        ended = by_hand(case, [f"{TINY} {flag} {here}", f"{TINY} {flag} {there}"])
        named = any(flag in errors for _, errors in ended)
        return f"codes {sorted(str(code) for code, _ in ended)}, {'names' if named else 'does not name'} {flag}"

    return story


def order_of_meshes(case: Case) -> str:
    """On which meshes `sharded3` with replicas ends with other bits than `ddp`."""
    wrong = []
    common = "--model mlp --input-dim 64 --hidden-dim 96 --output-dim 16 --num-layers 2 --batch-size 8 --steps-per-epoch 4 --epochs 1 --transport thread"
    for mesh, ranks in (("shard=2,dp=2", 4), ("dp=2,shard=2", 4), ("dp=2,shard=3", 6), ("dp=3,shard=2", 6)):
        digests = []
        for flags in (f"--strategy sharded3 --mesh {mesh}", "--strategy ddp"):
            _, text = output(case, f"train {common} --nproc {ranks} {flags}")
            digests.append(re.search(r"sha256 (\w+)", text))
        if None in digests or digests[0][1] != digests[1][1]:
            wrong.append(mesh)
    return f"other bits: {' and '.join(wrong) or 'none'}"


def resume_other_rate(case: Case) -> str:
    output(case, f"train {TINY} --save ck --lr 0.01")
    code, text = output(case, f"train {TINY.replace('--epochs 1', '--epochs 2')} --resume ck --lr 0.5")
    return f"code {code}, {'says so' if '--lr' in text else 'without a word'}"


def resume_other_optimizer(case: Case) -> str:
    output(case, f"train {TINY} --save ck --optimizer adamw")
    code, text = output(case, f"train {TINY.replace('--epochs 1', '--epochs 2')} --resume ck --optimizer sgd")
    return f"code {code}, {'names --optimizer' if '--optimizer' in text else 'does not name --optimizer'}"


def resume_alone(case: Case) -> str:
    output(case, "train --samples 512 --epochs 1 --channels 4 --hidden 8 --save ck --optimizer adamw --lr 0.003")
    code, _ = output(case, "train --resume ck --epochs 2")
    evaluated, _ = output(case, "evaluate --checkpoint ck")
    return f"train: code {code}; evaluate: code {evaluated}"


def step_back(case: Case) -> str:
    """The newest checkpoint, which `latest` names, is gone."""
    output(case, f"train {TINY} --save ck --save-every 2")
    shutil.rmtree(case.folder / "ck" / (case.folder / "ck/latest").read_text().strip())
    verified, _ = output(case, "checkpoint verify ck")
    longer = TINY.replace("--epochs 1", "--epochs 2")
    codes = [output(case, f"train {longer} {flags}")[0] for flags in ("--resume ck", "--save ck --resume auto")]
    return f"verify: {verified}, resume: {codes[0]}, auto: {codes[1]}"


def fifo_in_logs(case: Case) -> str:
    (case.folder / "logs").mkdir()
    os.mkfifo(case.folder / "logs/rank_0.log")
    process = case.start("launch -n 2 --log-dir logs -- sleep 1000")
    time.sleep(1.0)
    process.terminate()
    code, _ = case.end(process)
    return "ends" if code != "hangs" else "hangs"


def planted(name: str, words: str) -> Callable[[Case], str]:
    def story(case: Case) -> str:
        (case.folder / "precious").write_text("precious")
        link = case.folder / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(case.folder / "precious")
        code, _ = output(case, words)
        kept = (case.folder / "precious").read_text() == "precious"
        return "refused, the target is kept" if kept and code != 0 else "the target is kept" if kept else "the target is overwritten"

    return story


def hostile_config(key: str, value: object) -> Callable[[Case], str]:
    def story(case: Case) -> str:
        model = case.folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG | {key: value}))
        code, peak = peak_mb(case, "train --model llama --pretrained model --init random --data synthetic --steps 1 --nproc 1")
        return f"code {code}, {'less' if peak < 500 else 'more'} than 500 MB"

    return story


def long_header(case: Case) -> str:
    """A safetensors file whose header has 90 MB."""
    model = case.folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    entries = ",".join(f'"t{number}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for number in range(1_500_000))
    header = f"{{{entries}}}".encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    code, peak = peak_mb(case, "train --model llama --pretrained model --data synthetic --steps 1 --nproc 1")
    return f"code {code}, {'less' if peak < 500 else 'more'} than 500 MB"


def rows_of(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text, "label": number % 2}) + "\n" for number, text in enumerate(texts))


def texts(case: Case, rows: str) -> str:
    """The flags of a run on these JSON lines."""
    (case.folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (case.folder / "data").mkdir()
    (case.folder / "data/train.jsonl").write_text(rows)
    return f"train {TEXT} --data-dir data --tokenizer tokenizer.json --vocab 4"


def byte_order_mark(case: Case) -> str:
    rows = rows_of(["good film"] * 8)
    return f"code {output(case, texts(case, chr(0xFEFF) + rows))[0]}"


def empty_text(case: Case) -> str:
    return f"code {output(case, texts(case, rows_of(['good film', '', 'bad film', 'good'] * 4)))[0]}"


def long_text(case: Case) -> str:
    code, peak = peak_mb(case, texts(case, rows_of(["good film " * 20_000_000, "bad film"])) + " --max-length 512")
    return f"code {code}, {'less' if peak < 1500 else 'more'} than 1.5 GB"


def closed_pipe(case: Case) -> str:
    output(case, f"train {TINY.replace('--epochs 1', '--epochs 4')} --profile")
    process = case.start("trace merge profile/ddp", stdout=subprocess.PIPE)
    process.stdout.close()
    process.stdout = None
    code, errors = case.end(process)
    return f"{'a panic' if 'panicked' in errors else 'no panic'}"


def escapes(case: Case) -> str:
    """A name with an escape sequence and an override of the direction of text."""
    (case.folder / "run.toml").write_text('"\\u001b[31mred\\u202e" = 1\n')
    _, text = output(case, "train --config run.toml")
    return "raw" if "\x1b" in text or "\u202e" in text else "shown as text"


def endless_config(case: Case) -> str:
    code, peak = peak_mb(case, "train --config /dev/zero")
    return f"code {code}, {'less' if peak < 500 else 'more'} than 500 MB"


def fifo_as_config(case: Case) -> str:
    os.mkfifo(case.folder / "run.toml")
    code, _ = output(case, "train --config run.toml")
    return f"code {code}"


def interrupted(case: Case) -> str:
    """What is left of the measurements after Ctrl-C."""
    process = case.start(f"train {TINY.replace('--epochs 1', '--epochs 1000000')} --json summary.json --nproc 2")
    deadline = time.monotonic() + 20
    while not list(case.folder.glob("runs/*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    code, _ = case.end(process)
    kept = (case.folder / "summary.json").exists()
    return f"code {code}, {'figures' if kept else 'no figures'}"


def resident(case: Case) -> str:
    _, text = output(case, "train --link 1gbit,50us --evaluate --profile --epochs 1")
    found = re.search(r"Resident.*?: ([0-9.]+) MB, predicted ([0-9.]+)", text)
    if found is None:
        return "no line"
    measured, predicted = float(found[1]), float(found[2])
    return f"{'within' if abs(measured - predicted) <= max(4.0, 0.05 * predicted) else 'not within'} 5 % or 4 MB"


def lone_trace(case: Case) -> str:
    """A trace without rank information, under a name of its own."""
    output(case, f"train {TINY.replace('--epochs 1', '--epochs 4')} --profile --nproc 1")
    trace = json.loads(gzip.decompress(next((case.folder / "profile").rglob("*.json.gz")).read_bytes()))
    trace.pop("distributedInfo", None)
    folder = case.folder / "traces"
    folder.mkdir()
    (folder / "mine.json").write_text(json.dumps(trace))
    return f"code {output(case, 'analyze traces')[0]}"


# By name: the story, how often it is tried, and how it should end.
CASES: dict[str, tuple[Callable[[Case], str], int, str]] = {
    "two hosts with another --lr": (other_settings("--lr", "0.01", "0.02"), 1, "codes ['2', '3'], names --lr"),
    "two hosts with another --optimizer": (other_settings("--optimizer", "sgd", "adamw"), 1, "codes ['2', '3'], names --optimizer"),
    "two hosts with another --seed": (other_settings("--seed", "1", "2"), 1, "codes ['2', '3'], names --seed"),
    # The strategy calls itself exact on the other two meshes only.
    "sharded3 with replicas beside ddp": (order_of_meshes, 1, "other bits: shard=2,dp=2 and dp=2,shard=3"),
    "resume with another --lr": (resume_other_rate, 1, "code 0, says so"),
    "resume with another --optimizer": (resume_other_optimizer, 1, "code 2, names --optimizer"),
    "resume without other flags": (resume_alone, 1, "train: code 0; evaluate: code 0"),
    "the newest checkpoint is gone": (step_back, 1, "verify: 1, resume: 2, auto: 2"),
    "a FIFO among the logs, SIGTERM": (fifo_in_logs, 1, "ends"),
    "a link planted for checkpoint.lock": (planted("ck/checkpoint.lock", f"train {TINY} --save ck"), 1, "refused, the target is kept"),
    "a link planted for rank_0.log": (planted("logs/rank_0.log", "launch -n 1 --log-dir logs -- echo text"), 1, "refused, the target is kept"),
    "config.json: head_dim 2^32": (hostile_config("head_dim", 1 << 32), 1, "code 2, less than 500 MB"),
    "config.json: vocab_size 2^40": (hostile_config("vocab_size", 1 << 40), 1, "code 2, less than 500 MB"),
    "config.json: num_hidden_layers 2^31": (hostile_config("num_hidden_layers", 1 << 31), 1, "code 2, less than 500 MB"),
    "safetensors: a header of 90 MB": (long_header, 1, "code 2, less than 500 MB"),
    "JSON lines with a byte order mark": (byte_order_mark, 1, "code 0"),
    "an empty text": (empty_text, 1, "code 0"),
    "a text of 200 MB": (long_text, 1, "code 2, less than 1.5 GB"),
    "trace merge into a closed pipe": (closed_pipe, 3, "no panic"),
    "an escape sequence in a configuration": (escapes, 1, "shown as text"),
    "--config /dev/zero": (endless_config, 1, "code 2, less than 500 MB"),
    "--config FIFO": (fifo_as_config, 1, "code 2"),
    "Ctrl-C in training": (interrupted, 1, "code 130, figures"),
    "resident memory of the first command": (resident, 1, "within 5 % or 4 MB"),
    "a trace without its rank": (lone_trace, 1, "code 0"),
}
