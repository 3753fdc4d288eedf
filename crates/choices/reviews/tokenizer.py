"""Makes tokenizer.json from the texts of train.csv: lower case, one token per word or mark.

The vocabulary holds the words that the training texts have at least twice, most frequent first. Every other word is
[UNK]. The texts decide the file completely. Run it in this folder with the package `tokenizers`:

    python tokenizer.py
"""

import csv
from collections import Counter

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

UNKNOWN = "[UNK]"
MIN_COUNT = 2
MAX_VOCAB = 600

with open("train.csv", newline="", encoding="utf-8") as file:
    texts = [row["text"] for row in csv.DictReader(file)]

normalizer = normalizers.Lowercase()
# A word, or a run of punctuation marks.
pre_tokenizer = pre_tokenizers.Whitespace()

counts = Counter()
for text in texts:
    words = pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text))
    counts.update(word for word, _span in words)
frequent = sorted((-count, word) for word, count in counts.items() if count >= MIN_COUNT)
vocab = [UNKNOWN] + [word for _count, word in frequent]
assert len(vocab) <= MAX_VOCAB, len(vocab)

numbers = {word: number for number, word in enumerate(vocab)}
tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=UNKNOWN))
tokenizer.normalizer = normalizer
tokenizer.pre_tokenizer = pre_tokenizer
tokenizer.save("tokenizer.json")
print(f"{len(vocab)} tokens")
