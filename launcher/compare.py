"""Where ranks differ that should run the same program on the same values: pure functions of what they sent.

A plan's outline has a line for each node of its graph, sources first: the user's line, a tab, the op with its type,
shape and argument. Values that ranks must hold alike come as lines of number, tab, digest, tab, description.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from dataclasses import dataclass, field

ADVICE = (
    "every rank must build the same tensors in the same order: look for a branch on the rank, for data or batches "
    "of different sizes, or for a mode (eval, no_grad) set on one rank"
)
VALUES_ADVICE = (
    "every rank must hold the same value: seed all ranks alike (Tensor.manual_seed), load the same data on all of "
    "them, or call manygrad.broadcast_(tensors) once after they are made"
)
UNPACKED = 16 << 20  # characters of an outline that are looked at
SHOWN = 5  # values that differ
ROUNDS = 4096  # comparisons that wait for a rank; of more the oldest are forgotten


def pack(outline: str, limit: int) -> str:
    """An outline for a message of `limit` characters, a tenth as long;
    of one that is too long as many of its first lines as fit."""
    while len(packed := base64.b85encode(zlib.compress(outline.encode("utf-8", "backslashreplace"))).decode()) > limit:
        outline = outline[: len(outline) // 2].rpartition("\n")[0]
    return packed


def unpack(packed: str) -> str:
    """The text that `pack` was given; empty for what is no packed outline."""
    try:
        return zlib.decompressobj().decompress(base64.b85decode(packed), UNPACKED).decode("utf-8", "replace")
    except (ValueError, binascii.Error, zlib.error):
        return ""


def first_difference(a: str, b: str) -> tuple[str, str] | None:
    """The first node in which two outlines differ, as each has it: `train.py:31: MUL float32 (8, 4)`;
    None where they are equal."""
    mine, theirs = a.split("\n"), b.split("\n")
    for x, y in zip(mine, theirs):
        if x.partition("\t")[2] != y.partition("\t")[2]:
            return _node(x), _node(y)
    if len(mine) == len(theirs):
        return None
    longer = (mine if len(mine) > len(theirs) else theirs)[min(len(mine), len(theirs))]
    return (_node(longer), "nothing more") if len(mine) > len(theirs) else ("nothing more", _node(longer))


def _node(line: str) -> str:
    where, _, what = line.partition("\t")
    return f"{where}: {what}" if where else what


def plans_differ(n: int, ranks: tuple[int, int], descriptions: tuple[str, str], outlines: tuple[str, str]) -> str:
    """Text about the `n`-th plans of two ranks."""
    text = f"the ranks run different programs: plan {n} differs"
    text += "".join(f"\n  rank {r}: {d}" for r, d in zip(ranks, descriptions))
    found = first_difference(*outlines)
    if found is not None and any(outlines):
        text += "\nThe first difference:" + "".join(f"\n  rank {r}: {d}" for r, d in zip(ranks, found))
    return f"{text}\n{ADVICE[0].upper()}{ADVICE[1:]}"


@dataclass
class Comparison:
    """The values of one round: what the first rank sent, and who has sent."""

    rank: int
    values: dict[str, tuple[str, str]]
    ranks: set[int] = field(default_factory=set)


class Comparisons:
    """The digests of all ranks, round by round."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.open: dict[str, Comparison] = {}

    def take(self, rank: int, name: str, text: str) -> str | None:
        """`rank`'s digests of round `name`; what to tell if one differs from another rank's."""
        values = parse_values(text)
        first = self.open.setdefault(name, Comparison(rank, values))
        first.ranks.add(rank)
        if len(first.ranks) == self.size or len(self.open) > ROUNDS:
            self.open.pop(name if len(first.ranks) == self.size else next(iter(self.open)))
        differ = [(first.values[k], v) for k, v in values.items() if k in first.values and first.values[k][0] != v[0]]
        if not differ:
            return None
        low, high = sorted((first.rank, rank))
        text = f"ranks {low} and {high} hold different values of what every rank must hold alike"
        for mine, theirs in differ[:SHOWN]:
            text += "".join(
                f"\n  rank {r}: {w} (digest {d[-16:]})" for r, (d, w) in sorted([(first.rank, mine), (rank, theirs)])
            )
        text += f"\n  and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
        return f"{text}\n{VALUES_ADVICE[0].upper()}{VALUES_ADVICE[1:]}"


def write_values(values: list[tuple[int, str, str]]) -> str:
    return "\n".join(f"{number}\t{digest}\t{what}" for number, digest, what in values)


def parse_values(text: str) -> dict[str, tuple[str, str]]:
    """number -> (digest, description); lines of another form are left out."""
    parts = [line.split("\t", 2) for line in text.split("\n")]
    return {p[0]: (p[1], p[2]) for p in parts if len(p) == 3}
