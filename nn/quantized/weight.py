"""QuantizedWeight: a matrix whose rows are GGUF's blocks, decoded inside of what reads it."""

from __future__ import annotations

from math import prod

from manygrad.nn.module import Module
from manygrad.nn.parameter import Buffer
from manygrad.nn.quantized.activations import rounded
from manygrad.nn.quantized.blocks import NAMED
from manygrad.nn.quantized.packed import PackedWeight
from manygrad.tensor.ops.elementary import with_gradient
from manygrad.tensor.tensor import Tensor

ACTIVATIONS = ("float32", "int8")


class QuantizedWeight(Module):
    """(rows, columns) float32 as `blocks`, (rows, columns / size of a block, bytes) uint8, of the format `kind`.

    `blocks` may be cut along dim 0 (rows) or 1 (columns, between blocks). It is not trained.

    `activations`: what products round their input to. "float32": nothing is lost. "int8": 32 elements of a row share a
    scale, and bytes are multiplied, as memory brings them; for that the blocks are also kept in another order
    (`packed.py`), which is cut as they are. Gradients are those of the exact product.
    """

    # of a product: its kernel decodes the weights, sooner than the matrix is decoded by itself (as many as
    # `schedule/stores/fusion.py` takes into a kernel, which a test asks for)
    FEW_ROWS = 16

    def __init__(self, blocks: Tensor, kind: str, activations: str = "float32"):
        if kind not in NAMED:
            raise ValueError(f"QuantizedWeight: the format {kind!r} is not known; known are {', '.join(NAMED)}")
        self.kind, self.format = kind, NAMED[kind]
        if blocks.ndim != 3 or blocks.shape[2] != self.format.nbytes or blocks.dtype.name != "uint8":
            raise ValueError(
                f"QuantizedWeight: blocks of {kind} are (rows, blocks, {self.format.nbytes}) uint8, "
                f"not {blocks.shape} {blocks.dtype.name}"
            )
        if activations not in ACTIVATIONS:
            raise ValueError(
                f"QuantizedWeight: activations {activations!r} are not known; known are {', '.join(ACTIVATIONS)}"
            )
        self.blocks = blocks if isinstance(blocks, Buffer) else Buffer(blocks)
        self.activations = activations
        self.packed = PackedWeight(blocks, kind) if activations == "int8" else None

    @property
    def shape(self) -> tuple[int, int]:
        rows, blocks, _ = self.blocks.shape
        return rows, blocks * self.format.size

    def dequantize(self) -> Tensor:
        """(rows, columns) float32."""
        return self.of(self.blocks)

    def of(self, blocks: Tensor) -> Tensor:
        """The numbers of other blocks of this format, (rows, blocks, bytes): (rows, columns) float32."""
        return self.format.values(blocks).reshape(blocks.shape[0], blocks.shape[1] * self.format.size)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x Wᵀ + b: (..., columns) -> (..., rows), in the type of x. For few rows its kernel reads the blocks."""
        rows, columns = self.shape
        if x.shape[-1] != columns:
            raise ValueError(f"QuantizedWeight.linear: x has {x.shape[-1]} columns, the weight {columns}")
        count = prod(x.shape[:-1])
        if self.packed is not None and isinstance(count, int) and count:
            out = self._rounded_product(x.float().reshape(count, columns)).reshape(*x.shape[:-1], rows)
        elif not isinstance(count, int) or not 1 <= count <= self.FEW_ROWS:
            out = x.float().matmul(self.dequantize().transpose(0, 1))
        else:
            dims = (self.blocks.shape[1], *self.format.dims)
            each = x.float().reshape(count, 1, *dims) * self.format.values(self.blocks).unsqueeze(0)
            out = each.sum(tuple(range(2, 2 + len(dims)))).reshape(*x.shape[:-1], rows)
        return (out if bias is None else out + bias).cast(x.dtype)

    def _rounded_product(self, x: Tensor) -> Tensor:
        """(count, columns) -> (count, rows); gradients are those of the exact product."""
        assert self.packed is not None

        def backward(g: Tensor, x: Tensor, blocks: Tensor) -> tuple[Tensor, None]:
            return g.matmul(self.of(blocks)), None

        return with_gradient(self.packed.product(rounded(x)), "rounded", self.kind, backward, x, self.blocks)

    def rows(self, index: Tensor) -> Tensor:
        """The rows `index` (...,) as (..., columns) float32: their bytes are gathered, then decoded."""
        _, blocks, nbytes = self.blocks.shape
        flat = index.reshape(-1)
        at = flat.reshape(-1, 1, 1).expand(flat.shape[0], blocks, nbytes)
        return self.of(self.blocks.gather(0, at)).reshape(*index.shape, self.shape[1])

    def formats(self) -> str:
        """Its own, and that of activations if they are rounded, for repr()."""
        return f"kind={self.kind!r}" + (f", activations={self.activations!r}" if self.packed is not None else "")

    def extra_repr(self) -> str:
        return f"{self.shape[0]}, {self.shape[1]}, {self.formats()}"
