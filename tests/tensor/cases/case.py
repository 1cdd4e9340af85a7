"""A `Case` says once how an operator is called, what NumPy makes of the same input, and which inputs there are.

`tests/tensor/test_ops.py` runs every case forward, backward, and sharded over devices with uneven parts;
`benchmarks/ops_vs_torch.py` runs the same calls on torch tensors.
So a call uses PyTorch's names and argument order only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.oracle import numbers

Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass(frozen=True)
class Sample:
    """`arrays` become tensors; `args` and `kwargs` follow them in the call and in the oracle."""

    arrays: tuple[np.ndarray, ...]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """`op`: `Tensor.cumsum`, `functional.gelu`, `torch.cat`: the name that docs/ops.md lists, and how it is called.

    `oracle(*arrays, *args, **kwargs)` in NumPy gives the result, or a tuple of results. `samples(draw)` draws one
    input; float arrays come in the type that `dtypes` names (the forward test draws one; the gradient test takes
    float64). `variant` tells two cases of one op apart. `grad=False` where there is none or it is not unique at the
    drawn points.
    """

    op: str
    oracle: Callable[..., Any]
    samples: Callable[[Draw], Sample]
    variant: str = ""
    dtypes: Sequence[str] = ("float32", "float64")
    grad: bool = True
    shard: bool = True
    # per dtype, where the usual tolerance is too tight; say why beside it
    rtol: dict[str, float] = field(default_factory=dict)
    call: Callable[..., Any] | None = None  # only where the plain call by name will not do; works on torch tensors too

    @property
    def name(self) -> str:
        return f"{self.op}[{self.variant}]" if self.variant else self.op

    def run(self, library: Library, arrays: Sequence[Any], sample: Sample) -> Any:
        if self.call is not None:
            return self.call(library, *arrays, *sample.args, **sample.kwargs)
        space, _, name = self.op.partition(".")
        if space == "Tensor":
            return getattr(arrays[0], name)(*arrays[1:], *sample.args, **sample.kwargs)
        owner = library.functional if space == "functional" else library.top
        return getattr(owner, name)(*arrays, *sample.args, **sample.kwargs)


@dataclass(frozen=True)
class Library:
    """Where functions live: manygrad's own or torch's."""

    name: str
    top: Any  # `torch`, or manygrad's `Tensor` (its static methods)
    functional: Any


# *** inputs that many operators share ***

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (5,), (0,), (3, 5), (2, 0, 3), (4, 1, 3), (2, 3, 2))


def shapes(draw: Draw, min_dims: int = 0, max_dims: int = 3, empty: bool = True) -> tuple[int, ...]:
    """Small shapes with 0-d and 0-sized ones among them."""
    return tuple(draw(st.lists(st.integers(0 if empty else 1, 5), min_size=min_dims, max_size=max_dims)))


def array(draw: Draw, shape: tuple[int, ...], dtype: str = "float64", low: float = -4, high: float = 4) -> np.ndarray:
    """Numbers in [low, high], never a float 0 (kinks are there); distinct where the type has enough values."""
    return numbers(np.random.default_rng(draw(st.integers(0, 1 << 20))), dtype, shape, low, high)


def distinct(draw: Draw, shape: tuple[int, ...], dtype: str = "float64") -> np.ndarray:
    """A shuffled arithmetic progression: no ties, so an argmax or a sort order is
    unique and differences do not cross."""
    n = prod(shape)
    order = np.random.default_rng(draw(st.integers(0, 1 << 20))).permutation(n)
    return np.asarray((order - n / 2 + 0.25) / 4 if "float" in dtype else order).reshape(shape).astype(dtype)


def broadcastable(draw: Draw, count: int = 2) -> list[tuple[int, ...]]:
    """`count` shapes that broadcast together: dims dropped in front or made 1."""
    whole = shapes(draw)
    out = []
    for _ in range(count):
        kept = whole[draw(st.integers(0, len(whole))) :]
        out.append(tuple(1 if draw(st.booleans()) and draw(st.booleans()) else d for d in kept))
    return out


def elementwise(count: int = 1, low: float = -4, high: float = 4, dtype: str = "float64") -> Callable[[Draw], Sample]:
    """Samples for an operator on `count` tensors that broadcast."""

    def samples(draw: Draw) -> Sample:
        return Sample(
            tuple(
                array(draw, s, dtype, low, high) for s in (broadcastable(draw, count) if count > 1 else [shapes(draw)])
            )
        )

    return samples


def along(min_size: int = 0, low: float = -4, high: float = 4, keyword: str = "dim") -> Callable[[Draw], Sample]:
    """Samples for an operator along one dim (positive or negative)."""

    def samples(draw: Draw) -> Sample:
        shape = list(shapes(draw, 1))
        d = draw(st.integers(-len(shape), len(shape) - 1))
        shape[d] = max(shape[d], min_size)
        return Sample((array(draw, tuple(shape), low=low, high=high),), (), {keyword: d})

    return samples


def reduction(low: float = -4, high: float = 4, empty: bool = True, ties: bool = True) -> Callable[[Draw], Sample]:
    """Samples for a reduction over all dims, one or several, kept or not; `kwargs` are dim and keepdim."""

    def samples(draw: Draw) -> Sample:
        shape = shapes(draw, empty=empty)
        x = array(draw, shape, low=low, high=high) if ties else distinct(draw, shape)
        if not shape or draw(st.booleans()):
            return Sample((x,))
        dims = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=len(shape), unique=True))
        dim = dims[0] if len(dims) == 1 else tuple(d - len(shape) if draw(st.booleans()) else d for d in dims)
        return Sample((x,), (), {"dim": dim, "keepdim": draw(st.booleans())})

    return samples


def numpy_dims(f: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """A NumPy reduction that takes PyTorch's `dim` and `keepdim`."""
    return lambda a, dim=None, keepdim=False, **k: f(a, axis=dim, keepdims=keepdim, **k)
