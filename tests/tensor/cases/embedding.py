"""Rows of tables, alone and in bags."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.case import Case, Draw, Sample, array, shapes


def index(draw: Draw, shape: tuple[int, ...], rows: int) -> np.ndarray:
    return np.random.default_rng(draw(st.integers(0, 1 << 20))).integers(0, rows, shape)


def table(draw: Draw) -> np.ndarray:
    return array(draw, (draw(st.integers(1, 5)), draw(st.integers(1, 3))))


def rows(draw: Draw) -> Sample:
    w = table(draw)
    return Sample((index(draw, shapes(draw), len(w)), w))


def rows_padded(draw: Draw) -> Sample:
    s = rows(draw)
    return Sample(s.arrays, (), {"padding_idx": draw(st.integers(-len(s.arrays[1]), len(s.arrays[1]) - 1))})


def embedding(i: np.ndarray, w: np.ndarray, **_: Any) -> np.ndarray:
    return w[i]


def pooled(part: np.ndarray, mode: str) -> np.ndarray:
    if len(part) == 0:
        return np.zeros(part.shape[1:])
    return {"sum": part.sum(0), "mean": part.mean(0), "max": part.max(0)}[mode]


def bags(draw: Draw) -> Sample:
    """(B, N); a padding row that is not counted, or per-sample weights with mode sum."""
    w = table(draw)
    mode = draw(st.sampled_from(["sum", "mean", "max"]))
    i = index(draw, (draw(st.integers(1, 3)), draw(st.integers(1, 4))), len(w))
    return Sample((i, w), (), {"mode": mode, "padding_idx": draw(st.one_of(st.none(), st.integers(0, len(w) - 1)))})


def bags_oracle(i: np.ndarray, w: np.ndarray, mode: str, padding_idx: int | None) -> np.ndarray:
    return np.stack([pooled(w[row[row != padding_idx]] if padding_idx is not None else w[row], mode) for row in i])


def offsets(draw: Draw) -> Sample:
    """(N,) with where each bag begins, and at the end maybe the length."""
    w = table(draw)
    n, mode, last = draw(st.integers(0, 6)), draw(st.sampled_from(["sum", "mean", "max"])), draw(st.booleans())
    starts = [0, *sorted(draw(st.lists(st.integers(0, n), max_size=3)))]
    return Sample(
        (index(draw, (n,), len(w)), w, np.array(starts + ([n] if last else []))),
        (),
        {"mode": mode, "include_last_offset": last},
    )


def offsets_oracle(
    i: np.ndarray, w: np.ndarray, starts: np.ndarray, mode: str, include_last_offset: bool
) -> np.ndarray:
    ends = [*starts[1:], len(i)] if not include_last_offset else list(starts[1:])
    return np.stack([pooled(w[i[a:b]], mode) for a, b in zip(starts, ends)])


def weighted(draw: Draw) -> Sample:
    w = table(draw)
    i = index(draw, (draw(st.integers(1, 3)), draw(st.integers(1, 4))), len(w))
    return Sample((i, w, array(draw, i.shape)))


CASES = [
    Case("functional.embedding", embedding, rows),
    # the padding row has none, by definition
    Case("functional.embedding", embedding, rows_padded, "padding_idx", grad=False),
    Case("functional.embedding_bag", bags_oracle, bags),
    Case("functional.embedding_bag", offsets_oracle, offsets, "offsets",
         call=lambda library, i, w, o, **k: library.functional.embedding_bag(i, w, o, **k)),
    Case("functional.embedding_bag", lambda i, w, s: (w[i] * s[..., None]).sum(1), weighted, "per_sample_weights",
         call=lambda library, i, w, s: library.functional.embedding_bag(i, w, mode="sum", per_sample_weights=s)),
]  # fmt: skip
