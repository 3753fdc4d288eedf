"""One step of models whose layers two ranks divide, here and by PyTorch's parallelize_module over Gloo, from the same weights on the same samples.

    .peer/bin/python bench/peer/divided.py --paceline target/release/paceline --out results/tensor_gradients.json

An MLP, and a Llama with grouped heads. With SGD the change of a weight, divided by the learning rate, is its gradient. Prints and records the largest difference of
losses and of gradients, relative to the largest element of each gradient, between: two ranks of ours and of PyTorch, and one rank of PyTorch and two. Exits with 1
if ours is further from PyTorch than 1e-5.
"""
import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from models import Llama, mlp
from step import divided, on_ranks

FEATURES, SAMPLES = (96, 192, 192, 192, 40), 64
LLAMA = {"layers": 3, "width": 64, "heads": 4, "kv_heads": 2, "intermediate": 96, "vocab": 256}
ROWS, SEQ = 8, 32
# So large that the change of a weight is rounded as its gradient would be, and not as the weight.
RATE = 8192
FLAGS = {
    "mlp": f"--data npy --input-dim {FEATURES[0]} --hidden-dim {FEATURES[1]} --num-layers 3 --output-dim {FEATURES[-1]} --batch-size {SAMPLES}",
    "llama": f"--data text --tokenizer bytes --seq-len {SEQ} --test-samples 1 --global-batch-size {ROWS} --optimizer sgd "
    + " ".join(f"--{key.replace('_', '-')} {size}" for key, size in LLAMA.items()),
}


def train(paceline: Path, folder: Path, model: str, flags: str) -> None:
    command = [paceline, "train", "--model", model, *FLAGS[model].split(), "--data-dir", "data", "--nproc", "2", "--mesh", "tp=2", *flags.split()]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def write_data(folder: Path, model: str) -> None:
    (folder / "data").mkdir()
    random = np.random.default_rng(1)
    if model == "llama":
        # A block for the test, and the token after the last one.
        (folder / "data/train.txt").write_bytes(random.integers(32, 127, (ROWS + 1) * SEQ + 1, dtype=np.uint8).tobytes())
        return
    for part in ("train", "test"):
        np.save(folder / f"data/x_{part}.npy", random.standard_normal((SAMPLES, FEATURES[0]), dtype=np.float32))
        np.save(folder / f"data/y_{part}.npy", random.standard_normal((SAMPLES, FEATURES[-1]), dtype=np.float32))


def weights(paceline: Path, folder: Path, checkpoint: str) -> dict[str, Tensor]:
    subprocess.run([paceline, "checkpoint", "export", checkpoint, "--to", f"{checkpoint}.safetensors"], cwd=folder, check=True, capture_output=True)
    stored = load_file(folder / f"{checkpoint}.safetensors")
    return {name.removeprefix("model."): torch.tensor(value) for name, value in stored.items()}


def names(model: str) -> dict[str, str]:
    """The names of the parameters here, and in PyTorch."""
    if model == "mlp":
        return {f"fc{at}.{kind}": f"{2 * at}.{kind}" for at in range(len(FEATURES) - 1) for kind in ("weight", "bias")}
    parts = {f"self_attn.{name}_proj": name for name in "qkvo"} | {f"mlp.{name}_proj": name for name in ("gate", "up", "down")}
    parts |= {"input_layernorm": "norm1", "post_attention_layernorm": "norm2"}
    ours = {f"model.layers.{at}.{part}": f"blocks.{at}.{theirs}" for at in range(LLAMA["layers"]) for part, theirs in parts.items()}
    ours |= {"model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "head"}
    return {f"{part}.weight": f"{theirs}.weight" for part, theirs in ours.items()}


def build(model: str, folder: Path) -> tuple[nn.Module, Tensor, Tensor]:
    """The model, and the samples of its step."""
    if model == "mlp":
        return mlp(FEATURES), *(torch.tensor(np.load(folder / f"data/{name}_train.npy")) for name in "xy")
    tokens = torch.tensor(list((folder / "data/train.txt").read_bytes()))
    inputs, targets = tokens[: ROWS * SEQ].view(ROWS, SEQ), tokens[1 : ROWS * SEQ + 1]
    return Llama(**LLAMA, seq=SEQ), inputs, targets


def step(rank: int, arguments: argparse.Namespace) -> None:
    """A step of PyTorch. Rank 0 writes loss and gradients."""
    folder, name = Path(arguments.folder), arguments.model
    start: dict[str, Tensor] = torch.load(folder / "start.pt")
    model, inputs, targets = build(name, folder)
    model.load_state_dict({theirs: start[ours] for ours, theirs in names(name).items()}, strict=False)
    if arguments.ranks > 1:
        model = divided(model, arguments.ranks)
    with loss_parallel() if name == "llama" and arguments.ranks > 1 else nullcontext():
        loss = (F.mse_loss if name == "mlp" else F.cross_entropy)(model(inputs), targets)
        loss.backward()
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    gradients = {of: value.grad for of, value in model.named_parameters()}
    whole = {of: grad.full_tensor() if isinstance(grad, DTensor) else grad for of, grad in gradients.items()}
    if rank == 0:
        torch.save({"loss": loss.item(), **{ours: whole[theirs] for ours, theirs in names(name).items()}}, folder / f"theirs{arguments.ranks}.pt")


def differences(own: dict[str, Tensor | float], other: dict[str, Tensor | float]) -> dict[str, float]:
    gradients = [((own[name] - other[name]).abs().max() / other[name].abs().max()).item() for name in own if name != "loss"]
    return {"loss": abs(own["loss"] / other["loss"] - 1), "gradients": max(gradients)}


def compared(paceline: Path, model: str) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_data(folder, model)
        # A step with a rate of almost nothing leaves the initial weights.
        train(paceline, folder, model, "--lr 1e-30 --steps 1 --save start")
        train(paceline, folder, model, f"--lr {RATE} --steps 1 --save end --json end.json")
        start, end = weights(paceline, folder, "start"), weights(paceline, folder, "end")
        torch.save(start, folder / "start.pt")
        summary = json.loads((folder / "end.json").read_text())
        ours = {"loss": summary["train_loss"], **{name: (start[name] - end[name]) / RATE for name in names(model)}}
        for ranks in (1, 2):
            on_ranks(step, argparse.Namespace(ranks=ranks, threads=1, folder=temporary, model=model), pinned=False)
        one, two = (torch.load(folder / f"theirs{ranks}.pt") for ranks in (1, 2))
    return {"ours, PyTorch": differences(ours, two), "PyTorch, 1 and 2 ranks": differences(one, two)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paceline", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = {model: compared(arguments.paceline.resolve(), model) for model in FLAGS}
    print(json.dumps(found, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps({"torch": torch.__version__, **found}, indent=2) + "\n")
    sys.exit(max(value for of in found.values() for value in of["ours, PyTorch"].values()) > 1e-5)


if __name__ == "__main__":
    main()
