"""A TinyJit's arguments: what a call is given, taken apart, and whether it is what was captured.

Tensors are inputs, bound Variables and sizes made of them may change their values, all else is part of the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from manygrad.errors import JitError
from manygrad.runtime.storage import STORAGE, storage
from manygrad.tensor.engine import engine
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import BufferSpec, Ops, UOp
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.show import text_of_index
from manygrad.tensor.uop.symbolic import evaluate
from manygrad.tensor.uop.views import memory

Shapes = tuple[tuple[str, tuple[Any, ...]], ...]


def walk(
    x: Any,
    path: str,
    found: list[tuple[str, Tensor]],
    variables: list[tuple[str, UOp]],
    constants: list[tuple[str, Any]],
) -> None:
    """Appends what stands in `x`, each with the path to it."""
    if isinstance(x, Tensor):
        found.append((path, x))
    elif isinstance(x, UOp):
        variables.append((path, x))
    elif isinstance(x, (list, tuple)):
        for i, y in enumerate(x):
            walk(y, f"{path}[{i}]", found, variables, constants)
    elif isinstance(x, dict):
        for k in sorted(x, key=str):  # (in whichever order they are given)
            walk(x[k], f"{path}[{k!r}]", found, variables, constants)
    elif isinstance(x, np.ndarray):
        raise JitError(f"{path} is a NumPy array: its values would become a part of the capture; pass a Tensor")
    else:
        constants.append((path, x))


def is_same(a: Any, b: Any) -> bool:
    """Whether a captured argument that is no tensor is still what it was: an equal number or text,
    or the same object."""
    return a is b or (type(a) is type(b) and isinstance(a, (int, float, str, bytes, np.generic)) and bool(a == b))


def signature(t: Tensor) -> tuple[Any, ...]:
    """Shape, dtype, device and cut, as an error tells them."""
    return (tuple(d if isinstance(d, int) else str(d) for d in t.shape), t.dtype.name, t.device, cut_of(t))


def cut_of(t: Tensor) -> tuple[int | None, tuple[int, ...]] | None:
    """The dim in which a tensor on several devices is cut, and where."""
    if not isinstance(t.device, tuple):
        return None
    spec = t.uop.arg
    return (spec.axis, spec.bounds) if isinstance(spec, BufferSpec) else engine().store_spec(t.uop)


def described(shape: Any, dtype: str, device: Any, cut: tuple[int | None, tuple[int, ...]] | None) -> str:
    axis, bounds = cut or (None, ())
    if axis is not None:
        inner = bounds[1:-1]  # (of a single device there are none)
        where = f", cut along axis {axis}" + (f" at {', '.join(map(str, inner))}" if inner else "")
    else:
        where = "" if cut is None else ", a copy on each"
    return f"{shape} {dtype} on {device}{where}"


def binds(t: Tensor) -> list[UOp]:
    """The variables with their values in the shape of `t`."""
    return [u for d in t.shape if isinstance(d, UOp) for u in binds_of(d)]


def binds_of(u: UOp) -> list[UOp]:
    """The variables with their values in a size or an index."""
    return [u] if u.op is Ops.BIND else [x for x in u.toposort() if x.op is Ops.BIND]


def unbound(u: UOp) -> UOp:
    return u.src[0] if u.op is Ops.BIND else substitute(u, {b: b.src[0] for b in binds_of(u)})


def bound_values(given: Iterable[UOp]) -> dict[UOp, int]:
    """The value of each variable."""
    found: dict[UOp, int] = {}
    for b in given:
        variable, value = b.src[0], b.src[1].arg
        if found.setdefault(variable, value) != value:
            raise JitError(
                f"the variable {variable.arg.name!r} is bound to {found[variable]} and to {value} in one call; "
                "give them two names"
            )
    return found


def listed(variables: Iterable[UOp]) -> str:
    return ", ".join(sorted(f"{v.arg.name} ({v.arg.min} to {v.arg.max})" for v in variables)) or "none"


def with_dims(t: Tensor, values: dict[str, int]) -> Tensor:
    """A stored tensor, its symbolic dims at other values."""
    old = t.uop.arg
    now = {
        u: UOp(Ops.BIND, u.dtype, (u.src[0], u.src[1].replace(arg=values.get(u.src[0].arg.name, u.src[1].arg))))
        for u in binds(t)
    }
    shape = tuple(substitute(d, now) if isinstance(d, UOp) else d for d in old.shape)
    u = UOp(Ops.BUFFER, t.dtype, (), BufferSpec(old.uid, shape, old.dtype, old.device, old.axis, old.bounds))
    STORAGE[u] = storage(t.uop)
    return t._new(u)


@dataclass
class Input:
    """One tensor argument of a capture. `twin`: the earlier argument that was the same tensor;
    `written`: the function assigns it."""

    path: str
    signature: tuple[Any, ...]
    own: Tensor
    kind: tuple[Any, ...] | None = None  # shape, dtype, device and cut, where no dim is symbolic
    twin: int | None = None
    written: bool = False
    moves: list[Callable[[Any], None]] | None = None  # of the graphs that read it; None: it has to be copied
    at: int = 0  # the address that these read; 0: not known
    in_place: bool = False  # the last call's was read where it lies, and was no copy of a view


def refuse_shared_memory(inputs: list[Input], tensors: list[Tensor]) -> None:
    """An input that is written must not be another one's memory, too: each is captured on its own."""
    for i, t in zip(inputs, tensors):
        for j, x in zip(inputs, tensors) if i.written else ():
            if j is not i and (j.twin is None or inputs[j.twin] is not i) and memory(x.uop) is memory(t.uop):
                raise JitError(
                    f"{i.path} is assigned by the function, and {j.path} is the same memory; "
                    "pass a clone() of one of them"
                )


