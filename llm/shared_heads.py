"""How heads of queries and keys lie on several devices: some may share a head of keys, each with a copy of it.

Cut between heads of keys alone, nine of queries with three of keys go to two devices as six and three. Where both have
the head in the middle they are five and four; where there are fewer heads of keys than devices, nobody goes without.
"""

from __future__ import annotations

from collections.abc import Sequence

from manygrad import Tensor, nn
from manygrad.llm.model import Decoder, DecoderLinear, Heads


def shares(queries: int, keys: int, devices: int) -> list[range] | None:
    """The heads of queries of each device: as few of them as can be, which need no more heads of keys than if those
    were shared out whole. None where that is as good."""
    group, most = queries // keys, -(-keys // devices)
    for count in range(-(-queries // devices), most * group):
        found, begin = [], 0
        for _ in range(devices):
            end = min(begin + count, (begin // group + most) * group, queries)
            found.append(range(begin, end))
            begin = end
        if begin == queries:
            return found
    return None


class SharedHeads(Heads):
    """The order of heads over devices. Each has as many of queries as the one with the most, which the rest fills up
    with zeros, and as many of keys."""

    def __init__(self, parts: Sequence[range], keys: int, group: int):
        devices = len(parts)
        self.most, self.keys_each = max(map(len, parts)), -(-keys // devices)
        super().__init__(self.keys_each * devices, group, devices)
        firsts = [min(part.start // group, keys - self.keys_each) for part in parts]
        self.parts, self.key_parts = parts, [range(first, first + self.keys_each) for first in firsts]
        # of a device's first query in the group of its first key
        offsets = [part.start - first * group for part, first in zip(parts, firsts)]
        self.offsets = nn.Buffer(Tensor(offsets, dtype="int32").unsqueeze(1), persistent=False)

    def grouped(self, q: Tensor) -> Tensor:
        """(b, t, queries, head_dim) -> (b, t, keys, group, head_dim): each beside its head of keys. What stands where
        the device has none is not read again."""
        at = q.arange(self.keys_each * self.group) - self.offsets
        found = self._picked(q, at, self.most).contiguous()  # (many keys are going to be multiplied by it)
        return found.unflatten(2, (self.keys, self.group))

    def ungrouped(self, y: Tensor) -> Tensor:
        """And back."""
        at = y.arange(self.most) + self.offsets
        return self._picked(y.flatten(2, 3), at, self.keys_each * self.group)

    def _picked(self, x: Tensor, at: Tensor, size: int) -> Tensor:
        """The heads at (devices, n) of the `size` heads on each."""
        b, t, _, width = x.shape
        at = at.clamp(0, size - 1)[None, None, :, :, None]
        x = x.unflatten(2, (self.units, size))
        return x.gather(3, at.expand(b, t, *at.shape[2:4], width)).flatten(2, 3)


def share_heads(model: Decoder, devices: int) -> None:
    """Brings a decoder's heads into the order for so many devices, where one is better than whole heads of keys and no
    block of quantised weights belongs to two heads."""
    c = model.config
    parts = shares(c.heads, c.kv_heads, devices)
    outputs = [layer.self_attn.o_proj.weight for layer in model.layers]
    if parts is None or any(isinstance(w, nn.QuantizedWeight) and w.blocks.shape[1] % c.heads for w in outputs):
        return
    heads = SharedHeads(parts, c.kv_heads, c.heads // c.kv_heads)
    for layer in model.layers:
        attention = layer.self_attn
        attention.heads = heads
        _order(attention.q_proj, 0, c.heads, heads.parts)
        _order(attention.k_proj, 0, c.kv_heads, heads.key_parts)
        _order(attention.v_proj, 0, c.kv_heads, heads.key_parts)
        _order(attention.o_proj, 1, c.heads, heads.parts)


def _order(layer: DecoderLinear, dim: int, heads: int, parts: Sequence[range]) -> None:
    most = max(map(len, parts))

    def ordered(t: Tensor) -> Tensor:
        t = t.detach().unflatten(dim, (heads, t.shape[dim] // heads)).transpose(0, dim)
        rows = [t[part.start : part.stop].pad(((0, most - len(part)), *[(0, 0)] * (t.ndim - 1))) for part in parts]
        return Tensor.cat(*rows).transpose(0, dim).flatten(dim, dim + 1)

    w = layer.weight
    if isinstance(w, nn.QuantizedWeight):
        layer.weight = nn.QuantizedWeight(ordered(w.blocks), w.kind, w.activations)
    else:
        layer.weight = nn.Parameter(ordered(w), requires_grad=False)
    if layer.bias is not None and dim == 0:
        layer.bias = nn.Parameter(ordered(layer.bias), requires_grad=False)
