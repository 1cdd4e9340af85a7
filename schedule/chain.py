"""ChainSpec: what a CHAIN knows of its kernels, for the passes that make and change it and for those that run it."""

from __future__ import annotations

from dataclasses import dataclass

from manygrad.tensor.uop.serial import register


@register
@dataclass(frozen=True)
class ChainSpec:
    """The arg of a CHAIN of `blocks` times `rows`. `slots`: for each kernel, which argument of the CALL each of its
    PARAMs is; `temps`: (argument, offset, bytes) of those that hold one block, of which each thread may have its own;
    two that no kernel's turn needs both may overlap."""

    blocks: int
    rows: int
    slots: tuple[tuple[int, ...], ...]
    temps: tuple[tuple[int, int, int], ...]
