"""How a decoder is cut over devices (tensor parallelism): rules for `nn.shard_rules`.

Heads of keys with the queries that they serve, hidden features, and rows of the vocabulary are cut; a layer then has
two all-reduces of (tokens, dim). Heads are never cut in two, however many devices there are.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from model import Decoder, row_groups

Rule = int | tuple[int, int] | None


def rules(model: Decoder, devices: tuple[str, ...]) -> dict[str, Rule]:
    heads, rows = model.config.kv_heads, row_groups(model.config.vocabulary, devices)
    found: dict[str, Rule] = {
        "*.[qkv]_proj.weight": (0, heads), "*.[qkv]_proj.bias": (0, heads), "*.o_proj.weight": (1, heads),
        "*.self_attn.cache": 2, "*.gate_proj.*": 0, "*.up_proj.*": 0, "*.down_proj.weight": 1,
    }  # fmt: skip
    if rows > 1:
        found |= {"embed_tokens.weight": (0, rows), "lm_head.weight": (0, rows)}
    names = [*model.state_dict(), *(name for name, _ in model.named_buffers())]
    return {p: rule for p, rule in found.items() if any(fnmatchcase(n, p) for n in names)}  # (biases may not be there)
