"""Parts that a kind of device lends to the search for its kernels' optimisations (`tune.py`): memory, and kernels that
are timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from manygrad.runtime.codegen.lowered import LoweredProgram
from manygrad.runtime.codegen.pipeline import Prepared
from manygrad.runtime.codegen.target import Machine
from manygrad.tensor.uop.uop import UOp


class Scratch(Protocol):
    """Memory of the device, and an array on the host that stands for it; they may be one."""

    handle: Any
    array: np.ndarray  # of bytes

    def push(self) -> None:
        """The device's memory is what the array is."""

    def pull(self) -> None:
        """The array is what the device's memory is."""


class Candidate(Protocol):
    """A kernel that is tried, its code loaded."""

    def run(self, handles: Sequence[Any], vars: tuple[int, ...], count: int = 1) -> float:
        """Runs it so many times in a row; the seconds of one run."""

    def part_s(self, handles: Sequence[Any], vars: tuple[int, ...]) -> float | None:
        """Seconds of the whole as a sixteenth of it foretells; None where it cannot be cut or is short."""


@dataclass(frozen=True)
class Bench:
    machine: Callable[[], Machine]
    key: Callable[[], bytes]  # what a winner depends on besides the kernel and the search's settings
    render: Callable[[LoweredProgram], str]
    load: Callable[[Prepared, UOp, str], Candidate]  # (prepared, ast, its code); RuntimeError: it does not compile
    memory: Callable[[int], Scratch]  # of so many bytes
    first_is_slow: bool = False  # whether the driver finishes a kernel when it is first run
