"""Random numbers by counter: element i of draw k under seed s is a pure function of (s, k, i).

The generator is Philox 2x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) on the global element
index, so the same numbers come out at any sharding and on every device. Each draw takes the next stream number.
"""

from __future__ import annotations

import math
from math import prod
from typing import TYPE_CHECKING, Any

from manygrad.tensor import environment as env
from manygrad.tensor.dtype import DType, dtypes, to_dtype
from manygrad.tensor.ops.creation import _shape

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class _Generator:
    """Seed and draw counter; the counter is a tensor, so that a replayed JIT step draws fresh numbers."""

    seed = int(env.SEED)
    counters: dict[Any, Any] = {}


def _next_stream(device: Any) -> Tensor:
    from manygrad.tensor.tensor import Tensor

    counter = _Generator.counters.get(device)
    if counter is None:
        counter = Tensor([0], dtype=dtypes.uint32, device=device if isinstance(device, str) else None)
        if not isinstance(device, str):
            counter = counter.to(device)
        counter = counter.contiguous().realize()
        _Generator.counters[device] = counter
    stream = (counter + 1).contiguous()  # stored: a later draw moves the counter on
    counter.assign(stream)
    return stream


def philox(counter: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit words per 64-bit (counter low, counter high = 0) and 32-bit key."""
    lo, hi = counter, counter * 0
    for i in range(10):
        product = lo.cast(dtypes.uint64) * 0xD256D193
        top = (product >> 32).cast(dtypes.uint32)
        round_key = key + ((0x9E3779B9 * i) & 0xFFFFFFFF)
        lo, hi = top ^ round_key ^ hi, product.cast(dtypes.uint32)
    return lo, hi


class RandomMixin:
    @staticmethod
    def manual_seed(seed: int = 0) -> None:
        """Start the generator again; the same on every rank gives the same numbers everywhere."""
        _Generator.seed = int(seed) & 0xFFFFFFFF
        _Generator.counters.clear()

    @staticmethod
    def initial_seed() -> int:
        return _Generator.seed

    @staticmethod
    def _random_bits(count: int, device: Any) -> Tensor:
        """uint32 words of shape (count,)."""
        from manygrad.tensor.engine import default_device
        from manygrad.tensor.tensor import Tensor, _canonical

        where = _canonical(device) if device is not None else default_device()
        stream = _next_stream(where)
        key = stream * 0x85EBCA6B ^ ((_Generator.seed * 0xC2B2AE35 + 0x27D4EB2F) & 0xFFFFFFFF)
        index = Tensor.arange(count, device=where if isinstance(where, str) else None).cast(dtypes.uint32)
        return philox(index, key)[0]

    @staticmethod
    def rand(*shape: Any, dtype: DType | str | None = None, device: Any = None, requires_grad: bool | None = None) -> Tensor:
        """Uniform on [0, 1)."""
        from manygrad.tensor.tensor import Tensor

        dims, kind = _shape(shape), to_dtype(dtype) if dtype is not None else dtypes.default_float
        bits = Tensor._random_bits(prod(dims), device)
        unit = (bits >> 8).cast(dtypes.float32) * (1.0 / (1 << 24))
        t = unit.cast(kind).reshape(dims)
        t.requires_grad = requires_grad
        return t

    @staticmethod
    def uniform(*shape: Any, low: float = 0.0, high: float = 1.0, dtype: DType | str | None = None, device: Any = None, requires_grad: bool | None = None) -> Tensor:
        from manygrad.tensor.tensor import Tensor

        t = Tensor.rand(*shape, dtype=dtype, device=device) * (high - low) + low
        t.requires_grad = requires_grad
        return t

    @staticmethod
    def randn(*shape: Any, dtype: DType | str | None = None, device: Any = None, requires_grad: bool | None = None) -> Tensor:
        """Standard normal (Box–Muller)."""
        from manygrad.tensor.tensor import Tensor

        u, v = Tensor.rand(*shape, device=device), Tensor.rand(*shape, device=device)
        t = ((1 - u).log() * -2).sqrt() * (v * (2 * math.pi)).cos()
        t = t.cast(to_dtype(dtype) if dtype is not None else dtypes.default_float)
        t.requires_grad = requires_grad
        return t

    @staticmethod
    def randint(*shape: Any, low: int = 0, high: int = 10, dtype: DType | str | None = None, device: Any = None) -> Tensor:
        """Integers in [low, high), int64 unless told."""
        from manygrad.tensor.tensor import Tensor

        if high <= low:
            raise ValueError(f"randint: the range [{low}, {high}) is empty")
        dims = _shape(shape)
        bits = Tensor._random_bits(prod(dims), device).cast(dtypes.uint64)
        t = ((bits * (high - low)) >> 32).cast(dtypes.int64) + low
        return t.cast(to_dtype(dtype) if dtype is not None else dtypes.int64).reshape(dims)

    @staticmethod
    def randperm(n: int, device: Any = None) -> Tensor:
        """A random order of 0..n−1: the order that sorts n random words."""
        from manygrad.tensor.tensor import Tensor

        return Tensor._random_bits(n, device).argsort()

    @staticmethod
    def glorot_uniform(*shape: Any, device: Any = None, requires_grad: bool | None = None) -> Tensor:
        from manygrad.tensor.tensor import Tensor

        dims = _shape(shape)
        bound = math.sqrt(6 / (dims[0] + prod(dims[1:])))
        return Tensor.uniform(*dims, low=-bound, high=bound, device=device, requires_grad=requires_grad)

    @staticmethod
    def kaiming_uniform(*shape: Any, a: float = 0.0, device: Any = None, requires_grad: bool | None = None) -> Tensor:
        from manygrad.tensor.tensor import Tensor

        dims = _shape(shape)
        bound = math.sqrt(3.0) * math.sqrt(2.0 / (1 + a * a)) / math.sqrt(prod(dims[1:]))
        return Tensor.uniform(*dims, low=-bound, high=bound, device=device, requires_grad=requires_grad)

    def dropout(self: Tensor, p: float = 0.5) -> Tensor:
        """Zero each element with probability p and scale the rest by 1/(1−p), while `Tensor.training`."""
        from manygrad.tensor.ops.dropout import dropout

        return dropout(self, p, None)
