"""The models of examples/ and the same ones in torch, with the same weights: do forward pass,
loss and one training step agree?

    python benchmarks/models_vs_torch.py [--models resnet18,vit,gpt2,lstm]

Printed for each model: parameters, the largest difference of the outputs and of the loss, relative to the largest
value, and of the parameters after one step of AdamW; then milliseconds a step on both sides. Agreement to 1e-4 is
asserted. Without torch only our time is printed.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from manygrad import Tensor, TinyJit, nn
from manygrad.nn import functional as F

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples"))
import gpt2
import lstm
import resnet18
import vit

TOLERANCE = 1e-4


def torch_models() -> dict[str, Callable[[], Any]]:
    """The same models in torch, by name."""
    import torch
    from torch.nn import functional as TF

    class TorchBlock(torch.nn.Module):
        def __init__(self, channels: int, out: int, stride: int):
            super().__init__()
            self.conv1, self.bn1 = torch.nn.Conv2d(channels, out, 3, stride, 1, bias=False), torch.nn.BatchNorm2d(out)
            self.conv2, self.bn2 = torch.nn.Conv2d(out, out, 3, 1, 1, bias=False), torch.nn.BatchNorm2d(out)
            self.downsample = None
            if stride != 1 or channels != out:
                self.downsample = torch.nn.Sequential(
                    torch.nn.Conv2d(channels, out, 1, stride, bias=False), torch.nn.BatchNorm2d(out)
                )

        def forward(self, x: Any) -> Any:
            shortcut = x if self.downsample is None else self.downsample(x)
            return TF.relu(self.bn2(self.conv2(TF.relu(self.bn1(self.conv1(x))))) + shortcut)

    class TorchResNet(torch.nn.Module):
        def __init__(self, blocks: list[int], width: int, classes: int):
            super().__init__()
            self.conv1, self.bn1 = torch.nn.Conv2d(3, width, 7, 2, 3, bias=False), torch.nn.BatchNorm2d(width)
            channels, self.stages = width, len(blocks)
            for i, count in enumerate(blocks):
                out = width * 2**i
                stage = [TorchBlock(channels if k == 0 else out, out, 2 if k == 0 and i else 1) for k in range(count)]
                channels = out
                self.add_module(f"layer{i + 1}", torch.nn.Sequential(*stage))
            self.fc = torch.nn.Linear(channels, classes)

        def forward(self, x: Any) -> Any:
            x = TF.max_pool2d(TF.relu(self.bn1(self.conv1(x))), 3, 2, 1)
            for i in range(self.stages):
                x = getattr(self, f"layer{i + 1}")(x)
            return self.fc(x.mean((2, 3)))

    class TorchViT(torch.nn.Module):
        def __init__(self, image: int, patch: int, classes: int, dim: int, layers: int, heads: int):
            super().__init__()
            self.patches = torch.nn.Conv2d(3, dim, patch, stride=patch)
            self.cls, self.positions = (
                torch.nn.Parameter(torch.zeros(1, 1, dim)),
                torch.nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, dim)),
            )
            layer = torch.nn.TransformerEncoderLayer(
                dim, heads, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.norm, self.head = torch.nn.LayerNorm(dim), torch.nn.Linear(dim, classes)

        def forward(self, x: Any) -> Any:
            x = self.patches(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.positions
            return self.head(self.norm(self.encoder(x)[:, 0]))

    class TorchConv1D(torch.nn.Module):
        def __init__(self, size: int, out: int):
            super().__init__()
            self.weight, self.bias = torch.nn.Parameter(torch.zeros(size, out)), torch.nn.Parameter(torch.zeros(out))

        def forward(self, x: Any) -> Any:
            return x @ self.weight + self.bias

    class TorchGPT2Block(torch.nn.Module):
        def __init__(self, dim: int, heads: int):
            super().__init__()
            self.heads = heads
            self.ln_1, self.ln_2 = torch.nn.LayerNorm(dim), torch.nn.LayerNorm(dim)
            self.attn = torch.nn.ModuleDict({"c_attn": TorchConv1D(dim, 3 * dim), "c_proj": TorchConv1D(dim, dim)})
            self.mlp = torch.nn.ModuleDict({"c_fc": TorchConv1D(dim, 4 * dim), "c_proj": TorchConv1D(4 * dim, dim)})

        def forward(self, x: Any) -> Any:
            b, t, c = x.shape
            q, k, v = (
                y.reshape(b, t, self.heads, -1).transpose(1, 2) for y in self.attn["c_attn"](self.ln_1(x)).chunk(3, -1)
            )
            x = x + self.attn["c_proj"](
                TF.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
            )
            return x + self.mlp["c_proj"](TF.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))

    class TorchGPT2(torch.nn.Module):
        def __init__(self, vocabulary: int, context: int, layers: int, heads: int, dim: int):
            super().__init__()
            self.wte, self.wpe = torch.nn.Embedding(vocabulary, dim), torch.nn.Embedding(context, dim)
            self.h, self.ln_f = (
                torch.nn.ModuleList([TorchGPT2Block(dim, heads) for _ in range(layers)]),
                torch.nn.LayerNorm(dim),
            )

        def forward(self, x: Any) -> Any:
            h = self.wte(x) + self.wpe.weight[: x.shape[1]]
            for block in self.h:
                h = block(h)
            return TF.linear(self.ln_f(h), self.wte.weight)

    class TorchLSTM(torch.nn.Module):
        def __init__(self, vocabulary: int, hidden: int, layers: int):
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(vocabulary, hidden), torch.nn.Linear(hidden, vocabulary)
            self.lstm = torch.nn.LSTM(hidden, hidden, layers, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.head(self.lstm(self.embedding(x))[0])

    return {
        "resnet18": lambda: TorchResNet([2, 2, 2, 2], 16, 10),
        "vit": lambda: TorchViT(32, 8, 10, 64, 2, 4),
        "gpt2": lambda: TorchGPT2(50, 16, 2, 4, 64),
        "lstm": lambda: TorchLSTM(50, 64, 2),
    }


def models() -> dict[str, tuple[Callable[[], Any], np.ndarray, np.ndarray]]:
    """(model, input, target) by name."""
    random = np.random.RandomState(0)
    images, text = random.randn(8, 3, 32, 32).astype(np.float32), random.randint(0, 50, (8, 17))
    return {
        "resnet18": (lambda: resnet18.resnet18(16, 10), images, random.randint(0, 10, 8)),
        "vit": (lambda: vit.ViT(32, 8, 10, 64, 2, 4), images, random.randint(0, 10, 8)),
        "gpt2": (lambda: gpt2.GPT2(50, 16, 2, 4, 64), text[:, :-1], text[:, 1:]),
        "lstm": (lambda: lstm.TextModel(50, 64, 2), text[:, :-1], text[:, 1:]),
    }


def logits(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def timed(step: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds."""
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:]) * 1e3


