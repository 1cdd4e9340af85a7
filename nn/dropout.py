"""Dropout as modules: active while the module trains."""

from __future__ import annotations

from typing import Any

from manygrad.nn.held import HeldInTraining


class _Dropout(HeldInTraining):
    p: float

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not 0 <= self.p <= 1:
            raise ValueError(f"{type(self).__name__}: the probability must lie in [0, 1], got {self.p}")

    def extra_repr(self) -> str:
        return f"p={self.p}, inplace={self.inplace}"  # type: ignore[attr-defined]


class Dropout(_Dropout, of="dropout", p=0.5, inplace=False):
    """Zeroes elements with probability p, scales the rest by 1 / (1 − p)."""


class Dropout1d(_Dropout, of="dropout1d", p=0.5, inplace=False):
    """Zeroes whole channels of (N, C, L)."""


class Dropout2d(_Dropout, of="dropout2d", p=0.5, inplace=False):
    """Zeroes whole channels of (N, C, H, W)."""


class Dropout3d(_Dropout, of="dropout3d", p=0.5, inplace=False):
    """Zeroes whole channels of (N, C, D, H, W)."""


class AlphaDropout(_Dropout, of="alpha_dropout", p=0.5, inplace=False):
    """Keeps mean 0 and variance 1 (for SELU)."""


class FeatureAlphaDropout(_Dropout, of="feature_alpha_dropout", p=0.5, inplace=False):
    """AlphaDropout of whole channels."""
