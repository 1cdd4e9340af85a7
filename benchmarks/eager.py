"""The plain training loop, as a user of PyTorch writes it, beside torch eager: the same models, sizes and optimisers,
in one run and in turns.

    python benchmarks/eager.py [--models mlp,mlp2,conv,resnet,gpt,unet,llama,lstm,lengths,bilstm,growing,pinn,penalty]
                               [--threads 1,2] [--steps 30]

`plain` is the loop with nothing around it, under FOLLOW=1, `captured` the same step in a TinyJit. Printed for each:
milliseconds a step (the median, without the first ten) and, in brackets, of processor time; the ratios to torch (below
1: ours is faster); and how long our first step took with empty caches. Each side is a process of its own with as many
threads as said.
Without torch only our times are printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

MODELS = (
    "mlp", "mlp2", "conv", "resnet", "gpt", "unet", "llama", "lstm", "lengths", "bilstm", "growing", "pinn", "penalty",
)  # fmt: skip
WARM = 10
RNG = np.random.default_rng(0)
BATCHES = 4


def batches(model: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs and targets."""
    floats = lambda *s: RNG.standard_normal(s).astype(np.float32)  # noqa: E731
    whole = lambda n, *s: RNG.integers(0, n, s)  # noqa: E731
    one: dict[str, Callable[[int], tuple[np.ndarray, np.ndarray]]] = {
        "mlp": lambda i: (floats(64, 64), whole(10, 64)),
        "mlp2": lambda i: (floats(64, 784), whole(10, 64)),
        "conv": lambda i: (floats(64, 1, 28, 28), whole(10, 64)),
        "resnet": lambda i: (floats(16, 3, 32, 32), whole(10, 16)),
        "gpt": lambda i: (whole(96, 8, 64), whole(96, 8 * 64)),
        "unet": lambda i: (floats(4, 1, 32, 32), floats(4, 1, 32, 32)),
        "llama": lambda i: (floats(1, 1, 256), floats(1, 1, 256)),
        "lstm": lambda i: (floats(16, 32, 32), whole(10, 16)),
        "lengths": lambda i: (floats(16, (24, 32, 28, 20)[i], 32), whole(10, 16)),
        "bilstm": lambda i: (floats(16, 32, 32), whole(10, 16)),
        "growing": lambda i: (whole(96, 1, 1), whole(96, 1, 1)),
        "pinn": lambda i: (floats(256, 2), floats(1)),
        "penalty": lambda i: (floats(64, 32), floats(64, 32)),
    }
    return [one[model](i) for i in range(BATCHES)]


