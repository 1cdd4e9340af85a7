"""The decoders of Llama, SmolLM2, Mistral, Qwen 2 and 3, Gemma 1 to 3: one class, `Config` says which.

Parameters have Hugging Face's names and shapes; rows of queries and keys stand as the file has them
(`Config.neighbours`). Keys and values of the tokens so far are kept in the layers (`Decoder.reserve`) and written in
positions, where `positions.py` says: one capture serves all positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manygrad import Tensor, nn
from manygrad.llm.config import Config
from manygrad.llm.kv_cache import ROUNDED_ROWS, KVCache
from manygrad.llm.pages import PAGE, pages_of
from manygrad.llm.positions import Positions, TokenPerText
from manygrad.llm.rope import rotate
from manygrad.nn import functional as F

Give = Callable[..., Any]  # give(name, shape): a parameter; with optional=True None where the file has none
Weight = nn.Parameter | nn.QuantizedWeight


def frozen(weight: Tensor | nn.QuantizedWeight) -> Weight:
    return weight if isinstance(weight, nn.QuantizedWeight) else nn.Parameter(weight, requires_grad=False)


def product(x: Tensor, weight: Weight, bias: Tensor | None = None, rounds: bool = False) -> Tensor:
    """`rounds`: x to the type of the weight, where it has many rows: few take as long as reading the weight."""
    if isinstance(weight, nn.QuantizedWeight):
        return weight.linear(x, bias)
    return F.linear(rounded(x, weight) if rounds else x, weight.cast(x.dtype), bias)


def rounded(x: Tensor, weight: Weight) -> Tensor:
    """To the type of a weight and back, where x has many rows; kept as that: a product reads both as they are."""
    if x.numel() < ROUNDED_ROWS * x.shape[-1]:
        return x
    assert isinstance(weight, Tensor), "quantised weights round what they are given themselves"
    return x.cast(weight.dtype).contiguous().cast(x.dtype)


class DecoderLinear(nn.Module):
    """x Wᵀ + b in the type of x, the weight (out, in) in its own. `rounds`: see `product`."""

    rounds = False

    def __init__(self, weight: Tensor | nn.QuantizedWeight, bias: Tensor | None):
        self.weight = frozen(weight)
        self.bias = None if bias is None else nn.Parameter(bias.float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias, self.rounds)


def linear(give: Give, name: str, size: int, out: int) -> DecoderLinear:
    """The layer `name`; it has a bias where the file has one."""
    return DecoderLinear(give(f"{name}.weight", (out, size)), give(f"{name}.bias", (out,), optional=True))


class TokenEmbedding(nn.Module):
    """Rows of a table (vocabulary, dim), which may be cut along its rows over devices."""

    def __init__(self, weight: Tensor | nn.QuantizedWeight):
        self.weight = frozen(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """(b, t) -> (b, t, dim). Over several devices each looks into the groups of rows that it has, and the rows
        found are added to zeros of the others: they travel, not the table."""
        w = self.weight
        table = w.blocks.flatten(1) if isinstance(w, nn.QuantizedWeight) else w
        size, width = table.shape
        groups = row_groups(size, table.device)
        if groups == 1:
            return w.rows(tokens) if isinstance(w, nn.QuantizedWeight) else F.embedding(tokens, w)
        table = table.unflatten(0, (groups, size // groups))
        first = (tokens.arange(groups) * (size // groups)).reshape(groups, 1)
        row = tokens.reshape(1, -1) - first
        here = (row >= 0) & (row < size // groups)
        at = here.where(row, 0).unsqueeze(-1).expand(groups, tokens.numel(), width)
        found = here.unsqueeze(-1).where(table.gather(1, at), 0).sum(0).cast(table.dtype)
        if isinstance(w, nn.QuantizedWeight):
            found = w.of(found.reshape(-1, *w.blocks.shape[1:]))
        return found.reshape(*tokens.shape, w.shape[1])


def row_groups(rows: int, device: str | tuple[str, ...]) -> int:
    """The smallest number of equal groups of rows that gives each of several devices one; 1 if that is many."""
    if isinstance(device, str):
        return 1
    return next((n for n in range(len(device), 257) if rows % n == 0), 1)


class Norm(nn.Module):
    """RMSNorm over the last dim."""

    def __init__(self, give: Give, name: str, size: int, eps: float, offset: float):
        weight = give(f"{name}.weight", (size,)).float()
        self.weight = nn.Parameter(weight + offset if offset else weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Heads(nn.Module):
    """How heads of queries stand beside the heads of keys that they share: `group` to each of `keys`, in `units` equal
    parts, between which devices may be cut."""

    def __init__(self, keys: int, group: int, units: int):
        self.keys, self.group, self.units = keys, group, units

    def grouped(self, q: Tensor) -> Tensor:
        """(b, t, queries, head_dim) -> (b, t, keys, group, head_dim)."""
        return q.unflatten(2, (self.keys, self.group))

    def ungrouped(self, y: Tensor) -> Tensor:
        """And back."""
        return y.flatten(2, 3)


class DecoderAttention(nn.Module):
    def __init__(self, c: Config, give: Give, layer: int):
        name = f"layers.{layer}.self_attn"
        queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.config, self.window, self.local = c, c.window_of(layer), c.windowed[layer]
        self.heads = Heads(c.kv_heads, c.heads // c.kv_heads, c.kv_heads)
        self.q_proj = linear(give, f"{name}.q_proj", c.dim, queries)
        self.k_proj = linear(give, f"{name}.k_proj", c.dim, keys)
        self.v_proj = linear(give, f"{name}.v_proj", c.dim, keys)
        self.o_proj = linear(give, f"{name}.o_proj", queries, c.dim)
        if c.qk_norm:
            self.q_norm = Norm(give, f"{name}.q_norm", c.head_dim, c.norm_eps, c.norm_offset)
            self.k_norm = Norm(give, f"{name}.k_norm", c.head_dim, c.norm_eps, c.norm_offset)

    def reserve(self, pages: int, page: int, kind: str) -> None:
        """The KV cache."""
        self.cache = KVCache(pages, self.heads.keys, page, self.config.head_dim, kind, self.q_proj.rounds)

    def forward(self, x: Tensor, positions: Positions, table: Tensor) -> Tensor:
        """(b, t, dim), `table` turned for their places -> the same."""
        c, (b, t, _), (keys, group) = self.config, x.shape, (self.heads.keys, self.heads.group)
        q, k, v = (f(x).reshape(b, t, -1, c.head_dim) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = self.heads.grouped(q).permute(0, 2, 3, 1, 4), k.transpose(1, 2), v.transpose(1, 2)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        positions.write(self.cache, Tensor.stack([rotate(k.unsqueeze(2), table, c.neighbours).squeeze(2), v]))
        q = rotate(q, table, c.neighbours).reshape(b, keys, group * t, c.head_dim)  # the heads of a group share keys
        y = positions.attend(q, self.cache, self.window, self._score).reshape(b, keys, group, t, c.head_dim)
        return self.o_proj(self.heads.ungrouped(y.permute(0, 3, 1, 2, 4)).flatten(2))

    def _score(self, products: Tensor) -> Tensor:
        scores, cap = products * self.config.scale, self.config.score_cap
        return (scores / cap).tanh() * cap if cap else scores


class FeedForward(nn.Module):
    def __init__(self, c: Config, give: Give, layer: int):
        name, self.gelu = f"layers.{layer}.mlp", c.gelu
        self.gate_proj = linear(give, f"{name}.gate_proj", c.dim, c.hidden)
        self.up_proj = linear(give, f"{name}.up_proj", c.dim, c.hidden)
        self.down_proj = linear(give, f"{name}.down_proj", c.hidden, c.dim)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
        if self.gate_proj.rounds:  # (fewer bytes to the next product)
            gate = rounded(gate, self.gate_proj.weight)
        return self.down_proj(gate * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, c: Config, give: Give, layer: int):
        def norm(name: str) -> Norm:
            return Norm(give, f"layers.{layer}.{name}", c.dim, c.norm_eps, c.norm_offset)

        self.post_norms = c.post_norms
        self.input_layernorm, self.self_attn = norm("input_layernorm"), DecoderAttention(c, give, layer)
        self.post_attention_layernorm, self.mlp = norm("post_attention_layernorm"), FeedForward(c, give, layer)
        if c.post_norms:
            self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
            self.post_feedforward_layernorm = norm("post_feedforward_layernorm")

    def forward(self, x: Tensor, positions: Positions, table: Tensor) -> Tensor:
        added = self.self_attn(self.input_layernorm(x), positions, table)
        if not self.post_norms:
            x = x + added
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(added)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Decoder(nn.Module):
    """Token numbers (b, t) to logits (b, vocabulary)."""

    def __init__(self, config: Config, give: Give):
        """`give(name, shape)` is asked for every parameter by Hugging Face's name, less `model.` in front."""
        c = self.config = config
        self.embed_tokens = TokenEmbedding(give("embed_tokens.weight", (c.vocabulary, c.dim)))
        self.layers = [DecoderLayer(c, give, i) for i in range(c.layers)]
        self.norm = Norm(give, "norm", c.dim, c.norm_eps, c.norm_offset)
        head = give("lm_head.weight", (c.vocabulary, c.dim), optional=True)
        self.lm_head = None if head is None else DecoderLinear(head, None)

    def reserve(self, texts: int, length: int, kind: str | None = None) -> None:
        """Room for `length` tokens of each of `texts`, which are read and written together, each in one page; `kind`:
        of keys and values (`kv_cache.KINDS`); None: what products' inputs are rounded to, else float32."""
        self._reserve(texts, length, length, kind)

    def reserve_pages(self, tokens: int, length: int, kind: str | None = None) -> None:
        """Room for so many tokens of all texts together, in pages (`pages.py`); each has `length` at most."""
        self._reserve(1 + pages_of(tokens), PAGE, length, kind)  # (one is NOBODY's)

    def _reserve(self, pages: int, page: int, length: int, kind: str | None) -> None:
        kind = kind or ("bfloat16" if self.layers[0].self_attn.q_proj.rounds else "float32")
        for layer in self.layers:
            layer.self_attn.reserve(pages, page, kind)
        c = self.config
        self.table = nn.Buffer(c.rope.table(length), persistent=False)
        self.local_table = self.table if c.local_rope == c.rope else nn.Buffer(c.local_rope.table(length), False)

    def forward(self, tokens: Tensor, position: Any, last: Any, begin: Any = 0) -> Tensor:
        """(b, t) tokens, the first at `position` -> (b, vocabulary): what follows token `last` of the t. `begin`: a
        window shows nothing before it (`positions.bound`)."""
        return self.at(tokens, TokenPerText(tokens.shape[1], position, begin), last)

    def at(self, tokens: Tensor, positions: Positions, last: Any) -> Tensor:
        """The same for tokens that stand at `positions`."""
        table, local = positions.rotations(self.table), positions.rotations(self.local_table)
        x = self.embed_tokens(tokens).float() * self.config.embedding_scale
        for layer in self.layers:
            x = layer(x, positions, local if layer.self_attn.local else table)
        x = self.norm(x[:, last])
        head = self.embed_tokens if self.lm_head is None else self.lm_head  # (the embedding, where they are tied)
        logits = product(x, head.weight)
        cap = self.config.logit_cap
        return (logits / cap).tanh() * cap if cap else logits
