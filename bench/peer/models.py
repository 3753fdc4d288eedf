"""The models of `paceline train` in PyTorch."""
from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

CLASSES = 10
ROPE_THETA = 10_000.0
NORM_EPS = 1e-5


class Cnn(nn.Module):
    """3x3 convolution, ReLU and 2x2 max-pool for each number of channels, then two linear layers."""

    def __init__(self, image: tuple[int, int, int], channels: tuple[int, ...], hidden: int) -> None:
        super().__init__()
        height, width, depth = image
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in zip((depth, *channels), channels))
        side = 2 ** len(channels)
        self.fc1 = nn.Linear(channels[-1] * (height // side) * (width // side), hidden)
        self.fc2 = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.max_pool2d(F.relu(conv(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def mlp(features: Sequence[int]) -> nn.Sequential:
    """Linear layers, with a ReLU between every two of them."""
    layers = [layer for sizes in zip(features, features[1:]) for layer in (nn.Linear(*sizes), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: each pair of elements half a head apart turns by its angle."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Block(nn.Module):
    """Attention, then the feed-forward layer, each with a residual connection."""

    def __init__(self, width: int, heads: int, kv_heads: int, intermediate: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        kv_width = kv_heads * self.head_dim
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=NORM_EPS), nn.RMSNorm(width, eps=NORM_EPS)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_width, bias=False)
        self.v = nn.Linear(width, kv_width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, intermediate, bias=False)
        self.up = nn.Linear(width, intermediate, bias=False)
        self.down = nn.Linear(intermediate, width, bias=False)

    def heads_of(self, x: Tensor, heads: int) -> Tensor:
        batch, seq, _ = x.shape
        return x.view(batch, seq, heads, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm1(x)
        q = rotated(self.heads_of(self.q(h), self.heads), cos, sin)
        k = rotated(self.heads_of(self.k(h), self.kv_heads), cos, sin)
        v = self.heads_of(self.v(h), self.kv_heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, kv_heads: int, intermediate: int, vocab: int, seq: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, intermediate) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=NORM_EPS), nn.Linear(width, vocab, bias=False)
        head_dim = width // heads
        angle = torch.outer(torch.arange(seq), 1 / (ROPE_THETA ** (torch.arange(0, head_dim, 2) / head_dim)))
        angle = torch.cat((angle, angle), -1)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x)).flatten(0, 1)
