"""Padding as modules: `padding` is a number, or (left, right, top, bottom, front, back) as far as there are dims."""

from __future__ import annotations

from typing import Any

from manygrad.nn.held import REQUIRED, Held


class _Pad(Held):
    """functional.pad in one mode over the last `dims` dims."""

    dims: int

    def __init_subclass__(cls, dims: int = 0, mode: str = "constant", **arguments: Any):
        given = {"padding": REQUIRED, **arguments} if dims else {}
        super().__init_subclass__(of="pad" if dims else None, fixed={"mode": mode}, **given)
        cls.dims = dims

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        pad: Any = self.padding  # type: ignore[has-type]
        self.padding = (pad,) * (2 * self.dims) if isinstance(pad, int) else tuple(pad)
        if len(self.padding) != 2 * self.dims:
            raise ValueError(f"{type(self).__name__}: padding is a number or {2 * self.dims} numbers, not {pad}")

    def _arguments(self) -> dict[str, Any]:
        named = super()._arguments()
        return {"pad": named.pop("padding"), **named}

    def extra_repr(self) -> str:
        if "value" in self._signature.parameters:
            return f"padding={self.padding}, value={self.value}"  # type: ignore[attr-defined]
        return f"{self.padding}"


class ZeroPad1d(_Pad, dims=1):
    """Zeros around (.., W)."""


class ZeroPad2d(_Pad, dims=2):
    """Zeros around (.., H, W)."""


class ZeroPad3d(_Pad, dims=3):
    """Zeros around (.., D, H, W)."""


class ConstantPad1d(_Pad, dims=1, value=REQUIRED):
    """A value around (.., W)."""


class ConstantPad2d(_Pad, dims=2, value=REQUIRED):
    """A value around (.., H, W)."""


class ConstantPad3d(_Pad, dims=3, value=REQUIRED):
    """A value around (.., D, H, W)."""


class ReflectionPad1d(_Pad, dims=1, mode="reflect"):
    """Mirrored at the border."""


class ReflectionPad2d(_Pad, dims=2, mode="reflect"):
    """Mirrored at the border."""


class ReflectionPad3d(_Pad, dims=3, mode="reflect"):
    """Mirrored at the border."""


class ReplicationPad1d(_Pad, dims=1, mode="replicate"):
    """The border repeated."""


class ReplicationPad2d(_Pad, dims=2, mode="replicate"):
    """The border repeated."""


class ReplicationPad3d(_Pad, dims=3, mode="replicate"):
    """The border repeated."""


class CircularPad1d(_Pad, dims=1, mode="circular"):
    """The other side."""


class CircularPad2d(_Pad, dims=2, mode="circular"):
    """The other side."""


class CircularPad3d(_Pad, dims=3, mode="circular"):
    """The other side."""
