"""Dropout where nothing is left to chance: outside training, and with probability 0 or 1."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.case import Case, Draw, Sample, array, shapes


def certain(spatial: int | None = None) -> Callable[[Draw], Sample]:
    def samples(draw: Draw) -> Sample:
        shape = shapes(draw) if spatial is None else shapes(draw, spatial + 2, spatial + 2)
        p, training = draw(st.sampled_from([(0.0, True), (1.0, True), (0.5, False), (1.0, False)]))
        return Sample((array(draw, shape),), (), {"p": p, "training": training})

    return samples


def oracle(x: np.ndarray, p: float, training: bool) -> np.ndarray:
    return x * (0.0 if training and p == 1 else 1.0)


CASES = [
    Case("functional.dropout", oracle, certain()),
    *(Case(f"functional.dropout{n}d", oracle, certain(n)) for n in (1, 2, 3)),
    Case("functional.alpha_dropout", oracle, certain()),
    Case("functional.feature_alpha_dropout", oracle, certain(1)),
]
