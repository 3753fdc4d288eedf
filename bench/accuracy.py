"""The accuracy of CNNs with minimal filtering and with direct convolutions, on five data sets.

    python3 -m pip install scikit-learn
    python3 bench/accuracy.py --seeds 10

The data sets: synthetic images in gray and in color; the digits of scikit-learn (8 x 8, from pens) scaled to 16 x 16 as arrays, and as rows of a CSV file; disks,
rings, squares and crosses in noise, drawn here. Each seed trains once in each form, from the same first weights.
"""
import csv
import statistics
import sys
import tempfile
from pathlib import Path

import numpy
from common import Record, aligned, arguments_for, parsed, provenance, train, write
from sklearn.datasets import load_digits

FORMS = {"minimal filtering": "", "direct": "--direct-convolutions"}
CASES = {
    "synthetic, 28 x 28": "--epochs 2",
    "synthetic, 32 x 32 x 3": "--image 32 32 3 --channels 16 32 --samples 4096 --epochs 2",
    "digits, 16 x 16": "--data npy --data-dir digits --channels 16 32 64 --epochs 8 --lr 0.05",
    "digits, a table": "--data csv --data-dir table --image 16 16 1 --channels 16 32 --epochs 8 --lr 0.05",
    "shapes, 24 x 24": "--data npy --data-dir shapes --channels 32 64 --epochs 10 --lr 0.05",
}


def saved(folder: Path, images: numpy.ndarray, labels: numpy.ndarray, test: int) -> None:
    folder.mkdir()
    for name, part in ("train", slice(test, None)), ("test", slice(test)):
        numpy.save(folder / f"x_{name}.npy", images[part][..., None].astype("float32"))
        numpy.save(folder / f"y_{name}.npy", labels[part].astype("int64"))


def digits(folder: Path) -> None:
    found = load_digits()
    images = numpy.kron(found.images / 8 - 1, numpy.ones((2, 2)))
    saved(folder / "digits", images, found.target, 400)
    (folder / "table").mkdir()
    for name, part in ("train", slice(400, None)), ("test", slice(400)):
        with (folder / "table" / f"{name}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow([*(f"p{at}" for at in range(256)), "label"])
            rows.writerows([*image.ravel(), f"d{label}"] for image, label in zip(images[part], found.target[part]))


def shapes(folder: Path, count: int = 4000) -> None:
    draw = numpy.random.default_rng(1)
    y, x = numpy.mgrid[:24, :24]
    labels = draw.integers(4, size=count)
    images = draw.normal(0, 0.6, (count, 24, 24))
    for image, label in zip(images, labels):
        (row, column), size = draw.integers(7, 17, 2), draw.integers(3, 7)
        down, across = abs(y - row), abs(x - column)
        square, disk = numpy.maximum(down, across) <= size, down**2 + across**2 <= size**2
        inside = (disk, disk & (down**2 + across**2 > (size - 2) ** 2), square, square & (numpy.minimum(down, across) <= 1))
        image += inside[label]
    saved(folder / "shapes", images, labels, 1000)


def main() -> None:
    parser = arguments_for(__doc__, "accuracy.json", rounds=0)
    parser.add_argument("--seeds", type=int, default=10, help="(default: 10)")
    arguments = parsed(parser)
    results: Record = {case: {form: [] for form in FORMS} for case in CASES}
    with tempfile.TemporaryDirectory(prefix="accuracy_") as name:
        folder = Path(name)
        digits(folder)
        shapes(folder)
        for seed in range(arguments.seeds):
            for case, flags in CASES.items():
                for form, flag in FORMS.items():
                    summary = train(arguments.paceline, f"{flags} {flag} --nproc 1 --evaluate --seed {seed}", folder)
                    results[case][form].append({key: summary[key] for key in ("eval_accuracy", "eval_loss")})
            print(f"seed {seed} is done", file=sys.stderr, flush=True)
    rows = [["accuracy in %, mean and range", *FORMS, "difference of a seed, mean and standard error"]]
    for case, forms in results.items():
        values = [[100 * of["eval_accuracy"] for of in form] for form in forms.values()]
        apart = [a - b for a, b in zip(*values)]
        error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else 0
        shown = [f"{statistics.mean(of):.2f} [{min(of):.2f}-{max(of):.2f}]" for of in values]
        rows.append([case, *shown, f"{statistics.mean(apart):+.2f} +- {error:.2f}"])
    print(aligned(rows, left={0}))
    write(arguments.out, provenance() | {"cases": CASES, "results": results})


if __name__ == "__main__":
    main()
