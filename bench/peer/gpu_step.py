"""Two training steps in PyTorch on a card, one process: the CNN and the MLP that `scripts/gpu_check.sh` trains.

    python3 gpu_step.py --precision bf16 --json torch.json

Each as it is and compiled, with a fused optimizer, channels-last convolutions, and a batch that lies on the card. Steps are
timed by events of the card, after a warm-up; the value is the median of 50. With f32, products are rounded to TF32 only if
`--tf32` says so. Prints a line for each and writes one JSON. Exits with 1 if there is no card.
"""
import argparse
import json
import statistics
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Cnn(nn.Module):
    """3x3 convolution, ReLU and 2x2 max-pool for each of 64, 128 and 256 channels, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        channels = (3, 64, 128, 256)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in zip(channels, channels[1:]))
        self.fc1 = nn.Linear(256 * 4 * 4, 512)
        self.fc2 = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.max_pool2d(F.relu(conv(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def step_ms(model: nn.Module, inputs: Tensor, targets: Tensor, loss_of, precision: str) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    dtype = {"f32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    times = []
    for number in range(70):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loss_of(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        end.record()
        end.synchronize()
        if number >= 20:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description="Time two training steps of PyTorch on a card.")
    parser.add_argument("--precision", choices=["f32", "bf16", "fp16"], default="f32")
    parser.add_argument("--tf32", action="store_true", help="round the factors of f32 products to TF32")
    parser.add_argument("--json", metavar="FILE", required=True)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: PyTorch sees no card", file=sys.stderr)
        return 1
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = arguments.tf32
    card = torch.device("cuda")
    found = {"torch": torch.__version__, "card": torch.cuda.get_device_name(), "precision": arguments.precision}
    cases = {
        "cnn": (
            lambda: Cnn().to(card, memory_format=torch.channels_last),
            torch.randn(512, 3, 32, 32, device=card).contiguous(memory_format=torch.channels_last),
            torch.randint(0, 10, (512,), device=card),
            F.cross_entropy,
        ),
        "mlp": (
            lambda: nn.Sequential(
                nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096)
            ).to(card),
            torch.randn(4096, 4096, device=card),
            torch.randn(4096, 4096, device=card),
            F.mse_loss,
        ),
    }
    for name, (make, inputs, targets, loss_of) in cases.items():
        for form in ("eager", "compiled"):
            torch.cuda.reset_peak_memory_stats()
            model = make() if form == "eager" else torch.compile(make())
            found[f"{name}_{form}_ms"] = step_ms(model, inputs, targets, loss_of, arguments.precision)
            found[f"{name}_{form}_peak_bytes"] = torch.cuda.max_memory_allocated()
            print(f"{name} {form}: {found[f'{name}_{form}_ms']:.3f} ms")
    with open(arguments.json, "w", encoding="utf-8") as file:
        json.dump(found, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
