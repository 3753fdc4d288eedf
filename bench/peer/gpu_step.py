"""Training steps in PyTorch on a card, one process: the models that `bench/card.py` trains.

    python3 gpu_step.py --json torch.json
    python3 gpu_step.py --cases cnn mlp --precisions f32 bf16 --compiled f32 bf16 --json torch.json

Each step has a fused optimizer, channels-last convolutions, and a batch that lies on the card. With `tf32`, products and
convolutions in f32 round their factors. Steps are timed by events of the card, one behind the other without a wait of the host;
the value is the median of 50 after 20. With `--compiled`, `torch.compile` is timed too, and for the small CNN also with
`mode="reduce-overhead"`, which launches steps as graphs. Prints a line for each and writes one JSON. Exits with 1 if there is no
card.
"""
import argparse
import json
import statistics
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama import Llama

PRECISIONS = ("f32", "tf32", "bf16", "fp16")
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
WARMUP_STEPS, TIMED_STEPS = 20, 50


class Cnn(nn.Module):
    """3x3 convolution, ReLU and 2x2 max-pool for each number of channels, then two linear layers."""

    def __init__(self, image: tuple[int, int, int], channels: tuple[int, ...]) -> None:
        super().__init__()
        height, width, depth = image
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in zip((depth, *channels), channels))
        side = 2 ** len(channels)
        self.fc1 = nn.Linear(channels[-1] * (height // side) * (width // side), 512)
        self.fc2 = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.max_pool2d(F.relu(conv(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    loss_of: Callable[[Tensor, Tensor], Tensor]


def images(batch: int, image: tuple[int, int, int], channels: tuple[int, ...], card: torch.device) -> Case:
    height, width, depth = image
    inputs = torch.randn(batch, depth, height, width, device=card).contiguous(memory_format=torch.channels_last)
    targets = torch.randint(0, 10, (batch,), device=card)
    return Case(lambda: Cnn(image, channels).to(card, memory_format=torch.channels_last), inputs, targets, F.cross_entropy)


def cases(card: torch.device) -> dict[str, Callable[[], Case]]:
    def mlp() -> nn.Module:
        layers = [nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096)]
        return nn.Sequential(*layers).to(card)

    def llama() -> nn.Module:
        return Llama(layers=4, width=256, heads=4, kv_heads=4, intermediate=688, vocab=8192, seq=128).to(card)

    def tokens() -> Tensor:
        return torch.randint(0, 8192, (4, 128), device=card)

    def rows() -> Tensor:
        return torch.randn(4096, 4096, device=card)

    return {
        "small_cnn": lambda: images(64, (28, 28, 1), (32, 64, 128), card),
        "cnn": lambda: images(512, (32, 32, 3), (64, 128, 256), card),
        "mlp": lambda: Case(mlp, rows(), rows(), F.mse_loss),
        "llama": lambda: Case(llama, tokens(), tokens().flatten(), F.cross_entropy),
    }


def step_ms(model: nn.Module, case: Case, precision: str) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    dtype = NARROW.get(precision)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(WARMUP_STEPS + TIMED_STEPS + 1)]
    events[0].record()
    for end in events[1:]:
        with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = case.loss_of(model(case.inputs), case.targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in zip(events[WARMUP_STEPS:], events[WARMUP_STEPS + 1 :]))


def main() -> int:
    parser = argparse.ArgumentParser(description="Time training steps of PyTorch on a card.")
    parser.add_argument("--cases", nargs="+", choices=["small_cnn", "cnn", "mlp", "llama"], help="(default: all)")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="(default: all)")
    parser.add_argument("--compiled", nargs="+", choices=PRECISIONS, default=[], help="precisions with torch.compile (default: none)")
    parser.add_argument("--json", metavar="FILE", required=True)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: PyTorch sees no card", file=sys.stderr)
        return 1
    steps = []
    all_cases = cases(torch.device("cuda"))
    for precision in arguments.precisions:
        rounds = precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = rounds
        for name in arguments.cases or all_cases:
            case = all_cases[name]()
            forms: dict[str, Callable[[nn.Module], nn.Module]] = {"eager": lambda model: model}
            if precision in arguments.compiled:
                forms["compiled"] = torch.compile
                if name == "small_cnn":
                    forms["graph"] = lambda model: torch.compile(model, mode="reduce-overhead")
            for form, apply in forms.items():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                ms = step_ms(apply(case.make()), case, precision)
                peak = torch.cuda.max_memory_allocated()
                steps.append({"case": name, "precision": precision, "form": form, "step_ms": ms, "peak_bytes": peak})
                print(f"{name} {precision} {form}: {ms:.3f} ms", flush=True)
    found = {"torch": torch.__version__, "card": torch.cuda.get_device_name(), "steps": steps}
    with open(arguments.json, "w", encoding="utf-8") as file:
        json.dump(found, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