def ours(model: Any, x: Tensor, y: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """A training step -> (logits, loss)."""
    optimizer = nn.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)

    @TinyJit
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        out = logits(model(x))
        loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        return out, loss

    return lambda: step(x, y)


def theirs(model: Any, x: np.ndarray, y: np.ndarray) -> Callable[[], tuple[Any, Any]]:
    """The same step in torch."""
    import torch

    optimizer, tx, ty = (
        torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3),
        torch.from_numpy(x),
        torch.from_numpy(y),
    )

    def step() -> tuple[Any, Any]:
        optimizer.zero_grad()
        out = model(tx)
        loss = torch.nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), ty.reshape(-1))
        loss.backward()
        optimizer.step()
        return out.detach(), loss.detach()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="resnet18,vit,gpt2,lstm")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    with_torch = importlib.util.find_spec("torch") is not None
    found = models()
    print(
        f"{'model':10} {'parameters':>10} {'output':>9} {'loss':>9} {'step':>9} {'ms ours':>9} {'ms torch':>9}"
        if with_torch
        else f"{'model':10} {'parameters':>10} {'ms ours':>9}"
    )
    worst = 0.0
    for name in args.models.split(","):
        make, x, y = found[name]
        Tensor.manual_seed(0)
        model = make()
        count = sum(p.numel() for p in model.parameters())
        before = {k: t.numpy() for k, t in model.state_dict().items()}
        step = ours(model, Tensor(x), Tensor(y))
        out, loss = step()
        if not with_torch:
            print(f"{name:10} {count:10} {timed(lambda: step()[1].item(), args.repeats):9.2f}", flush=True)  # noqa: B023
            continue
        import torch

        other = torch_models()[name]()
        other.load_state_dict({k: torch.from_numpy(a.copy()) for k, a in before.items()})
        torch_step = theirs(other, x, y)
        want, want_loss = torch_step()
        state = other.state_dict()
        gaps = [
            float(np.abs(out.numpy() - want.numpy()).max() / np.abs(want.numpy()).max()),
            abs(loss.item() - want_loss.item()) / want_loss.item(),
            max(float(np.abs(t.numpy() - state[k].numpy()).max()) for k, t in model.state_dict().items()),
        ]
        worst = max(worst, *gaps)
        mine, his = timed(lambda: step()[1].item(), args.repeats), timed(torch_step, args.repeats)  # noqa: B023
        print(f"{name:10} {count:10} {gaps[0]:9.1e} {gaps[1]:9.1e} {gaps[2]:9.1e} {mine:9.2f} {his:9.2f}", flush=True)
    assert worst < TOLERANCE, f"the models differ by {worst:.1e}, more than {TOLERANCE}"


if __name__ == "__main__":
    main()
