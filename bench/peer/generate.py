"""How fast `transformers` writes text with a small Llama: the counterpart of `paceline generate`.

    .peer/bin/python bench/peer/generate.py --make MODEL                    # a folder with random weights, as Hugging Face stores them
    .peer/bin/python bench/peer/generate.py --model MODEL --precision bf16  # one line of JSON

The model has the sizes of SmolLM2-135M, and a tokenizer that reads bytes.
"""
import argparse
import json
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Fast

SIZES = dict(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, rope_theta=100_000.0,
)


def make(folder: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.save_pretrained(folder)
    # Every number that the model can choose has a text, so that texts can be compared.
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [f"<{at}>" for at in range(len(tokens), SIZES["vocab_size"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    Fast(tokenizer_object=tokenizer).save_pretrained(folder)


@torch.inference_mode()
def measure(folder: Path, precision: str, prompt: str, tokens: int) -> dict[str, object]:
    model = LlamaForCausalLM.from_pretrained(folder, dtype={"f32": torch.float32, "bf16": torch.bfloat16}[precision]).eval()
    tokenizer = Fast.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    count = inputs["input_ids"].shape[1]

    def generate(new: int) -> tuple[float, list[int]]:
        begin = time.perf_counter()
        written = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=False, max_new_tokens=new, min_new_tokens=new,
            pad_token_id=0,
        )
        return time.perf_counter() - begin, written[0, count:].tolist()

    generate(2)
    read, _ = generate(1)
    whole, written = generate(tokens)
    return {"prompt_tokens": count, "read_s": read, "tokens_per_s": (tokens - 1) / (whole - read), "text": tokenizer.decode(written)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", type=Path, metavar="DIR")
    parser.add_argument("--model", type=Path, metavar="DIR")
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--prompt", default="a")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.make:
        make(arguments.make)
    if arguments.model:
        print(json.dumps(measure(arguments.model, arguments.precision, arguments.prompt, arguments.tokens)))


if __name__ == "__main__":
    main()
