"""A character-level GPT on any plain text, data-parallel over `world.devices`.

    launcher examples/train_gpt.py --nodes 4
    launcher examples/train_gpt.py --nodes 4 -- --text my_book.txt --steps 1000

The default text is the American Standard Bible (1901, public domain) from the package `pythonbible`.
"""

import argparse
import math
import time

import numpy as np

from manygrad import GlobalCounters, Tensor, TinyJit, autocast, nn, world
from manygrad.checkpoint import Checkpointer
from manygrad.nn.optim import AdamW
from manygrad.nn.state import get_parameters


def default_text() -> str:
    """Genesis to Joshua, about 800,000 characters."""
    try:
        from pythonbible import get_verse_text
        from pythonbible.verses import VERSE_IDS
    except ImportError:
        raise SystemExit(
            "the default text comes with the package pythonbible: pip install pythonbible, or pass --text FILE"
        ) from None
    # a verse's number: book, chapter, verse
    return "\n".join(get_verse_text(v) or "" for v in VERSE_IDS if v < 7_000_000)


class Block:
    """Pre-norm transformer block: (B, T, C) -> (B, T, C)."""

    def __init__(self, dim: int, heads: int):
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def attend(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.reshape(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = q.scaled_dot_product_attention(k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))

    def __call__(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln1(x))
        return x + self.down(self.up(self.ln2(x)).gelu(approximate="tanh"))


class GPT:
    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, dim: int):
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(context, dim)
        self.tokens.weight.replace(self.tokens.weight * 0.02)
        self.positions.weight.replace(self.positions.weight * 0.02)
        self.blocks = [Block(dim, heads) for _ in range(layers)]
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        """(B, T) token numbers -> (B, T, vocabulary) logits."""
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", help="a plain text file")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="global batch size")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--autocast", action="store_true", help="products in bfloat16, parameters in float32")
    parser.add_argument("--checkpoint", metavar="DIR", help="save every 50 steps, and go on where the last run ended")
    args = parser.parse_args()
    text = open(args.text, encoding="utf-8").read() if args.text else default_text()
    if len(text) < args.context + 2:
        raise SystemExit(f"the text has {len(text)} characters, too few for a context of {args.context}")
    characters = sorted(set(text))
    code = {c: i for i, c in enumerate(characters)}
    data = np.array([code[c] for c in text], dtype=np.int32)

    Tensor.manual_seed(1)
    model = GPT(len(characters), args.context, args.layers, args.heads, args.dim)
    for p in get_parameters(model):
        p.shard_(world.devices)
    optimizer = AdamW(get_parameters(model), lr=args.lr)

    @TinyJit
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with autocast(enabled=args.autocast):
            logits = model(x)
            loss = logits.reshape(-1, len(characters)).cross_entropy(y.reshape(-1))
        loss.backward()
        optimizer.step()
        return loss

    checkpoints = Checkpointer(args.checkpoint, {"model": model, "optimizer": optimizer}, every=50, asynchronous=True)
    begun = checkpoints.resume()
    start = shown = time.perf_counter()
    if world.rank == 0:
        print(
            f"{len(text)} characters, {len(characters)} distinct; {sum(p.numel() for p in get_parameters(model))} "
            f"parameters; a blind guess costs {math.log(len(characters)):.2f}",
            flush=True,
        )
    first = last = 0.0
    with Tensor.train():
        for i in range(begun, args.steps):
            at = np.random.RandomState((0, i)).randint(0, len(data) - args.context - 1, args.batch)
            rows = at[:, None] + np.arange(args.context)
            x, y = (Tensor(a).shard(world.devices, axis=0) for a in (data[rows], data[rows + 1]))
            last = float(step(x, y).item())
            checkpoints.step(i + 1)
            first = first or last
            now = time.perf_counter()
            if i == begun:
                start = now
            if world.rank == 0 and (i == begun or now - shown > 1 or i == args.steps - 1):
                shown = now
                rate = (i - begun) * args.batch * args.context / max(now - start, 1e-9)
                print(
                    f"step {i + 1:4d}/{args.steps}  loss {last:.4f}  {rate:8.0f} tokens/s  "
                    f"{GlobalCounters.net_bytes / 1e6:8.1f} MB sent",
                    flush=True,
                )
    if world.rank == 0:
        print(f"loss {first:.3f} -> {last:.3f}")


if __name__ == "__main__":
    main()
