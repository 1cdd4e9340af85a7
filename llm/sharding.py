"""How a decoder is cut over devices (tensor parallelism): rules for `nn.shard_rules`.

Heads of keys with the queries that they serve, hidden features, and rows of the vocabulary are cut; a layer then has
two all-reduces of (tokens, dim). Heads are never cut in two, however many devices there are (`shared_heads.py`: some
may have the same one), nor are the blocks of quantised weights: hidden features are cut between those of `down_proj`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from manygrad import nn
from manygrad.llm.model import Decoder, Weight, row_groups
from manygrad.nn.sharding import ShardRule


def rules(model: Decoder, devices: tuple[str, ...]) -> dict[str, ShardRule]:
    heads, rows = model.layers[0].self_attn.heads.units, row_groups(model.config.vocabulary, devices)
    hidden: ShardRule = 0
    down = [layer.mlp.down_proj.weight for layer in model.layers]
    if quantised := [w.format.size for w in down if isinstance(w, nn.QuantizedWeight)]:
        hidden = (0, model.config.hidden // max(quantised))
    found: dict[str, ShardRule] = {
        "*.[qkv]_proj.*": (0, heads), "*.self_attn.cache.*": 2, "*.gate_proj.*": hidden, "*.up_proj.*": hidden,
        "*.down_proj.weight*": (1, hidden[1]) if isinstance(hidden, tuple) else 1,
    }  # fmt: skip
    if all(_is_cut_by_heads(layer.self_attn.o_proj.weight, heads) for layer in model.layers):
        found["*.o_proj.weight*"] = (1, heads)
    if rows > 1:
        found |= {"embed_tokens.weight*": (0, rows), "lm_head.weight*": (0, rows)}
    names = [*model.state_dict(), *(name for name, _ in model.named_buffers())]
    return {p: rule for p, rule in found.items() if any(fnmatchcase(n, p) for n in names)}  # (biases may not be there)


def _is_cut_by_heads(weight: Weight, heads: int) -> bool:
    """Whether no block of the weight's rows belongs to two of the parts that heads are (else it is on every device)."""
    return not isinstance(weight, nn.QuantizedWeight) or weight.blocks.shape[1] % heads == 0
