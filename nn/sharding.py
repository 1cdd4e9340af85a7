"""A model over devices by rules: which dim of which tensor is cut.

    nn.shard_rules(model, {"*.up.weight": 0, "*.down.weight": 1}, world.devices)

A product whose weight (out, in) is cut along `out` gives features that are cut, one whose weight is cut along `in`
takes them and ends in an all-reduce: Shoeybi et al., Megatron-LM (arXiv 1909.08053). No layer knows of it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from manygrad.nn import walk
from manygrad.tensor.tensor import Tensor

M = TypeVar("M")
ShardRule = int | tuple[int, int] | None


def shard_rules(model: M, rules: Mapping[str, ShardRule], devices: Sequence[str]) -> M:
    """Brings every parameter and buffer of `model` to `devices`, in place.

    `rules` maps patterns (`fnmatch`) of names to how these tensors lie; the first that fits decides:

    - an int: cut along this dim, in parts that differ by one at most;
    - (dim, n): the dim is n parts of one size, as heads are, and is cut between parts only. n need not be a multiple of
      the number of devices;
    - None, or no pattern: a full copy on each device.

    Values that are not computed yet, such as those of a file, are then computed by each device for its part alone.
    Nothing has changed after a ValueError: of a pattern that fits no name, or a dim that is not there.
    """
    named = list(walk.tensors(model))
    _check_patterns(rules, [name for name, _ in named])
    found: dict[int, tuple[Tensor, ShardRule, str]] = {}
    for name, t in named:
        rule = next((r for pattern, r in rules.items() if fnmatchcase(name, pattern)), None)
        _, other, first = found.setdefault(id(t), (t, rule, name))
        if other != rule:
            raise ValueError(f"shard_rules: {first} and {name} are one tensor, their rules say {other} and {rule}")
        _check(name, t, rule)
    for t, rule, _ in found.values():
        placed = _placed(t.detach(), rule, devices)
        if placed.uop is not t.uop or placed.device != t.device:
            t.replace(placed)
    return model


def _check_patterns(rules: Mapping[str, ShardRule], names: Sequence[str]) -> None:
    for pattern in rules:
        if not any(fnmatchcase(name, pattern) for name in names):
            kinds = sorted({re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names})
            near = difflib.get_close_matches(pattern, kinds, 3, 0.4) or kinds[:3]
            raise ValueError(
                f"shard_rules: no tensor of the model has a name like {pattern!r}; near it: {', '.join(near) or 'none'}"
            )


def _check(name: str, t: Tensor, rule: Any) -> None:
    if rule is None:
        return
    dim, parts = rule if isinstance(rule, tuple) else (rule, 1)
    if not isinstance(dim, int) or not -t.ndim <= dim < t.ndim:
        raise ValueError(f"shard_rules: {name} of shape {t.shape} has no dim {dim}; its rule is {rule}")
    if parts < 1 or t.shape[dim] % parts:
        raise ValueError(f"shard_rules: dim {dim} of {name}, {t.shape[dim]} long, is not {parts} parts of one size")


def _placed(t: Tensor, rule: ShardRule, devices: Sequence[str]) -> Tensor:
    if not isinstance(rule, tuple):
        return t.shard(devices, rule)
    dim, parts = rule[0] % t.ndim, rule[1]
    return t.unflatten(dim, (parts, t.shape[dim] // parts)).shard(devices, dim).flatten(dim, dim + 1).contiguous()
