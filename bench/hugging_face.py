"""Whether Hugging Face's transformers and paceline read each other's folders, and get the same numbers from them.

    pip install torch numpy transformers
    cargo build --release --bin paceline && cargo build --release -p paceline-model --example logits
    python3 bench/hugging_face.py

Theirs to ours: `save_pretrained` writes small language models with random weights (in f32, f16 and bf16, in one file and in
several), and the logits of a random sequence are compared.

Ours to theirs: `paceline train` trains a language model and the classifier of `--recipe tiny-llama`, `paceline checkpoint export
--hugging-face` writes the folders, and transformers loads them. Compared are the logits of the language model, and the loss and the
accuracy of the classifier on the held-out reviews.

Writes `results/hugging_face.json`. The exit code is 1 if a comparison failed.
"""
import csv
import functools
import re
import shlex
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from common import ROOT, RUN_SECONDS, Record, aligned, arguments_for, parsed, program, provenance, run, write
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEQUENCE = 48
# Of the largest logit. Sums in f32 differ in their order.
LOGITS_TOLERANCE = 2e-5
# The program prints four decimals.
LOSS_TOLERANCE = 6e-5

SMALL = {
    "vocab_size": 384, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 6, "max_position_embeddings": 64, "initializer_range": 0.2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# What differs, the type of the stored weights, and the largest size of a file.
THEIRS = {
    "plain, f32": ({}, torch.float32, "1GB"),
    "tied, f16": ({"tie_word_embeddings": True}, torch.float16, "1GB"),
    "grouped, bf16, several files": (GROUPED, torch.bfloat16, "300KB"),
    "Llama 3's angles, f32, several files": ({"rope_parameters": LLAMA_3}, torch.float32, "500KB"),
}
OUR_MODEL = "--model llama --layers 3 --width 96 --heads 6 --kv-heads 2 --intermediate 256 --vocab 384 --seq-len 48 --batch-size 4"
RECIPE = ROOT / "crates/choices/reviews"
EVALUATED = re.compile(r"^Evaluation loss: ([0-9.]+), over (\d+) samples\nEvaluation accuracy: ([0-9.]+)%$", re.MULTILINE)


class Programs:
    def __init__(self, paceline: Path, logits: Path) -> None:
        self.paceline, self.logits = paceline, logits

    def run(self, command: str, folder: Path) -> str:
        return run([self.paceline, *shlex.split(command)], folder, RUN_SECONDS)

    def logits_of(self, model: Path, tokens: list[int]) -> torch.Tensor:
        output = run([self.logits, model, *map(str, tokens)], model, RUN_SECONDS)
        return torch.tensor([[float(x) for x in line.split()] for line in output.splitlines()])


def compared_logits(name: str, programs: Programs, folder: Path) -> Record:
    """The logits of both sides for one sequence, from the same folder."""
    model, loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    check_names(name, loaded)
    tokens = torch.randint(0, model.config.vocab_size, (SEQUENCE,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = model.eval()(tokens[None]).logits[0]
    ours = programs.logits_of(folder, tokens.tolist())
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    off = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    return {"case": name, "files": len(list(folder.glob("*.safetensors"))), "logits_off": off, "agrees": off <= LOGITS_TOLERANCE}


def check_names(name: str, loaded: Record) -> None:
    wrong = {kind: list(found) for kind, found in loaded.items() if found}
    if wrong:
        raise SystemExit(f"{name}: transformers says {wrong}")


def theirs_to_ours(name: str, programs: Programs, folder: Path) -> Record:
    settings, dtype, largest = THEIRS[name]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, **settings})).to(dtype)
    model.save_pretrained(folder, max_shard_size=largest)
    return compared_logits(name, programs, folder)


def our_language_model(programs: Programs, folder: Path) -> Record:
    programs.run(f"train {OUR_MODEL} --nproc 2 --threads 1 --steps 5 --save ck", folder)
    programs.run("checkpoint export ck --hugging-face --to exported", folder)
    return compared_logits("ours, trained for 5 steps", programs, folder / "exported")


def our_classifier(programs: Programs, folder: Path) -> Record:
    name = "ours, --recipe tiny-llama"
    programs.run("train --recipe tiny-llama --save ck", folder)
    output = programs.run("evaluate --recipe tiny-llama --checkpoint ck", folder)
    found = EVALUATED.search(output)
    if found is None:
        raise SystemExit(f"no evaluation in:\n{output}")
    loss, samples, accuracy = (float(group) for group in found.groups())
    programs.run("checkpoint export ck --hugging-face --to exported", folder)
    exported = folder / "exported"
    model, loaded = AutoModelForSequenceClassification.from_pretrained(exported, dtype=torch.float32, output_loading_info=True)
    check_names(name, loaded)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(RECIPE / "tokenizer.json"))
    with open(RECIPE / "test.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == samples, (len(rows), samples)
    losses, right = [], 0
    model.eval()
    for row in rows:
        tokens = torch.tensor([tokenizer(row["text"])["input_ids"]])
        with torch.no_grad():
            logits = model(tokens).logits
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor([int(row["label"])])).item())
        right += int(logits.argmax().item() == int(row["label"]))
    their_loss, their_accuracy = sum(losses) / len(losses), 100 * right / len(rows)
    agrees = abs(their_loss - loss) <= LOSS_TOLERANCE and abs(their_accuracy - accuracy) < 0.01
    figures = {"loss": loss, "their_loss": their_loss, "accuracy": accuracy, "their_accuracy": their_accuracy}
    return {"case": name, **figures, "agrees": agrees}


def row_of(record: Record) -> list[str]:
    if "logits_off" in record:
        figures = f"logits differ by {record['logits_off']:.1e} of the largest"
    else:
        ours, theirs = (f"loss {record[f'{who}loss']:.4f}, {record[f'{who}accuracy']:.1f} %" for who in ("", "their_"))
        figures = f"{ours}; transformers {theirs}"
    return [record["case"], figures, "yes" if record["agrees"] else "NO"]


def main() -> None:
    parser = arguments_for(__doc__, "hugging_face.json", rounds=0)
    parser.add_argument("--logits", type=Path, default=ROOT / "target/release/examples/logits", metavar="PATH", help="the example logits")
    arguments = parsed(parser)
    transformers.utils.logging.disable_progress_bar()
    programs = Programs(arguments.paceline, program(parser, "--logits", arguments.logits))
    records = []
    for compared in (*(functools.partial(theirs_to_ours, name) for name in THEIRS), our_language_model, our_classifier):
        with tempfile.TemporaryDirectory(prefix="transformers_") as folder:
            records.append(compared(programs, Path(folder)))
    print(aligned([["case", "figures", "agree"], *map(row_of, records)], left={0, 1, 2}))
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    write(arguments.out, {**provenance(), **versions, "cases": records})
    sys.exit(not all(record["agrees"] for record in records))


if __name__ == "__main__":
    main()
