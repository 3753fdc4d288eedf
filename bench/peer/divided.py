"""One step of an MLP whose layers two ranks divide, here and by PyTorch's parallelize_module over Gloo, from the same weights on the same samples.

    .peer/bin/python bench/peer/divided.py --paceline target/release/paceline --out results/tensor_gradients.json

With SGD and a learning rate of 1 the change of a weight is its gradient. Prints and records the largest difference of losses and of gradients, relative to the
largest element of each gradient, between: two ranks of ours and of PyTorch, and one rank of PyTorch and two. Exits with 1 if ours is further from PyTorch than 1e-5.
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from models import mlp
from step import divided, on_ranks

FEATURES, SAMPLES = (96, 192, 192, 192, 40), 64


def train(paceline: Path, folder: Path, flags: str) -> None:
    command = [paceline, "train", "--model", "mlp", "--data", "npy", "--data-dir", "data", "--input-dim", str(FEATURES[0]), "--hidden-dim", str(FEATURES[1]),
               "--num-layers", "3", "--output-dim", str(FEATURES[-1]), "--nproc", "2", "--mesh", "tp=2", "--batch-size", str(SAMPLES), *flags.split()]  # fmt: skip
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def weights(paceline: Path, folder: Path, checkpoint: str) -> dict[str, Tensor]:
    subprocess.run([paceline, "checkpoint", "export", checkpoint, "--to", f"{checkpoint}.safetensors"], cwd=folder, check=True, capture_output=True)
    stored = load_file(folder / f"{checkpoint}.safetensors")
    return {name.removeprefix("model."): torch.tensor(value) for name, value in stored.items()}


def names() -> dict[str, str]:
    """The names of the parameters here, and in PyTorch."""
    return {f"fc{at}.{kind}": f"{2 * at}.{kind}" for at in range(len(FEATURES) - 1) for kind in ("weight", "bias")}


def step(rank: int, arguments: argparse.Namespace) -> None:
    """A step of PyTorch. Rank 0 writes loss and gradients."""
    folder = Path(arguments.folder)
    start: dict[str, Tensor] = torch.load(folder / "start.pt")
    model = mlp(FEATURES)
    model.load_state_dict({theirs: start[ours] for ours, theirs in names().items()})
    if arguments.ranks > 1:
        model = divided(model, arguments.ranks)
    inputs, targets = (torch.tensor(np.load(folder / f"data/{name}_train.npy")) for name in "xy")
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters()}
    whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in gradients.items()}
    if rank == 0:
        torch.save({"loss": loss.item(), **{ours: whole[theirs] for ours, theirs in names().items()}}, folder / f"theirs{arguments.ranks}.pt")


def differences(own: dict[str, Tensor | float], other: dict[str, Tensor | float]) -> dict[str, float]:
    gradients = [((own[name] - other[name]).abs().max() / other[name].abs().max()).item() for name in names()]
    return {"loss": abs(own["loss"] / other["loss"] - 1), "gradients": max(gradients)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paceline", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    paceline = arguments.paceline.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "data").mkdir()
        random = np.random.default_rng(1)
        for part in ("train", "test"):
            np.save(folder / f"data/x_{part}.npy", random.standard_normal((SAMPLES, FEATURES[0]), dtype=np.float32))
            np.save(folder / f"data/y_{part}.npy", random.standard_normal((SAMPLES, FEATURES[-1]), dtype=np.float32))
        # A step with a rate of almost nothing leaves the initial weights.
        train(paceline, folder, "--lr 1e-30 --steps 1 --save start")
        train(paceline, folder, "--lr 1 --steps 1 --save end --json end.json")
        start, end = weights(paceline, folder, "start"), weights(paceline, folder, "end")
        torch.save(start, folder / "start.pt")
        summary = json.loads((folder / "end.json").read_text())
        ours = {"loss": summary["train_loss"], **{name: start[name] - end[name] for name in names()}}
        for ranks in (1, 2):
            on_ranks(step, argparse.Namespace(ranks=ranks, threads=1, folder=temporary), pinned=False)
        one, two = (torch.load(folder / f"theirs{ranks}.pt") for ranks in (1, 2))
    found = {"torch": torch.__version__, "ours, PyTorch": differences(ours, two), "PyTorch, 1 and 2 ranks": differences(one, two)}
    print(json.dumps(found, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(max(found["ours, PyTorch"].values()) > 1e-5)


if __name__ == "__main__":
    main()
