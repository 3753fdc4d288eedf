"""A small Llama of `transformers` that learns a text byte by byte: the counterpart of `paceline train --recipe tiny-lm`.

    .peer/bin/python bench/peer/perplexity.py make --to FIRST --seed 1
    .peer/bin/python bench/peer/perplexity.py train --model FIRST --text train.txt --steps 400 --seed 1 --to TRAINED
    .peer/bin/python bench/peer/perplexity.py evaluate --model TRAINED --text test.txt      # one line of JSON

The sizes, the optimizer and its schedule are those of the recipe. The order of the sequences is another one.
"""
import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

SEQ_LEN = 128
LEARNING_RATE, BETAS, DECAY, CLIP = 0.002, (0.9, 0.95), 0.1, 1.0
SIZES = dict(
    vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
    max_position_embeddings=SEQ_LEN, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
)


def sequences(text: Path) -> Tensor:
    """(sequences, SEQ_LEN + 1): the tokens of each and the one behind it."""
    tokens = torch.tensor(list(text.read_bytes()))
    count = (len(tokens) - 1) // SEQ_LEN
    return torch.stack([tokens[at * SEQ_LEN : (at + 1) * SEQ_LEN + 1] for at in range(count)])


def loss_of(model: LlamaForCausalLM, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())


def train(model: LlamaForCausalLM, rows: Tensor, steps: int, batch_size: int, seed: int) -> None:
    matrices = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(rows), generator=generator)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 + math.cos(math.pi * step / steps)) / 2
        if len(order) < batch_size:
            order = torch.randperm(len(rows), generator=generator)
        batch, order = order[:batch_size], order[batch_size:]
        optimizer.zero_grad()
        loss_of(model, rows[batch]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()


@torch.inference_mode()
def evaluate(model: LlamaForCausalLM, rows: Tensor) -> float:
    losses = [loss_of(model, part) * len(part) for part in rows.split(32)]
    return math.exp(sum(losses).item() / len(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "train", "evaluate"])
    parser.add_argument("--model", type=Path, metavar="DIR")
    parser.add_argument("--text", type=Path, metavar="FILE")
    parser.add_argument("--to", type=Path, metavar="DIR")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    if arguments.what == "make":
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(arguments.to)
        return
    model = LlamaForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    rows = sequences(arguments.text)
    if arguments.what == "train":
        train(model, rows, arguments.steps, arguments.batch, arguments.seed)
        model.save_pretrained(arguments.to)
    else:
        print(json.dumps({"sequences": len(rows), "perplexity": evaluate(model, rows)}))


if __name__ == "__main__":
    main()
