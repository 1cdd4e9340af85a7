"""scan: a function applied step by step along a sequence, each step with what the one before it left.

    carry = init
    for t in range(T): carry, y[t] = f(carry, xs[t])

`f` is called in Python for each step, so the graph grows with the sequence: T times what one step is. What a step
leaves is stored, so no step is computed again and no kernel is larger than one step: all steps run the same kernels,
which are compiled once. The recurrent layers are such a loop (`nn/recurrent.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manygrad.tensor.structure import tensors_in, tensors_out
from manygrad.tensor.tensor import Tensor

NUMBERS = (bool, int, float)


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """(the last carry, what the steps gave, stacked): `f(carry, x)`, which gives (the next carry, y), once for each
    `x` along the first dim of `xs`, as `jax.lax.scan` does it.

    `init`, `xs`, carries and `y` are Tensors, or tuples, lists or dicts of them, or None. `xs` may be None where
    `length` says how many steps there are. `reverse`: from the last step to the first; what they gave is where their
    `x` is. A carry keeps its structure, shapes and dtypes (ValueError, TypeError); numbers in it become Tensors. Of
    an empty sequence `f` is called once with zeros, for the shapes of what it gives.

    Memory: the carries and `y` of all steps, where a gradient is asked for; in a TinyJit or a loop that is followed it
    is planned, and all steps are one native call.
    """
    carry: list[Tensor] = []
    structure = tensors_out(init, carry, _as_tensor)
    parts: list[Tensor] = []
    inputs = tensors_out(xs, parts)
    steps = _steps(parts, length)
    parts = [x.contiguous() for x in parts]
    given: list[list[Tensor]] = []
    of_ys: Any = None
    for i in range(max(steps, 1)):
        t = steps - 1 - i if reverse else i
        x = tensors_in(inputs, [x[t] if steps else x.new_zeros(x.shape[1:]) for x in parts])
        returned = f(tensors_in(structure, carry), x)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(f"scan: f must return a pair (carry, y), not {_told(returned)}")
        now: list[Tensor] = []
        _check_carry(structure, carry, tensors_out(returned[0], now, _as_tensor), now)
        ys: list[Tensor] = []
        of_y = tensors_out(returned[1], ys, _as_tensor)
        stored = {id(y): y.contiguous() for y in (*now, *ys)}
        if i and (of_y != of_ys or [(y.shape, y.dtype) for y in ys] != [(y.shape, y.dtype) for y in given[0]]):
            was = _listed(of_ys, given[0])
            raise ValueError(f"scan: f gives y {_listed(of_y, ys)} in step {i}, and {was} in the first")
        of_ys = of_y
        given.append([stored[id(y)] for y in ys])
        if steps:
            carry = [stored[id(y)] for y in now]
    if reverse:
        given.reverse()
    stacked = [y[0].stack(*y[1:]) if len(y) > 1 else y[0].unsqueeze(0) for y in zip(*given)]
    return tensors_in(structure, carry), tensors_in(of_ys, stacked if steps else [y[:0] for y in stacked])


def _as_tensor(x: Any) -> Any:
    """What may stand in a carry or a result besides Tensors: numbers, which become some, and None."""
    if isinstance(x, NUMBERS):
        return Tensor(x)
    if x is not None:
        raise TypeError(f"scan: a carry and y hold Tensors, numbers and None, not {_told(x)}")
    return x


def _steps(parts: list[Tensor], length: int | None) -> int:
    """How many steps there are."""
    if any(not x.ndim for x in parts):
        raise ValueError("scan: each tensor of xs needs a first dim, along which the steps go; one has none")
    sizes = {x.shape[0] for x in parts} | ({length} if length is not None else set())
    if not sizes:
        raise ValueError("scan: without xs pass length=, the number of steps")
    if len(sizes) > 1:
        raise ValueError(f"scan: the first dims of xs, and length where it is given, are one size, not {sorted(sizes)}")
    (steps,) = sizes
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"scan: the number of steps is a size, not {steps}")
    return steps


def _check_carry(structure: Any, was: list[Tensor], of: Any, now: list[Tensor]) -> None:
    """A carry is like the one before it."""
    if of != structure:
        raise ValueError(f"scan: f was given the carry {_listed(structure, was)}, and returned {_listed(of, now)}")
    for i, (a, b) in enumerate(zip(was, now)):
        if a.dtype != b.dtype:
            raise TypeError(
                f"scan: tensor {i} of the carry is {a.dtype.name}, and f returned {b.dtype.name}: "
                f"have init be {b.dtype.name}, or cast in f"
            )
        if a.shape != b.shape:
            raise ValueError(
                f"scan: tensor {i} of the carry has shape {a.shape}, and f returned {b.shape}: "
                "a carry has one shape; what grows belongs in y"
            )


def _listed(structure: Any, tensors: list[Tensor]) -> str:
    """A structure with the type and shape of each tensor."""
    names = [f"{t.dtype.name}{list(t.shape)}" for t in tensors]
    return _told(tensors_in(structure, names))  # type: ignore[arg-type]


def _told(x: Any) -> str:
    text = str(x) if isinstance(x, (tuple, list, dict, str)) else type(x).__name__
    return text.replace("'", "") if len(text) < 200 else f"a {type(x).__name__}"


__all__ = ["scan"]
