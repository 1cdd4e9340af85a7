"""A tensor whose call has not been made yet.

It answers for its shape, type and place; whoever asks for its graph has all calls of its trace made, and from then on
it is a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from manygrad.tensor.deferred.tree import Spec, Where
from manygrad.tensor.dtype import DType
from manygrad.tensor.hooks import RemovableHandle
from manygrad.tensor.storage import LIVE, TRAINED
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import UOp


class PutsOff(Protocol):
    """The trace of a deferred tensor."""

    serial: int

    def flush(self, why: str) -> None:
        """Makes the calls that are put off. `why`: in words (`counts.py`)."""

    def writes_parameters(self) -> bool:
        """Whether calls that are put off write what is trained: earlier values no longer depend on it."""

    def train(self, t: Tensor) -> None:
        """Has this value, which depends on nothing that is trained, become one to train."""


class DeferredTensor(Tensor):
    """A tensor of a trace that is being followed."""

    _trace: PutsOff
    _spec: Spec
    _value: tuple[int, int]  # the serial of its trace, and its number there

    @property
    def uop(self) -> UOp:
        self._trace.flush("what a tensor is made of is asked for")
        found: UOp | None = self.__dict__.get("uop")
        if found is None:
            raise RuntimeError(
                f"a tensor of shape {self.shape} is asked for while the calls that make it are being made; this is a "
                "fault of manygrad, and FOLLOW=0 avoids it"
            )
        return found

    @uop.setter
    def uop(self, u: UOp) -> None:
        self._trace.flush("a tensor becomes another one")
        self.__dict__["uop"] = u

    @property
    def shape(self) -> tuple[Any, ...]:
        return self._spec.shape

    @property
    def dtype(self) -> DType:
        return self._spec.dtype

    @property
    def requires_grad(self) -> bool:
        if self._requires_grad:
            return True
        spec, changes = self._spec, self._trace.writes_parameters()
        if spec.requires_grad is not None and not changes:
            return spec.requires_grad
        self._trace.flush("whether a tensor requires a gradient is asked for")
        found: bool = Tensor.requires_grad.fget(self)  # type: ignore[attr-defined]
        if not changes:
            spec.requires_grad = found
        return found

    @requires_grad.setter
    def requires_grad(self, flag: bool | None) -> None:
        is_leaf = flag and self.dtype.is_float and not self.requires_grad
        if type(self) is not DeferredTensor:  # (whether it had a gradient had to be asked)
            self.requires_grad = flag
        elif is_leaf:
            self._trace.train(self)
        else:
            self._trace.flush("a tensor becomes one to train, or none")
            self.requires_grad = flag

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        self._trace.flush("a hook is registered")
        return self.register_hook(hook)

    def retain_grad(self) -> None:
        self._trace.flush("a gradient is to be kept")
        self.retain_grad()

    @property
    def ndim(self) -> int:
        return len(self._spec.shape)

    @property
    def device(self) -> Where:
        return self._spec.device or self._spec.home


def is_placed(t: Tensor) -> bool:
    """Whether it lies on a device: numbers, and what is made of them alone, go with what lies on any."""
    return (t._spec.device if type(t) is DeferredTensor else t.uop.device) is not None


def settle(t: Tensor, made: Tensor) -> None:
    """`t` is what was made for it."""
    d = t.__dict__
    d["uop"], d["_storage"], d["_device"], d["_leaf"] = made.uop, made._storage, made._device, made._leaf
    if t._requires_grad:
        TRAINED.add(t)
    for name in ("_trace", "_spec", "_stored"):
        d.pop(name, None)
    if issubclass(type(t), DeferredTensor):  # (another class is the user's)
        t.__class__ = Tensor
    LIVE.add(t)


__all__ = ["DeferredTensor", "PutsOff", "is_placed", "settle"]
