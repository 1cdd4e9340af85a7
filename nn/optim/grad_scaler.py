"""Scaled losses: gradients of float16 that are too small for it are multiplied, and divided before a step."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from manygrad.nn.optim.checking import check_count, check_number
from manygrad.nn.optim.optimizer import Optimizer
from manygrad.tensor.engine import engine
from manygrad.tensor.grad_mode import no_grad
from manygrad.tensor.tensor import Tensor


class GradScaler:
    """For `autocast(dtype=dtypes.float16)`, as torch.amp.GradScaler; bfloat16 needs none.

        scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()

    A step whose gradients hold an infinity or a NaN is left out, and the scale is multiplied by `backoff_factor`; after
    `growth_interval` steps in a row that were taken it is multiplied by `growth_factor`. `unscale_` divides the
    gradients before, to clip them, say. Whether a step is taken is read each time: not for a TinyJit."""

    def __init__(self, init_scale: float = 65536.0, growth_factor: float = 2.0, backoff_factor: float = 0.5,
                 growth_interval: int = 2000, enabled: bool = True) -> None:  # fmt: skip
        check_number("GradScaler", "init_scale", init_scale)
        check_number("GradScaler", "growth_factor", growth_factor, 1)
        check_number("GradScaler", "backoff_factor", backoff_factor, 0, 1, below=True)
        check_count("GradScaler", "growth_interval", growth_interval)
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.enabled = growth_interval, bool(enabled)
        self.taken = 0  # steps since the scale changed
        # since the last update: whether gradients are finite
        self.unscaled: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._set(float(init_scale))

    def _set(self, scale: float) -> None:
        self.value = scale
        self.tensor = Tensor(np.array(scale, np.float32))  # (in memory: another scale compiles nothing)

    def get_scale(self) -> float:
        """What losses are multiplied by; 1 where it is not enabled."""
        return self.value if self.enabled else 1.0

    def is_enabled(self) -> bool:
        return self.enabled

    def scale(self, outputs: Any) -> Any:
        """A loss, or each of a list or tuple, times the scale."""
        if not self.enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return outputs * self.tensor.to(outputs.device)
        return type(outputs)(self.scale(x) for x in outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of its parameters by the scale, once before its step."""
        if not self.enabled:
            return
        engine().refuse_in_capture("GradScaler in a TinyJit: whether a step is taken is read each time")
        if optimizer in self.unscaled:
            raise RuntimeError("GradScaler.unscale_: the gradients of this optimizer have been divided since update()")
        with no_grad():
            given = [p for p in optimizer.params if p.grad is not None]
            for p in given:
                grad: Tensor = p.grad  # type: ignore[assignment]
                p.grad = (grad.float() / self.tensor.to(grad.device)).cast(grad.dtype)
            by_device: dict[Any, list[Tensor]] = {}
            for p in given:
                by_device.setdefault(p.device, []).append(p.grad.isfinite().all())  # type: ignore[union-attr]
            finite = [Tensor.stack(found).all() for found in by_device.values()]  # (a read waits for its device)
            if finite:
                grads = [p.grad for p in given]
                grads[0].realize(*grads[1:], *finite)  # type: ignore[union-attr,arg-type]
            self.unscaled[optimizer] = all(bool(x.item()) for x in finite)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """The optimiser's step, if all gradients are finite; what that gives, or None."""
        if not self.enabled:
            return optimizer.step(*args, **kwargs)
        if optimizer not in self.unscaled:
            self.unscale_(optimizer)
        return optimizer.step(*args, **kwargs) if self.unscaled[optimizer] else None

    def update(self, new_scale: float | None = None) -> None:
        """After the steps of all optimisers: the scale for the next ones, or `new_scale`."""
        if not self.enabled:
            return
        if new_scale is not None:
            self._set(float(new_scale))
        elif not self.unscaled:
            raise RuntimeError("GradScaler.update(): no step was taken, or left out, since the last one")
        elif not all(self.unscaled.values()):
            self._set(self.value * self.backoff_factor)
            self.taken = 0
        else:
            self.taken += 1
            if self.taken == self.growth_interval:
                self._set(self.value * self.growth_factor)
                self.taken = 0
        self.unscaled.clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.value, "growth_factor": self.growth_factor, "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval, "_growth_tracker": self.taken,
        } if self.enabled else {}  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `state_dict` gives it, also torch's."""
        if not self.enabled:
            return
        if not state_dict:
            raise RuntimeError("GradScaler.load_state_dict: the state is empty, as of one that was not enabled")
        self._set(float(state_dict["scale"]))
        self.growth_factor, self.backoff_factor = state_dict["growth_factor"], state_dict["backoff_factor"]
        self.growth_interval, self.taken = state_dict["growth_interval"], state_dict["_growth_tracker"]
