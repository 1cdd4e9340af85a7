"""Training steps in torch: eager, or the model and its loss under torch.compile; its fused optimisers.
Channels of images stand first, as on our side."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from sides.data import CONTEXT, DIM, HEADS, LAYERS, TOKENS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (y.reshape(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.qkv(self.ln1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, DIM), nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, TOKENS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions.weight[: x.shape[1]])))


class BasicBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        same = stride == 1 and channels == out
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.shortcut(x))


def resnet18() -> nn.Module:
    blocks = [
        BasicBlock(max(64, 32 * 2**i) if k == 0 else 64 * 2**i, 64 * 2**i, 2 if k == 0 and i else 1)
        for i in range(4)
        for k in range(2)
    ]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def conv() -> nn.Module:
    layers = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(800, 10))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def trainer(
    model: str,
    threads: int,
    compiled: bool = False,
    rank: int = 0,
    size: int = 1,
    port: int = 0,
    address: str = "127.0.0.1",
    bucket_mb: float = 25.0,
) -> tuple[Callable[[np.ndarray, np.ndarray], float], int]:
    """A step that takes a global batch and gives its loss; and how many numbers are trained.
    With several workers DistributedDataParallel over Gloo."""
    torch.set_num_threads(threads)
    net: nn.Module = {"conv": conv, "gpt": GPT, "resnet": resnet18}.get(model, mlp)()
    count = sum(p.numel() for p in net.parameters())
    if size > 1:
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=size)
        net = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    kind = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True) if model == "gpt" else None
    optimizer = kind or torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = net(x)
        return F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))

    forward = torch.compile(loss_of) if compiled else loss_of

    def run(a: np.ndarray, b: np.ndarray) -> float:
        n = len(a) // size
        x, y = torch.from_numpy(a[rank * n : (rank + 1) * n]), torch.from_numpy(b[rank * n : (rank + 1) * n])
        optimizer.zero_grad()
        loss = forward(x, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return run, count