def shapes_of(tensors: list[tuple[str, Tensor]]) -> Shapes:
    """The shapes of arguments, each with its path; of symbolic dims without their values."""
    return tuple((path, tuple(d if isinstance(d, int) else str(unbound(d)) for d in t.shape)) for path, t in tensors)


def has_other_shapes(inputs: list[Input], tensors: list[tuple[str, Tensor]]) -> bool:
    """Whether arguments differ from those of a capture in sizes that are numbers, and in nothing else that it is
    captured for."""
    other = False
    if len(inputs) != len(tensors):
        return False
    for i, (_, t) in zip(inputs, tensors):
        if i.kind is None or t.shape != i.kind[0]:
            break
    else:
        return False
    for i, (path, t) in zip(inputs, tensors):
        if i.path != path or i.own.dtype != t.dtype or i.own.device != t.device:
            return False
        if t.shape != i.own.shape:
            if not all(isinstance(d, int) for d in (*t.shape, *i.own.shape)):
                return False
            other = True
    return other


def check_inputs(inputs: list[Input], tensors: list[tuple[str, Tensor]]) -> None:
    """They are passed in the same way, of the same kind, and are one where they were."""
    if len(tensors) != len(inputs):
        raise JitError(
            f"captured with {len(inputs)} input tensors, called with {len(tensors)}; make a second TinyJit for it"
        )
    for i, (path, t) in zip(inputs, tensors):
        if path != i.path:
            raise JitError(
                f"captured with a tensor as {i.path}, called with one as {path}; "
                "pass the arguments in the same way, or make a second TinyJit"
            )
        if (t.shape, t.dtype, t.device, cut_of(t)) != i.kind and signature(t) != i.signature:
            was, now = described(*i.signature), described(*signature(t))
            raise JitError(
                f"{i.path} was captured as shape {was}, now it is {now}; pass the same kind of input, "
                "or make a second TinyJit"
            )
        if i.twin is not None and t.uop is not tensors[i.twin][1].uop:
            raise JitError(
                f"{i.path} and {inputs[i.twin].path} were one tensor at capture, now they are two; "
                "make a second TinyJit for it"
            )


def check_constants(captured: list[tuple[str, Any]], constants: list[tuple[str, Any]]) -> None:
    changed = [f"{p} from {a!r} to {b!r}" for (p, a), (q, b) in zip(captured, constants) if p != q or not is_same(a, b)]
    if changed or len(constants) != len(captured):
        raise JitError(
            f"an argument that is not a tensor changed since capture: {', '.join(changed) or constants}; "
            "its value is part of the capture: pass a Tensor or a bound Variable, or reset()"
        )


def check_numbers(captured: list[tuple[str, UOp]], now: list[tuple[str, UOp]], values: dict[str, int]) -> None:
    """A replay has the variables' new values, and what was captured makes its arguments of them."""
    if len(now) != len(captured):
        raise JitError(
            f"captured with {len(captured)} arguments made of variables, called with {len(now)}; "
            "make a second TinyJit for it"
        )
    for (p, a), (q, b) in zip(captured, now):
        same = (b.op is Ops.BIND and b.src[0] is a) or evaluate(a, values) == evaluate(b, {})
        if p != q or not same:
            raise JitError(
                f"{p} was captured as {text_of_index(a)}, now {q} is {text_of_index(b)}: "
                "make it of the same variables in the same way, or make a second TinyJit"
            )
