"""A chain on the thread team: its blocks are the indices of a parallel loop."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from manygrad.native.chain import CHAIN_BYTES, Row, chain_table, temporaries_at
from manygrad.runtime.codegen.opts import Opt
from manygrad.runtime.devices.compile.chain import block_variables, bytes_of, chain_name, flops_of
from manygrad.runtime.devices.cpu.kernel import CPUKernel, run_on_team
from manygrad.runtime.devices.cpu.threads import team
from manygrad.runtime.devices.host import Memory
from manygrad.tensor.uop.uop import UOp


class CPUChain:
    """Blocks of a chain as the indices of a parallel loop; each thread has temporaries of its own
    (`native/chain.py`)."""

    source = ""
    opts: tuple[Opt, ...] = ()

    def __init__(self, ast: UOp, kernels: Sequence[CPUKernel]) -> None:
        self.spec, self.kernels = ast.arg, tuple(kernels)
        self.variables = block_variables(ast)
        self.name, self.flops, self.nbytes = chain_name(ast), flops_of(ast, kernels), bytes_of(ast)
        self.work = self.flops + self.nbytes
        self.address = team().chain_address
        self.records = tuple(r for k in kernels for r in k.records)
        begin = temporaries_at(sum(len(own) * 2 + 1 for own in self.spec.slots))
        # argument -> byte offset of the thread's own
        self.places = {t.argument: begin + t.offset for t in self.spec.temps}
        end = max(begin + t.offset + t.nbytes for t in self.spec.temps)
        assert end <= CHAIN_BYTES, f"{end} bytes of temporaries a block, of {CHAIN_BYTES}"
        self.totals = [(ctypes.c_int64 * (1 if k.fixed else self.spec.blocks))(*self.totals_of(k)) for k in kernels]

    def totals_of(self, kernel: CPUKernel) -> list[int]:
        """The total of its loop, for each block where they differ."""
        if kernel.fixed:
            return [kernel.fixed[0]]
        return [kernel.pieces({kernel.takes.names[0]: block})[0] for block in range(self.spec.blocks)]

    def arguments(self, handles: Sequence[Memory], vars: tuple[int, ...]) -> tuple[Any, Any, int, int]:
        """As a kernel's: (buffers, variables, total, grain)."""
        rows: list[Row] = []
        moves: list[int] = []
        words: list[int] = []
        for kernel, own, variables, totals in zip(self.kernels, self.spec.slots, self.variables, self.totals):
            buffers = kernel.arguments([handles[i] for i in own], variables)[0]
            rows.append(Row(kernel.address, len(words), ctypes.addressof(totals), 0 if kernel.fixed else 8))
            moves += (len(words) + j for j, i in enumerate(own) if i in self.places)
            words += (
                self.places[own[j]] if j < len(own) and own[j] in self.places else word or 0
                for j, word in enumerate(buffers)
            )
        return chain_table(rows, moves, words), None, self.spec.blocks, 1

    def __call__(self, handles: Sequence[Memory], vars: tuple[int, ...] = (), wait: bool = False) -> float | None:
        return run_on_team(self, handles, vars, wait)
