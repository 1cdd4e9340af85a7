"""Differentiation besides `backward()`: `grad`, custom functions, activation checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from manygrad.tensor.deferred.install import deferrable
from manygrad.tensor.grad_mode import no_grad
from manygrad.tensor.gradient import CustomGrad, Grads, NoGradient, compute_gradients
from manygrad.tensor.lock import locked
from manygrad.tensor.recompute import behind, stored
from manygrad.tensor.storage import TRAINED
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.rewrite import substitute

_numbers = itertools.count(1)


def grad(outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor], grad_outputs: Any = None,
         retain_graph: bool | None = None, create_graph: bool = False,
         allow_unused: bool = False) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The sum of d(output)/d(input), weighted by `grad_outputs`, for each input (torch.autograd.grad).

    Graphs are never freed and gradients can always be differentiated again, so `retain_graph` and `create_graph` change
    nothing. An input that no output depends on is an error, or None with `allow_unused`.
    """
    outs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    ins = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    starts = (
        [None] * len(outs)
        if grad_outputs is None
        else [grad_outputs]
        if isinstance(grad_outputs, Tensor)
        else list(grad_outputs)
    )
    if len(starts) != len(outs):
        raise ValueError(
            f"grad: {len(outs)} outputs and {len(starts)} grad_outputs; give one for each (None for a scalar output)"
        )
    total: list[Tensor | None] = [None] * len(ins)
    for out, start in zip(outs, starts):
        if start is None and out.numel() != 1:
            raise ValueError(
                f"grad: an output of shape {out.shape} is no scalar; pass grad_outputs of that shape, or sum it"
            )
        for i, g in enumerate(out._gradients(ins, start)):
            total[i] = g if total[i] is None else total[i] if g is None else total[i] + g
    unused = [i for i, g in enumerate(total) if g is None]
    if unused and not allow_unused:
        raise RuntimeError(
            f"grad: no output depends on the inputs at positions {unused}; pass allow_unused=True to get None for them"
        )
    return tuple(total)


class Context:
    """State that `forward` leaves for `backward`: saved tensors, and any attribute."""

    needs_input_grad: tuple[bool, ...] = ()

    def __init__(self) -> None:
        self._saved: tuple[Tensor, ...] = ()
        self._silent: tuple[Tensor, ...] = ()
        self._zeros = True

    def save_for_backward(self, *tensors: Tensor) -> None:
        self._saved = tensors

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        self._silent = outputs

    def set_materialize_grads(self, value: bool) -> None:
        """False: `backward` gets None, not zeros, for an output that nothing flowed back to."""
        self._zeros = value

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self._saved


