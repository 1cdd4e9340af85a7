"""ChainSpec: what a CHAIN knows of its kernels, for the passes that make and change it and for those that run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from manygrad.tensor.uop.serial import register


@register
class Temporary(NamedTuple):
    """An argument of a CHAIN that holds one block; each thread may have its own."""

    argument: int
    offset: int  # in bytes, in the thread's memory
    nbytes: int


@register
@dataclass(frozen=True)
class ChainSpec:
    """The arg of a CHAIN of `blocks` times `rows`. `slots`: for each kernel, which argument of the CALL each of its
    PARAMs is; of the `temps`, two that no kernel's turn needs both may overlap."""

    blocks: int
    rows: int
    slots: tuple[tuple[int, ...], ...]
    temps: tuple[Temporary, ...]
