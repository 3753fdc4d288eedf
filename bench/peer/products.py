"""PyTorch's matrix products on one thread of the CPU, for the sizes of the example `products`.

    python bench/peer/products.py 512x256x256 512x704x256

Sizes are m x n x k. Prints a line of JSON with GFLOP/s for each element type, size and orientation: the best of many repetitions.
"""
import argparse
import json
import time

import torch

SECONDS = 0.8
# How each operand is stored: as it is, or transposed.
ORIENTATIONS = {"a b": (False, False), "a b^T": (False, True), "a^T b": (True, False)}


def operand(rows: int, columns: int, dtype: torch.dtype, is_transposed: bool) -> torch.Tensor:
    return torch.rand(columns, rows, dtype=dtype).t() if is_transposed else torch.rand(rows, columns, dtype=dtype)


def speed(m: int, n: int, k: int, dtype: torch.dtype, transposed: tuple[bool, bool]) -> float:
    a, b = operand(m, k, dtype, transposed[0]), operand(k, n, dtype, transposed[1])
    product = torch.empty(m, n, dtype=dtype)
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        before = time.perf_counter()
        torch.mm(a, b, out=product)
        best = min(best, time.perf_counter() - before)
    return 2 * m * n * k / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description="Time PyTorch's matrix products.")
    parser.add_argument("sizes", nargs="+", metavar="MxNxK")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, dtype in {"f32": torch.float32, "bf16": torch.bfloat16}.items():
        for size in arguments.sizes:
            m, n, k = map(int, size.split("x"))
            for orientation, transposed in ORIENTATIONS.items():
                figure = speed(m, n, k, dtype, transposed)
                print(json.dumps({"size": size, "orientation": orientation, "dtype": name, "gflops": figure}))


if __name__ == "__main__":
    main()
