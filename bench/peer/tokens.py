"""A byte pair tokenizer of the package `tokenizers`: the counterpart of `paceline tokenizer train`. Prints one line of JSON.

    .peer/bin/python bench/peer/tokens.py --text TEXT --vocab 1000 --tokenizer tokenizer.json --to OWN.json --ids IDS.bin

Trains on the lines of a text, and writes the tokenizer to --to. Writes to --ids the tokens of the whole text by the tokenizer of
--tokenizer, as u32.
"""
import argparse
import array
import json
import re
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--text", "--tokenizer", "--to", "--ids"):
        parser.add_argument(flag, type=Path, required=True, metavar="FILE")
    parser.add_argument("--vocab", type=int, required=True)
    arguments = parser.parse_args()
    text = arguments.text.read_bytes().decode()
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=arguments.vocab, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    own.train_from_iterator(re.findall(r"[^\n]*\n|[^\n]+", text), trainer)
    own.save(str(arguments.to))
    ids = Tokenizer.from_file(str(arguments.tokenizer)).encode(text, add_special_tokens=False).ids
    arguments.ids.write_bytes(array.array("I", ids).tobytes())
    print(json.dumps({"tokens": len(ids)}))


if __name__ == "__main__":
    main()
