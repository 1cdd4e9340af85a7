"""Differentiation besides `backward()`: `grad`, custom functions, activation checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from manygrad.tensor.deferred.install import deferrable
from manygrad.tensor.grad_mode import no_grad
from manygrad.tensor.gradient import CustomGrad, Grads, NoGradient, compute_gradients
from manygrad.tensor.guards import Guards
from manygrad.tensor.lock import locked
from manygrad.tensor.recompute import behind, stored
from manygrad.tensor.storage import HOOKED, TRAINED
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.rewrite import substitute

_numbers = itertools.count(1)


def grad(outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor], grad_outputs: Any = None,
         retain_graph: bool | None = None, create_graph: bool = False,
         allow_unused: bool = False) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The sum of d(output)/d(input), weighted by `grad_outputs`, for each input (torch.autograd.grad).

    With `create_graph=True` what it gives can be differentiated again. Graphs are never freed: `retain_graph` changes
    nothing. An input that no output depends on is an error, or None with `allow_unused`.
    """
    take = _grad.__wrapped__ if any(t._hooks for t in HOOKED) else _grad  # type: ignore[attr-defined]
    found: tuple[Tensor | None, ...] = take(outputs, inputs, grad_outputs, create_graph, allow_unused)
    return found


@deferrable
def _grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Any,
    create_graph: bool,
    allow_unused: bool,
) -> tuple[Tensor | None, ...]:
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
    return tuple(total) if create_graph else tuple([None if g is None else g.detach() for g in total])


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

    def _attributes(self) -> tuple[tuple[str, Any], ...]:
        """Attributes that `forward` has set."""
        own = ("_saved", "_silent", "_zeros", "needs_input_grad")
        return tuple((name, x) for name, x in vars(self).items() if name not in own)


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
        wanted = tuple(i for i, o in enumerate(outputs) if id(o) not in silent and o.dtype.is_float)
        if not wanted:
            return result
        siblings = tuple(next((i for i in wanted if outputs[i] is t), None) for t in ctx._saved)
        version = cls._version()
        # (values that `backward` reads besides its arguments are found when it is called: no step has them as inputs)
        with_backward = _with_backward.__wrapped__ if version is None else _with_backward  # type: ignore[attr-defined]
        made = with_backward(
            (cls, version, wanted, siblings, ctx.needs_input_grad, ctx._zeros, ctx._attributes()),
            outputs,
            tuple(a if isinstance(a, Tensor) else None for a in args),
            tuple(ctx._saved),
        )
        by_number = dict(zip(wanted, made))
        found = tuple(by_number.get(i, o) for i, o in enumerate(outputs))
        return found if isinstance(result, tuple) else found[0]

    _reads: tuple[Guards, int] | None = None  # what `backward` read last, besides its arguments; how often it changed

    @classmethod
    def _version(cls) -> int | None:
        """Another number whenever what `backward` reads has changed; None where it reads tensors."""
        known = cls.__dict__.get("_reads")
        if known is None or not known[0].hold():
            now = Guards(cls.backward)
            number = 0 if known is None else known[1] + bool(now.differences(known[0]))
            cls._reads = known = now, number
        return None if known[0].tensors else known[1]


@deferrable
def _with_backward(
    how: tuple[Any, ...], outputs: Sequence[Tensor], args: Sequence[Tensor | None], saved: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The outputs of a Function that can be differentiated, by its `backward`. `how`: all that is known of one
    application of it besides tensors; `args`: of `forward`, those that are tensors."""
    cls, _, wanted, siblings, needs, zeros, attributes = how
    ctx = Context()
    ctx._saved, ctx._zeros, ctx.needs_input_grad = saved, zeros, needs
    vars(ctx).update(attributes)
    kinds = [(o.shape, o.dtype) for o in outputs]
    one = _Application(next(_numbers), cls, ctx, kinds, [a is not None for a in args], siblings)
    below = (*(a.uop for a in args if a is not None), *(t.uop for t in saved))
    return tuple(
        o._new(UOp(Ops.CUSTOM, o.dtype, (o.uop, *below), _FunctionGrad(one, i)))
        for i, o in ((i, outputs[i]) for i in wanted)
    )


class _Application(NamedTuple):
    """One application of a Function. `kinds`: shape and type of each output; `is_tensor`: which arguments of `forward`
    are; `siblings`: for each saved tensor the number of the output that it is, or None."""

    number: int
    cls: type[Function]
    ctx: Context
    kinds: list[tuple[Any, Any]]
    is_tensor: list[bool]
    siblings: Sequence[int | None]


class _FunctionGrad(CustomGrad):
    """Output `i` of one application; its node's sources are (output, *tensor arguments, *saved tensors)."""

    def __init__(self, one: _Application, i: int):
        super().__init__(one.cls.__name__, (one.number, i), one.cls.backward)
        self.one, self.i, self.ctx, self.is_tensor = one, i, one.ctx, one.is_tensor

    def inputs(self, u: UOp) -> tuple[UOp, ...]:
        return u.src[1 : 1 + sum(self.is_tensor)]

    def gradients(self, g: Tensor, u: UOp) -> Grads:
        # a saved output with how it came to be: the node that `apply` made of it (found by its equal: one that was kept
        # here would keep itself, with all that was saved, until a garbage collection)
        saved = [
            g._new(s if k is None else UOp(Ops.CUSTOM, s.dtype, (s, *u.src[1:]), _FunctionGrad(self.one, k)))
            for s, k in zip(u.src[1 + sum(self.is_tensor) :], self.one.siblings)
        ]
        self.ctx._saved, before = tuple(saved), self.ctx._saved
        try:
            starts = [
                g if k == self.i else Tensor.zeros(*shape, dtype=dtype) if self.ctx._zeros else None
                for k, (shape, dtype) in enumerate(self.one.kinds)
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
