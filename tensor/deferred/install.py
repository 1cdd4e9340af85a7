"""Which functions of `Tensor` are calls of a trace, and which end one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from manygrad.tensor.autocast import autocast_dtype, converted
from manygrad.tensor.deferred.changed_gradients import summed, zeros
from manygrad.tensor.deferred.endings import end_with_read, is_read, may_read_written
from manygrad.tensor.deferred.trace import THREAD, WRITING, begin, flush_writers, note_communication
from manygrad.tensor.engine import engine
from manygrad.tensor.environment import FOLLOW
from manygrad.tensor.lock import LOCK
from manygrad.tensor.ops import inplace
from manygrad.tensor.ops.differentiation import DifferentiationMixin
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops

F = TypeVar("F", bound=Callable[..., Any])
READ = ("numpy", "item", "tolist", "realize", "data_ptr", "__array__", "__buffer__", "__dlpack__")
# they tell of a tensor, or change what it is
NO_CALLS = frozenset(
    "dim ndimension numel nelement size element_size stride storage_offset is_contiguous is_floating_point is_complex "
    "is_signed is_conj is_neg is_inference is_same_size is_nonzero get_device type broadcast_shapes "
    "requires_grad_ detach_ register_hook register_post_accumulate_grad_hook retain_grad backward gradient no_grad "
    "manual_seed initial_seed from_file from_dlpack from_numpy shard_ to_ replace train "
    "allclose equal unique unique_consecutive nonzero argwhere masked_select".split()
)
OPERATORS = frozenset("__getitem__ _set_items __matmul__ __rmatmul__ _where".split()) | set(inplace.OPERATORS)


def install() -> None:
    """Has the functions of `Tensor` be calls of a trace, with the types that they have under autocast."""
    if hasattr(Tensor.matmul, "converts"):  # (a package may be imported twice, under two names)
        return
    for kind in reversed(Tensor.__mro__):
        module = kind.__module__
        if not module.startswith("manygrad.tensor."):
            continue
        for name, found in list(vars(kind).items()):
            is_operator = name in OPERATORS or (name.startswith("__") and module.endswith(".operators"))
            if name in READ and FOLLOW:
                setattr(kind, name, _read(found))
            if name in NO_CALLS or name in READ or (name.startswith("_") and not is_operator):
                continue
            if name in ("__init_subclass__",) or getattr(Tensor, name, None) is None:
                continue
            if isinstance(found, staticmethod):
                setattr(kind, name, staticmethod(_call(found.__func__)))
            elif type(found).__name__ == "function":
                setattr(kind, name, _call(found))
    if not FOLLOW:
        return
    DifferentiationMixin._leaf_gradients = _gradients(DifferentiationMixin._leaf_gradients)  # type: ignore[method-assign]
    DifferentiationMixin._accumulate = _changes(DifferentiationMixin._accumulate, summed)  # type: ignore[method-assign]
    DifferentiationMixin._clear = _changes(DifferentiationMixin._clear, zeros)  # type: ignore[method-assign]
    DifferentiationMixin.requires_grad = _requires_grad(DifferentiationMixin.requires_grad)  # type: ignore


def deferrable(fn: F) -> F:
    """As a decorator: `fn`, whose results follow from its arguments and from the tensors' modes alone, is a call of a
    trace, whatever it does inside."""
    return cast(F, _call(fn))


def _call(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A call of a trace, or one that is made at once; with the types that it has under autocast."""
    thread, writing = THREAD, vars(WRITING)["data"]  # (the dict itself: its set asks in Python whether it is empty)
    name, follows, value = fn.__name__, bool(FOLLOW), getattr(fn, "value", None)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (half := autocast_dtype()) is not None:
            return converted(half, call, name, args, kwargs)
        if thread.is_inside or not follows:
            return fn(*args, **kwargs)
        trace = thread.trace
        if writing:
            flush_writers(trace)
        if trace.is_off:
            return fn(*args, **kwargs)
        if value is not None and trace.has(args[0]):
            return trace.call_in_place(fn, value, args, kwargs)
        return trace.call(fn, args, kwargs)

    call.converts = True  # type: ignore[attr-defined]
    return call


def _gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def leaf_gradients(loss: Tensor, *asked: Any) -> Any:
        flush_writers(THREAD.trace)
        if THREAD.is_inside or THREAD.trace.is_off:
            return fn(loss, *asked)
        return THREAD.trace.leaf_gradients(fn, loss, *asked)

    return leaf_gradients


def _changes(fn: Callable[..., Any], value: Callable[..., Tensor]) -> Callable[..., Any]:
    """`fn`, which changes a gradient in place to what `value` gives of it."""

    @functools.wraps(fn)
    def change(held: Tensor, *new: Tensor) -> None:
        if THREAD.is_inside or THREAD.trace.is_off:
            fn(held, *new)
        else:
            THREAD.trace.change_gradient(fn, value, held, *new)

    return change


def _requires_grad(asked: Any) -> Any:
    """`requires_grad`, which depends on what is written to a tensor, and makes one to train of a value."""
    writing = vars(WRITING)["data"]

    @functools.wraps(asked.fget)
    def get(t: Tensor) -> Any:
        if writing and not THREAD.is_inside:
            THREAD.trace.show_writes(t)
        return asked.fget(t)

    @functools.wraps(asked.fset)
    def train(t: Tensor, flag: bool | None) -> None:
        trace = THREAD.trace
        if flag and not THREAD.is_inside and not trace.is_off and trace.has(t) and t.dtype.is_float and not get(t):
            trace.train(t)
        else:
            asked.fset(t, flag)

    return property(get, train, doc=asked.__doc__)


def _read(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def read(*args: Any, **kwargs: Any) -> Any:
        if THREAD.is_inside:
            return fn(*args, **kwargs)
        with LOCK:  # (what was computed is read before another thread finds a fault, and takes it for its own)
            since = engine().communicated()
            _have_read([x for x in args if isinstance(x, Tensor)])
            stored = args[0].__dict__.get("_stored")
            THREAD.is_inside = True
            try:
                if stored is None:
                    return fn(*args, **kwargs)
                return args[0] if fn.__name__ == "realize" else fn(stored, *args[1:], **kwargs)
            finally:
                THREAD.is_inside = False
                note_communication(since)

    return read


def _have_read(tensors: list[Tensor]) -> None:
    """Computes what is put off of these tensors, or, if they are others, what they may depend on."""
    trace = THREAD.trace
    if trace.tree.is_of_another_world():
        trace = begin(trace.tree)
    flush_writers(trace)
    lazy = [x for x in tensors if not is_read(x)]
    numbers = [x.__dict__["_value"][1] for x in lazy if trace.has(x)]
    if numbers and len(numbers) == len(lazy):
        end_with_read(trace, numbers)
    elif (
        (trace.writes and may_read_written(trace, tensors))
        or trace.is_off
        or any(type(x) is Tensor and x.uop.op is not Ops.BUFFER for x in tensors)
    ):
        end_with_read(trace)


def put_functions_off(module: dict[str, Any], names: Iterable[str]) -> None:
    """Has functions of a module be calls of a trace."""
    for name in names:
        if callable(module[name]) and not isinstance(module[name], type):
            module[name] = _call(module[name])


__all__ = ["deferrable", "install", "put_functions_off"]
