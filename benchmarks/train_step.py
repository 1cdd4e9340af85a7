"""Whole training steps, ours against torch (eager, DistributedDataParallel over Gloo), one worker and four on this machine.

    python benchmarks/train_step.py [--workers 1,4] [--models mlp,conv,gpt] [--steps 30]

Both sides run the same model, batch and optimiser in the same run, one after the other, with a share of the cores per worker
(cores // workers, at least one thread). Printed: median milliseconds a step after warm-up, and the ratio torch / ours (above 1:
ours is faster). Without torch only our side is printed. The global batch is the same for any number of workers.
"""

import argparse
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import time

import numpy as np

BATCH = {"mlp": 512, "conv": 256, "gpt": 16}
TOKENS, DIM, LAYERS, CONTEXT = 65, 128, 2, 64


def batch(model: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(step)
    n = BATCH[model]
    if model == "gpt":
        return random.randint(0, TOKENS, (n, CONTEXT)).astype(np.int64), random.randint(0, TOKENS, (n, CONTEXT)).astype(np.int64)
    shape = (n, 784) if model == "mlp" else (n, 1, 28, 28)
    return random.rand(*shape).astype(np.float32), random.randint(0, 10, n).astype(np.int64)


def ours(model: str, steps: int) -> list[float]:
    """Seconds of each step on this rank of `manygrad.world`."""
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples"))
    from train_gpt import GPT

    from manygrad import Tensor, TinyJit, nn, world
    from manygrad.tensor.nn.optim import SGD, AdamW
    from manygrad.tensor.nn.state import get_parameters

    class MLP:
        def __init__(self) -> None:
            self.layers = [nn.Linear(784, 512), nn.Linear(512, 512), nn.Linear(512, 10)]

        def __call__(self, x: Tensor) -> Tensor:
            return self.layers[2](self.layers[1](self.layers[0](x).relu()).relu())

    class Conv:
        def __init__(self) -> None:
            self.c1, self.c2, self.out = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3), nn.Linear(800, 10)

        def __call__(self, x: Tensor) -> Tensor:
            x = self.c1(x).relu().max_pool2d(2)
            return self.out(self.c2(x).relu().max_pool2d(2).flatten(1))

    net = {"mlp": MLP, "conv": Conv, "gpt": lambda: GPT(TOKENS, CONTEXT, LAYERS, 4, DIM)}[model]()
    for p in get_parameters(net):
        p.shard_(world.devices)
    optimizer = AdamW(get_parameters(net), lr=1e-3) if model == "gpt" else SGD(get_parameters(net), lr=0.01, momentum=0.9)

    @TinyJit
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        out = net(x)
        loss = out.reshape(-1, out.shape[-1]).cross_entropy(y.reshape(-1))
        loss.backward()
        optimizer.step()
        return loss

    times = []
    with Tensor.train():
        for i in range(steps):
            a, b = batch(model, i % 8)
            start = time.perf_counter()
            x, y = Tensor(a).shard(world.devices, axis=0), Tensor(b).shard(world.devices, axis=0)
            step(x, y).item()
            times.append(time.perf_counter() - start)
    return times


def theirs(model: str, steps: int, rank: int, size: int, port: int, threads: int) -> list[float]:
    """The same in torch; with several workers under DistributedDataParallel."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(threads)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
            self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
            self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

        def forward(self, x):
            b, t, c = x.shape
            q, k, v = (y.reshape(b, t, 4, c // 4).transpose(1, 2) for y in self.qkv(self.ln1(x)).chunk(3, dim=-1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
            return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(TOKENS, DIM), nn.Embedding(CONTEXT, DIM)
            self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
            self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, TOKENS, bias=False)

        def forward(self, x):
            return self.head(self.norm(self.blocks(self.tokens(x) + self.positions.weight[: x.shape[1]])))

    net = {
        "mlp": lambda: nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)),
        "conv": lambda: nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(800, 10)
        ),
        "gpt": GPT,
    }[model]()
    if size > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=size)
        net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3) if model == "gpt" else torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    times = []
    for i in range(steps):
        a, b = batch(model, i % 8)
        n = len(a) // size
        start = time.perf_counter()
        x, y = torch.from_numpy(a[rank * n : (rank + 1) * n]), torch.from_numpy(b[rank * n : (rank + 1) * n])
        optimizer.zero_grad()
        out = net(x)
        loss = F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))
        loss.backward()
        optimizer.step()
        loss.item()
        times.append(time.perf_counter() - start)
    if size > 1:
        dist.destroy_process_group()
    return times


def run_theirs(model: str, steps: int, workers: int, threads: int) -> list[float]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, os.path.abspath(__file__), "--torch-worker", model, str(steps), str(workers), str(port), str(threads)]
    processes = [subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE, text=True) for r in range(workers)]
    try:
        outputs = [p.communicate(timeout=600)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    return [float(x) for x in outputs[0].split()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", default="1,4")
    parser.add_argument("--models", default="mlp,conv,gpt")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--torch-worker", nargs=6)
    args = parser.parse_args()
    if args.torch_worker:
        model, steps, size, port, threads, rank = args.torch_worker
        print(*theirs(model, int(steps), int(rank), int(size), int(port), int(threads)))
        return
    from manygrad import launch

    have_torch = importlib.util.find_spec("torch") is not None
    print(f"{'model':<6} {'workers':>7} {'ours ms':>9} {'torch ms':>9} {'torch/ours':>10}")
    for workers in map(int, args.workers.split(",")):
        threads = max(1, (os.cpu_count() or 1) // workers)
        for model in args.models.split(","):
            mine = launch(ours, model, args.steps, nodes=workers)[0]
            ms = statistics.median(mine[len(mine) // 2 :]) * 1e3
            other = statistics.median(run_theirs(model, args.steps, workers, threads)[args.steps // 2 :]) * 1e3 if have_torch else float("nan")
            print(f"{model:<6} {workers:7d} {ms:9.2f} {other:9.2f} {other / ms:10.2f}", flush=True)


if __name__ == "__main__":
    main()
