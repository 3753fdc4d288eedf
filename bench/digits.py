"""Writes scikit-learn's digits in the form of CIFAR-10's binary files, for runs on real images without a download.

    python3 -m venv .digits && .digits/bin/pip install scikit-learn
    .digits/bin/python bench/digits.py FOLDER

The 1,797 digits (8 x 8, 16 shades of gray; Alpaydin and Kaynak, UCI, 1998) become images of 32 x 32 in three equal colors. The files
have the names, the order and the bytes that CIFAR-10's have: a label, then 1,024 bytes for each of red, green and blue. Every sixth
digit goes to the test batch.
"""
import argparse
from pathlib import Path

SIDE, SCALE = 8, 4
TRAIN_FILES = [f"data_batch_{at}.bin" for at in range(1, 6)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write scikit-learn's digits as CIFAR-10 binaries.")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder
    from sklearn.datasets import load_digits

    digits = load_digits()
    train, test = [], []
    for at, (image, label) in enumerate(zip(digits.images, digits.target)):
        rows = [bytes(min(255, int(shade) * 16) for shade in row for _ in range(SCALE)) for row in image]
        plane = b"".join(row for row in rows for _ in range(SCALE))
        assert len(plane) == (SIDE * SCALE) ** 2
        (test if at % 6 == 5 else train).append(bytes([label]) + 3 * plane)
    folder.mkdir(parents=True, exist_ok=True)
    for at, name in enumerate(TRAIN_FILES):
        (folder / name).write_bytes(b"".join(train[at :: len(TRAIN_FILES)]))
    (folder / "test_batch.bin").write_bytes(b"".join(test))
    print(f"{folder}: {len(train)} images to train on, {len(test)} to test with")


if __name__ == "__main__":
    main()