def model_of(nn: Any, F: Any, lib: Any, model: str) -> Any:
    """The model, written once for both libraries: `nn`, `F` and the module that has `cat`."""

    class Block(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, dim: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

        def forward(self, x: Any) -> Any:
            b, t, c = x.shape
            q, k, v = self.qkv(self.n1(x)).reshape(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
            return x + self.down(F.gelu(self.up(self.n2(x))))

    class GPT(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, layers: int = 3, dim: int = 128, heads: int = 4) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(96, dim), nn.Embedding(64, dim)
            self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(layers)])
            self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 96)

        def forward(self, x: Any) -> Any:
            h = self.tokens(x) + self.positions.weight[: x.shape[1]]
            for block in self.blocks:
                h = block(h)
            return self.head(self.norm(h)).reshape(-1, 96)

    class Res(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, a: int, b: int, stride: int) -> None:
            super().__init__()
            self.c1, self.b1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
            self.c2, self.b2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
            self.skip = nn.Conv2d(a, b, 1, stride, bias=False) if (a, stride) != (b, 1) else nn.Identity()

        def forward(self, x: Any) -> Any:
            y = self.b2(self.c2(F.relu(self.b1(self.c1(x)))))
            return F.relu(y + self.skip(x))

    class UNet(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, w: int = 16) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(1, w, 3, 1, 1), nn.Conv2d(w, 2 * w, 3, 1, 1)
            self.c = nn.Conv2d(2 * w, 4 * w, 3, 1, 1)
            self.u2, self.d2 = nn.ConvTranspose2d(4 * w, 2 * w, 2, 2), nn.Conv2d(4 * w, 2 * w, 3, 1, 1)
            self.u1, self.d1 = nn.ConvTranspose2d(2 * w, w, 2, 2), nn.Conv2d(2 * w, w, 3, 1, 1)
            self.out = nn.Conv2d(w, 1, 1)

        def forward(self, x: Any) -> Any:
            a = F.relu(self.a(x))
            b = F.relu(self.b(F.max_pool2d(a, 2)))
            c = F.relu(self.c(F.max_pool2d(b, 2)))
            b = F.relu(self.d2(lib.cat([self.u2(c), b], 1)))
            return self.out(F.relu(self.d1(lib.cat([self.u1(b), a], 1))))

    class Recurrent(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, both: bool) -> None:
            super().__init__()
            self.lstm = nn.LSTM(32, 64, batch_first=True, bidirectional=both)
            self.out = nn.Linear(128 if both else 64, 10)

        def forward(self, x: Any) -> Any:
            y, _ = self.lstm(x)
            return self.out(y[:, -1])

    class Llama(nn.Module):  # type: ignore[misc, name-defined]
        """One block that decodes a token over a cache of 128."""

        def __init__(self, dim: int = 256, heads: int = 8, room: int = 128) -> None:
            super().__init__()
            self.heads = heads
            self.n1, self.n2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
            self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
            self.gate, self.up, self.down = (
                nn.Linear(dim, 4 * dim, bias=False),
                nn.Linear(dim, 4 * dim, bias=False),
                nn.Linear(4 * dim, dim, bias=False),
            )
            self.keys = lib.zeros(1, heads, room, dim // heads)
            self.values = lib.zeros(1, heads, room, dim // heads)

        def forward(self, x: Any) -> Any:
            b, t, c = x.shape
            h = self.n1(x)
            cut = (b, t, self.heads, c // self.heads)
            q, k, v = (f(h).reshape(*cut).transpose(1, 2) for f in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(q, lib.cat([self.keys, k], 2), lib.cat([self.values, v], 2))
            x = x + self.o(y.transpose(1, 2).reshape(b, t, c))
            h = self.n2(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    made: dict[str, Callable[[], Any]] = {
        "mlp": lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        "mlp2": lambda: nn.Sequential(
            nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        ),
        "conv": lambda: nn.Sequential(
            *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(800, 10)),
        ),
        "resnet": lambda: nn.Sequential(
            *(nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
            *(Res(32, 32, 1), Res(32, 64, 2), Res(64, 128, 2)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)),
        ),
        "gpt": GPT,
        "growing": GPT,
        "unet": UNet,
        "llama": Llama,
        "lstm": lambda: Recurrent(False),
        "lengths": lambda: Recurrent(False),
        "bilstm": lambda: Recurrent(True),
        "pinn": lambda: nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)),
        "penalty": lambda: nn.Sequential(nn.Linear(32, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)),
    }
    return made[model]()


def trainer(nn: Any, F: Any, lib: Any, model: str, optim: Any) -> Callable[[Any, Any], Any]:
    """A training step, or the decoding of a token, as a plain function of tensors."""
    net = model_of(nn, F, lib, model)
    if model == "llama":

        def decode(x: Any, y: Any) -> Any:
            with lib.no_grad():
                return net(x).sum()

        return decode
    optimizer = (
        optim.AdamW(net.parameters(), lr=1e-3)
        if model in ("gpt", "unet") or "lstm" in model or model == "lengths"
        else optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    )
    if model in ("pinn", "penalty"):
        return (heat if model == "pinn" else penalty)(lib, net, optimizer)
    loss_of = F.mse_loss if model == "unet" else F.cross_entropy

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = loss_of(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def heat(lib: Any, net: Any, optimizer: Any) -> Callable[[Any, Any], Any]:
    """A step towards a solution of the heat equation, at points in space and time."""

    def step(points: Any, _: Any) -> Any:
        points.requires_grad_()
        optimizer.zero_grad()
        (d,) = lib.autograd.grad(net(points).sum(), points, create_graph=True)
        (second,) = lib.autograd.grad(d[:, 0].sum(), points, create_graph=True)
        loss = ((second[:, 0] - d[:, 1]) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def penalty(lib: Any, critic: Any, optimizer: Any) -> Callable[[Any, Any], Any]:
    """A step of the critic of a WGAN with gradient penalty."""

    def step(real: Any, fake: Any) -> Any:
        optimizer.zero_grad()
        between = (0.3 * real + 0.7 * fake).requires_grad_()
        (g,) = lib.autograd.grad(critic(between).sum(), between, create_graph=True)
        loss = critic(fake).mean() - critic(real).mean() + 10 * ((g.norm(2, dim=1) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def generator(nn: Any, F: Any, lib: Any, tokens: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Forty tokens, one after the other, each from all those before and without a cache."""
    net = model_of(nn, F, lib, "growing")

    def text(x: Any, y: Any) -> Any:
        row = [1, 2, 3]
        with lib.no_grad():
            for _ in range(40):
                logits = net(tokens(np.array([row])))
                row.append(int(logits[-1].argmax().item()))
        return None

    return text


def worker(side: str, model: str, steps: int, threads: int) -> None:
    """Runs one side and prints its times as JSON."""
    np.random.seed(0)
    if side == "torch":
        import torch
        from torch import nn, optim
        from torch.nn import functional as F

        torch.manual_seed(0)
        torch.set_num_threads(threads)
        lib: Any = torch
        tensor = torch.from_numpy
    else:
        import manygrad
        from manygrad import Tensor, TinyJit
        from manygrad import nn as our_nn
        from manygrad.nn import functional as our_f
        from manygrad.nn import optim as our_optim

        nn, F, optim = our_nn, our_f, our_optim  # type: ignore[assignment]
        Tensor.manual_seed(0)
        tensor = Tensor  # type: ignore[assignment]

        class Ours:
            zeros = staticmethod(lambda *s: Tensor.zeros(*s).contiguous().realize())
            cat = staticmethod(lambda parts, dim: parts[0].cat(*parts[1:], dim=dim))
            no_grad, autograd = manygrad.no_grad, manygrad.autograd

        lib = Ours
    if model == "growing":
        if side == "captured":
            sys.exit("generation reads a token from each of its calls: there is no step to capture")
        step = generator(nn, F, lib, tensor)
    else:
        step = trainer(nn, F, lib, model, optim)
        if side == "captured":
            step = TinyJit(step)
    given = batches(model)
    walls, cpus = [], []
    for i in range(steps + WARM):
        a, b = given[i % BATCHES]
        wall, cpu = time.perf_counter(), time.process_time()
        out = step(tensor(a), tensor(b))
        if out is not None:
            out.item()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    print(json.dumps({"first": walls[0], "wall": float(np.median(walls[WARM:])), "cpu": float(np.median(cpus[WARM:]))}))


def ask(side: str, model: str, steps: int, threads: int, cache: str) -> dict[str, float] | None:
    """What a process of a side measured; None where it failed."""
    environment = {
        **os.environ,
        "THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "CACHE_DIR": cache,
        "FOLLOW": "1",
    }
    environment.pop("OPENBLAS_CORETYPE", None)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # (an installed package is compiled)
    command = [sys.executable, os.path.abspath(__file__), "--worker", side, model, str(steps), str(threads)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        print(done.stderr[-600:], file=sys.stderr)
        return None
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--worker", nargs=4, metavar=("SIDE", "MODEL", "STEPS", "THREADS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        side, model, steps, threads = options.worker
        worker(side, model, int(steps), int(threads))
        return
    sides = ["torch"] * (importlib.util.find_spec("torch") is not None) + ["plain", "captured"]
    ratios = [f"{s}/torch" for s in sides[-2:]]
    print(f"{'model':10}{'threads':>8}" + "".join(f"{s:>18}" for s in (*sides, *ratios, "first step")))
    for model in options.models.split(","):
        for threads in map(int, options.threads.split(",")):
            with tempfile.TemporaryDirectory() as cache:
                found = {s: ask(s, model, options.steps, threads, cache) for s in sides}
            row = f"{model:10}{threads:>8}" + "".join(f"{_times(found[s]):>18}" for s in sides)
            row += "".join(f"{_ratio(found[s], found.get('torch')):>18}" for s in sides[-2:])
            first = found["plain"]
            print(row + f"{'-' if first is None else format(first['first'], '.2f') + ' s':>18}", flush=True)


def _times(r: dict[str, float] | None) -> str:
    return "-" if r is None else f"{r['wall'] * 1e3:.2f} ({r['cpu'] * 1e3:.1f})"


def _ratio(r: dict[str, float] | None, torch: dict[str, float] | None) -> str:
    return "-" if r is None or torch is None else f"{r['wall'] / torch['wall']:.2f}"


if __name__ == "__main__":
    main()
