"""Training steps in PyTorch on a card, one process: the models that `bench/card.py` trains.

    python3 gpu_step.py --json torch.json
    python3 gpu_step.py --cases cnn/bf16 mlp --forms eager graph compiled --json torch.json

Each step has a fused optimizer, channels-last convolutions, and a batch that lies on the card. With `tf32`, products and
convolutions in f32 round their factors. The forms: `eager`; `graph`, a whole step (forward, backward and optimizer) captured once
and replayed; `compiled`, by `torch.compile`; `autotuned`, the same with `mode="max-autotune"`. `smollm2` is SmolLM2-360M of
transformers. A value is the mean of 50 steps after 20, one after the other without a wait of the host, by its clock, as in
`card_steps`. Without a card the processor computes, which has no graphs: that shows only that the steps run.

All cases have the first form first. What is not timed after `--seconds` is left out. The JSON is written after each; a form that failed has an `error`.
"""
import argparse
import gc
import json
import signal
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import CLASSES, Cnn, Llama, mlp

CASES = ("small_cnn", "cnn", "mlp", "llama", "smollm2")
PRECISIONS = ("f32", "tf32", "bf16", "fp16")
FORMS = ("eager", "graph", "compiled", "autotuned")
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
ON_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CARD else "cpu")


class Logits(nn.Module):
    """SmolLM2-360M's shape, as transformers has it: a row of logits for each token."""

    def __init__(self, small: bool) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = (96, 48, 64, 2, 6, 2, 16) if small else (49152, 960, 2560, 32, 15, 5, 512)
        names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads max_position_embeddings"
        config = LlamaConfig(**dict(zip(names.split(), sizes)), tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa")
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits.flatten(0, 1)


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    loss_of: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD


def images(batch: int, image: tuple[int, int, int], channels: tuple[int, ...], hidden: int) -> Case:
    height, width, depth = image
    inputs = torch.randn(batch, depth, height, width, device=DEVICE).contiguous(memory_format=torch.channels_last)
    targets = torch.randint(0, CLASSES, (batch,), device=DEVICE)
    return Case(lambda: Cnn(image, channels, hidden).to(DEVICE, memory_format=torch.channels_last), inputs, targets)


def case_of(name: str, small: bool) -> Case:
    """The sizes are those of the example `card_steps`."""
    if name == "small_cnn":
        return images(4, (8, 8, 1), (2, 4, 8), 16) if small else images(64, (28, 28, 1), (32, 64, 128), 512)
    if name == "cnn":
        return images(4, (8, 8, 3), (4, 8, 16), 16) if small else images(512, (32, 32, 3), (64, 128, 256), 512)
    if name == "mlp":
        width = 16 if small else 4096
        rows = [torch.randn(width, width, device=DEVICE) for _ in range(2)]
        return Case(lambda: mlp([width] * 4).to(DEVICE), *rows, F.mse_loss)
    is_llama = name == "llama"
    vocab, shape = ((64, 96), ((1, 16),) * 2) if small else ((8192, 49152), ((4, 128), (8, 512)))
    tokens = torch.randint(0, vocab[not is_llama], shape[not is_llama], device=DEVICE)
    if is_llama:
        layers, width, intermediate = (2, 32, 48) if small else (4, 256, 688)
        sizes = {"layers": layers, "width": width, "heads": 4, "kv_heads": 4, "intermediate": intermediate}
        return Case(lambda: Llama(**sizes, vocab=vocab[0], seq=tokens.shape[1]).to(DEVICE), tokens, tokens.flatten())
    return Case(lambda: Logits(small).to(DEVICE), tokens, tokens.flatten(), optimizer=torch.optim.AdamW)


def captured(step: Callable[[], None], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """The whole step as a graph. Work before the capture has to be on another stream, and gradients have to come from the graph's memory."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def step_ms(case: Case, precision: str, form: str, warmup: int, timed: int) -> float:
    model = case.make()
    # A captured AdamW counts its steps on the card.
    options = {"capturable": True} if form == "graph" and case.optimizer is torch.optim.AdamW else {}
    optimizer = case.optimizer(model.parameters(), lr=0.01 if case.optimizer is torch.optim.SGD else 5e-5, fused=True, **options)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=precision == "fp16")
    dtype = NARROW.get(precision)
    if form in ("compiled", "autotuned"):
        model = torch.compile(model, mode="max-autotune" if form == "autotuned" else None)

    def step() -> None:
        with torch.autocast(DEVICE.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = case.loss_of(model(case.inputs), case.targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    run = captured(step, optimizer) if form == "graph" else step
    done = torch.cuda.synchronize if ON_CARD else lambda: None
    for _ in range(warmup):
        run()
    done()
    begin = time.perf_counter()
    for _ in range(timed):
        run()
    done()
    return 1e3 * (time.perf_counter() - begin) / timed


def measured(case: Case, precision: str, form: str, small: bool) -> dict[str, object]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.compiler.reset()
    gc.collect()
    if ON_CARD:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        found = {"step_ms": step_ms(case, precision, form, *((4, 2) if small else (20, 50)))}
        return found | ({"peak_bytes": torch.cuda.max_memory_allocated()} if ON_CARD else {})
    except ImportError as error:
        return {"error": f"left out: {error}"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def over(*_: object) -> None:
    raise TimeoutError("left out: no time")


def main() -> int:
    parser = argparse.ArgumentParser(description="Time training steps of PyTorch on a card.")
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="CASE[/PRECISION]", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS[:3], help="(default: eager graph compiled)")
    parser.add_argument("--small", action="store_true", help="sizes for a processor")
    parser.add_argument("--seconds", type=int, default=450, help="what is not timed by then is left out (default: 450)")
    parser.add_argument("--json", metavar="FILE", required=True)
    arguments = parser.parse_args()
    begin, steps = time.monotonic(), []
    signal.signal(signal.SIGALRM, over)
    signal.alarm(arguments.seconds)
    named = arguments.cases
    wanted = [(case, of) for case in CASES for of in PRECISIONS if case in named or f"{case}/{of}" in named]
    card = torch.cuda.get_device_name() if ON_CARD else None
    for form in arguments.forms if ON_CARD else [form for form in arguments.forms if form != "graph"]:
        for name, precision in wanted:
            is_over = time.monotonic() - begin > arguments.seconds
            found = {"error": "left out: no time"} if is_over else measured(case_of(name, arguments.small), precision, form, arguments.small)
            steps.append({"case": name, "precision": precision, "form": form, **found})
            print(json.dumps(steps[-1]), flush=True)
            with open(arguments.json, "w", encoding="utf-8") as file:
                json.dump({"torch": torch.__version__, "card": card, "steps": steps}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
