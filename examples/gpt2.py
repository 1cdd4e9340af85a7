"""GPT-2 (Radford et al., 2019) with Hugging Face's parameter names: training, saving, loading,
writing with a key-value cache.

    python examples/gpt2.py
    python examples/gpt2.py --load gpt2/model.safetensors --layers 12 --heads 12 --dim 768 --context 1024 \\
        --vocabulary 50257 --steps 0 --tokens 464 3290

A checkpoint that people share loads as it is. The default trains a small one on bytes of text, saves it, loads it again
and lets it write. Writing is one captured step: the position is a symbolic variable, so every token replays the same
kernels.
"""

import argparse
import os
import tempfile

import numpy as np

from manygrad import Tensor, TinyJit, Variable, autocast, nn, world
from manygrad.checkpoint import Checkpointer
from manygrad.nn import functional as F
from manygrad.nn.data import DataLoader, TokenDataset
from manygrad.nn.state import safe_load, safe_save

TEXT = (
    b"to shard or not to shard, that is the reduction: whether a ring is nobler than a tree of halves and doubles. "
    * 40
)


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out), as GPT-2's files have it."""

    def __init__(self, size: int, out: int):
        super().__init__()
        self.weight = nn.Parameter(Tensor.randn(size, out) * 0.02)
        self.bias = nn.Parameter(Tensor.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = Conv1D(dim, 3 * dim), Conv1D(dim, dim)

    def forward(self, x: Tensor, cache: Tensor | None = None, position: object = None, length: object = None) -> Tensor:
        """(B, T, C) -> (B, T, C); with a cache (2, heads, context, C / heads) one token of one text at `position`."""
        b, t, c = x.shape
        q, k, v = (
            y.reshape(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.c_attn(x).chunk(3, dim=-1)
        )
        if cache is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            cache[:, :, position] = Tensor.stack([k[0, :, 0], v[0, :, 0]])
            keys, values = cache[0, :, :length], cache[1, :, :length]  # (heads, length, C / heads)
            weights = ((q[0] * keys).sum(-1) * (c // self.heads) ** -0.5).softmax(-1)
            y = (weights.unsqueeze(-1) * values).sum(1).reshape(1, self.heads, 1, c // self.heads)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(dim), Attention(dim, heads), nn.LayerNorm(dim)
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(dim, 4 * dim), "c_proj": Conv1D(4 * dim, dim)})

    def forward(self, x: Tensor, *cached: object) -> Tensor:
        x = x + self.attn(self.ln_1(x), *cached)
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, vocabulary: int = 50257, context: int = 1024, layers: int = 12, heads: int = 12, dim: int = 768):
        super().__init__()
        self.context, self.heads, self.dim = context, heads, dim
        self.wte, self.wpe = nn.Embedding(vocabulary, dim), nn.Embedding(context, dim)
        self.h = nn.ModuleList([Block(dim, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(dim)
        for table in (self.wte, self.wpe):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T) tokens -> (B, T, vocabulary) logits; the head is the embedding."""
        h = self.wte(x) + self.wpe.weight[: x.shape[1]]
        for block in self.h:
            h = block(h)
        return F.linear(self.ln_f(h), self.wte.weight)

    def token(self, x: Tensor, caches: list[Tensor], position: object, length: object) -> Tensor:
        """(1, 1) token at `position` -> (1, 1) the likeliest that follows;
        the caches hold the `length` tokens up to it."""
        h = self.wte(x) + self.wpe.weight[position]
        for block, cache in zip(self.h, caches):
            h = block(h, cache, position, length)
        return F.linear(self.ln_f(h), self.wte.weight).argmax(-1)

    def write(self, tokens: list[int], count: int) -> list[int]:
        """`count` tokens that follow `tokens`, the likeliest each time."""
        if len(tokens) + count > self.context + 1:
            raise ValueError(f"{len(tokens)} tokens and {count} more do not fit the context of {self.context}")
        device = self.wte.weight.device
        caches = [
            Tensor.zeros(2, self.heads, self.context, self.dim // self.heads).to(device).contiguous().realize()
            for _ in self.h
        ]
        step = TinyJit(self.token)
        position, length = Variable("position", 0, self.context - 1), Variable("length", 1, self.context)
        out = list(tokens)
        with Tensor.no_grad():
            for i in range(len(tokens) + count - 1):
                following = step(Tensor([[out[i]]]).to(device), caches, position.bind(i), length.bind(i + 1))
                if i + 1 >= len(tokens):
                    out.append(int(following.item()))
        return out[len(tokens) :]

    def load(self, path: str) -> None:
        """Weights with Hugging Face's names: an optional prefix, and masks or a copied head that are not needed."""
        state = {k.removeprefix("transformer."): t for k, t in safe_load(path).items()}
        extra = [k for k in state if k == "lm_head.weight" or k.endswith((".attn.bias", ".attn.masked_bias"))]
        self.load_state_dict({k: t for k, t in state.items() if k not in extra})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="global batch size")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--load", help="a safetensors file to start from")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TEXT[:9]), help="what to go on from")
    parser.add_argument("--write", type=int, default=24, help="tokens to write")
    parser.add_argument("--autocast", action="store_true", help="products in bfloat16, parameters in float32")
    parser.add_argument("--checkpoint", metavar="DIR", help="save every 50 steps, and go on where the last run ended")
    args = parser.parse_args()

    Tensor.manual_seed(0)
    size = (args.vocabulary, args.context, args.layers, args.heads, args.dim)
    model = GPT2(*size)
    if args.load:
        model.load(args.load)
    model.to(world.devices)
    if args.steps:
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        optimizer = nn.optim.AdamW(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
            lr=args.lr,
            betas=(0.9, 0.95),
            weight_decay=0.1,
        )
        data = TokenDataset(np.frombuffer(TEXT, np.uint8), args.context, stride=5)
        loader = DataLoader(data, args.batch, shuffle=True, drop_last=True, devices=world.devices)

        @TinyJit
        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            with autocast(enabled=args.autocast):
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        losses: list[float] = []
        state = {"model": model, "optimizer": optimizer, "loader": loader, "losses": losses}
        checkpoints = Checkpointer(args.checkpoint, state, every=50, asynchronous=True)
        checkpoints.resume()
        while len(losses) < args.steps:
            for x, y in loader:
                losses.append(step(x, y).item())
                checkpoints.step(len(losses))
                if world.rank == 0 and (len(losses) % 10 == 0 or len(losses) == 1):
                    print(f"step {len(losses)}/{args.steps}  loss {losses[-1]:.4f}", flush=True)
                if len(losses) == args.steps:
                    break
        if world.rank == 0:
            print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    if world.size > 1:
        return  # one worker is enough to write
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        safe_save(model.state_dict(), path)
        again = GPT2(*size)
        again.load(path)
    written = again.write(args.tokens, args.write)
    print(f"it writes: {bytes(written)!r}" if args.vocabulary == 256 else f"it writes the tokens {written}")


if __name__ == "__main__":
    main()