class Function:
    """An operator with a backward of its own (torch.autograd.Function).

    class Cube(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x * x

        @staticmethod
        def backward(ctx, grad_output):
            (x,) = ctx.saved_tensors
            return grad_output * 3 * x * x

    y = Cube.apply(x)

    `backward` gets one gradient for each output and returns one, or None, for each argument of `forward`. Of several
    outputs each is differentiated on its own, the gradients of the others being 0. A gradient of the gradient sees how
    saved arguments and outputs came to be; whatever else is saved counts as a constant.
    """

    @staticmethod
    def forward(ctx: Context, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a Function defines forward(ctx, ...)")

    @staticmethod
    def backward(ctx: Context, *grads: Any) -> Any:
        raise NotImplementedError("a Function defines backward(ctx, *gradients of the outputs)")

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        ctx = Context()
        inputs = [a for a in args if isinstance(a, Tensor)]
        ctx.needs_input_grad = tuple(isinstance(a, Tensor) and a.dtype.is_float for a in args)
        with no_grad():
            result = cls.forward(ctx, *args, **kwargs)
        outputs = result if isinstance(result, tuple) else (result,)
        if not all(isinstance(o, Tensor) for o in outputs):
            raise TypeError(
                f"{cls.__name__}.forward returned {[type(o).__name__ for o in outputs]}; "
                "it returns a Tensor or a tuple of Tensors"
            )
        silent = {id(t) for t in ctx._silent}
        grads = [
            None if id(o) in silent or not o.dtype.is_float else _FunctionGrad(cls, ctx, outputs, i, args)
            for i, o in enumerate(outputs)
        ]
        below = (*(t.uop for t in inputs), *(t.uop for t in ctx._saved))
        made = []
        for o, grad in zip(outputs, grads):
            if grad is not None:
                grad.siblings = [next((g for x, g in zip(outputs, grads) if x is t), None) for t in ctx._saved]
            made.append(o if grad is None else o._new(UOp(Ops.CUSTOM, o.dtype, (o.uop, *below), grad)))
        return tuple(made) if isinstance(result, tuple) else made[0]


class _FunctionGrad(CustomGrad):
    """Output `i` of one application; its node's sources are (output, *tensor arguments, *saved tensors).

    `siblings`: for each saved tensor that is an output, what is the arg of that output's node.
    """

    siblings: list[_FunctionGrad | None]

    def __init__(self, cls: type[Function], ctx: Context, outputs: tuple[Tensor, ...], i: int, args: tuple[Any, ...]):
        super().__init__(cls.__name__, next(_numbers), cls.backward)
        self.ctx, self.i = ctx, i
        self.kinds = [(o.shape, o.dtype) for o in outputs]
        self.is_tensor = [isinstance(a, Tensor) for a in args]

    def inputs(self, u: UOp) -> tuple[UOp, ...]:
        return u.src[1 : 1 + sum(self.is_tensor)]

    def gradients(self, g: Tensor, u: UOp) -> Grads:
        # a saved output with how it came to be: the node that `apply` made of it
        saved = [
            g._new(s if grad is None else UOp(Ops.CUSTOM, s.dtype, (s, *u.src[1:]), grad))
            for s, grad in zip(u.src[1 + sum(self.is_tensor) :], self.siblings)
        ]
        self.ctx._saved, before = tuple(saved), self.ctx._saved
        try:
            starts = [
                g if k == self.i else Tensor.zeros(*shape, dtype=dtype) if self.ctx._zeros else None
                for k, (shape, dtype) in enumerate(self.kinds)
            ]
            found = self.fn(self.ctx, *starts)
        finally:
            self.ctx._saved = before
        found = found if isinstance(found, tuple) else (found,)
        count = len(self.is_tensor)
        if len(found) < count or any(f is not None for f in found[count:]):  # (more Nones are as good, as in PyTorch)
            raise RuntimeError(
                f"{self.name}.backward returned {len(found)} gradients for {count} arguments of forward; "
                "return None where there is none"
            )
        for k, (f, is_tensor) in enumerate(zip(found, self.is_tensor)):
            if f is not None and not (is_tensor and isinstance(f, Tensor)):
                raise RuntimeError(
                    f"{self.name}.backward returned a {type(f).__name__} as gradient {k}, of an argument of forward "
                    f"that is {'a' if is_tensor else 'no'} Tensor; a gradient is a Tensor, or None"
                )
        wanted = [f for f, is_tensor in zip(found, self.is_tensor) if is_tensor]
        for f, s in zip(wanted, self.inputs(u)):
            if f is not None and f.shape != s.shape:
                raise RuntimeError(
                    f"{self.name}.backward returned a gradient of shape {f.shape} for an argument of shape {s.shape}"
                )
        wanted = [f if f is None or f.dtype is s.dtype else f.cast(s.dtype) for f, s in zip(wanted, u.src[1:])]
        return (None, *wanted, *(None for _ in saved))


@locked
def checkpoint(
    fn: Callable[..., Any], *args: Any, use_reentrant: bool = False, preserve_rng_state: bool = True, **kwargs: Any
) -> Any:
    """`fn(*args)`, of which only the arguments are kept for the backward pass: what is between is computed again there.

    Trades one more forward of `fn` for the memory of its activations (torch.utils.checkpoint; Chen et al., 2016).
    Random numbers drawn inside are the same both times.
    """
    inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dtype.is_float]
    for t in inputs:
        _enter(t)
    result = fn(*args, **kwargs)
    outputs = result if isinstance(result, tuple) else (result,)
    made = tuple(_checkpointed(o, *inputs) if isinstance(o, Tensor) and o.dtype.is_float else o for o in outputs)
    return made if isinstance(result, tuple) else made[0]


@deferrable
def _enter(t: Tensor) -> Tensor:
    """From now on `t` is in memory."""
    t.uop = stored(t.uop)
    return t


@deferrable
def _checkpointed(out: Tensor, *inputs: Tensor) -> Tensor:
    entries = tuple(dict.fromkeys(t.uop for t in inputs))
    below = set(out.uop.toposort(lambda u: u not in entries))
    leaves = tuple(dict.fromkeys(t.uop for t in TRAINED if t.uop in below and t.uop not in entries))
    return out._new(UOp(Ops.CUSTOM, out.dtype, (out.uop, *entries, *leaves), _Checkpoint(len(entries))))


class _Checkpoint(CustomGrad):
    """Sources of its node: (output, *entries, *parameters). The region between entries and output is built again, on
    entries that stand behind a BARRIER: they can be read once the gradient that arrives is there."""

    def __init__(self, entries: int):
        super().__init__("checkpoint", entries, lambda *_: ())
        self.entries = entries

    def gradients(self, g: Tensor, u: UOp) -> Grads:
        entries, leaves = u.src[1 : 1 + self.entries], u.src[1 + self.entries :]
        later = [behind(e, g.uop) for e in entries]
        again = substitute(u.src[0], dict(zip(entries, later)))
        unknown: dict[UOp, NoGradient] = {}
        found = compute_gradients(again, g.uop, {*later, *leaves}, {}, unknown=unknown)
        return (None, *(g._new(found[x]) if x in found else unknown.get(x) for x in (*later, *leaves)))
