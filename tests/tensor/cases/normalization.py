"""Normalisation and distances."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.case import Case, Draw, Sample, array, shapes


def standardized(x: np.ndarray, dims: Any, eps: float = 1e-5) -> np.ndarray:
    return (x - x.mean(dims, keepdims=True)) / np.sqrt(x.var(dims, keepdims=True) + eps)


def channels(t: np.ndarray, ndim: int) -> np.ndarray:
    return t.reshape(1, -1, *(1,) * (ndim - 2))


def layer(draw: Draw) -> Sample:
    shape = tuple(d + 1 for d in shapes(draw, 1))
    last = shape[draw(st.integers(0, len(shape) - 1)) :]
    return Sample((array(draw, shape), array(draw, last), array(draw, last)), (last,))


def layer_norm(x: np.ndarray, w: np.ndarray, b: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return standardized(x, tuple(range(-len(shape), 0))) * w + b


def rms_norm(x: np.ndarray, w: np.ndarray, b: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return x / np.sqrt((x * x).mean(tuple(range(-len(shape), 0)), keepdims=True) + 1e-5) * w


def images(draw: Draw, groups: int = 1) -> tuple[np.ndarray, ...]:
    c = draw(st.integers(1, 2)) * groups
    shape = (draw(st.integers(2, 4)), c, draw(st.integers(2, 4)), *([2] if draw(st.booleans()) else []))
    return array(draw, shape), array(draw, (c,)), array(draw, (c,))


def running(draw: Draw) -> Sample:
    x, w, b = images(draw)
    return Sample((x, w, b, array(draw, (x.shape[1],)), array(draw, (x.shape[1],), low=0.5)))


def batch_norm(x: np.ndarray, w: np.ndarray, b: np.ndarray, *_: Any) -> np.ndarray:
    return standardized(x, tuple(i for i in range(x.ndim) if i != 1)) * channels(w, x.ndim) + channels(b, x.ndim)


def frozen(x: np.ndarray, w: np.ndarray, b: np.ndarray, mean: np.ndarray, var: np.ndarray) -> np.ndarray:
    w, b, mean, var = (channels(t, x.ndim) for t in (w, b, mean, var))
    return (x - mean) / np.sqrt(var + 1e-5) * w + b


def group_norm(x: np.ndarray, w: np.ndarray, b: np.ndarray, groups: int) -> np.ndarray:
    y = standardized(x.reshape(x.shape[0], groups, -1), 2).reshape(x.shape)
    return y * channels(w, x.ndim) + channels(b, x.ndim)


def local(x: np.ndarray, size: int, alpha: float, beta: float, k: float) -> np.ndarray:
    padded = np.pad(x * x, [(0, 0), (size // 2, (size - 1) // 2), *[(0, 0)] * (x.ndim - 2)])
    return x / (k + alpha / size * sum(padded[:, i : i + x.shape[1]] for i in range(size))) ** beta


def normalize(x: np.ndarray, p: float, dim: int) -> np.ndarray:
    return x / np.maximum((np.abs(x) ** p).sum(dim, keepdims=True) ** (1 / p), 1e-12)


def pair(draw: Draw) -> tuple[np.ndarray, np.ndarray]:
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    return array(draw, shape), array(draw, shape)


def cosine(x: np.ndarray, y: np.ndarray, dim: int) -> np.ndarray:
    return (x * y).sum(dim) / np.sqrt((x * x).sum(dim) * (y * y).sum(dim))


def distance(x: np.ndarray, y: np.ndarray, p: float) -> np.ndarray:
    return (np.abs(x - y + 1e-6) ** p).sum(-1) ** (1 / p)


def pdist(x: np.ndarray, p: float) -> np.ndarray:
    i, j = np.triu_indices(len(x), 1)
    return (np.abs(x[i] - x[j]) ** p).sum(-1) ** (1 / p)


def f(name: str, oracle: Any, samples: Any, **options: Any) -> Case:
    return Case(f"functional.{name}", oracle, samples, **options)


CASES = [
    f("layer_norm", layer_norm, layer, call=lambda lib, x, w, b, shape: lib.functional.layer_norm(x, shape, w, b)),
    f("rms_norm", rms_norm, layer, call=lambda lib, x, w, b, shape: lib.functional.rms_norm(x, shape, w, 1e-5)),
    f("batch_norm", batch_norm, lambda d: Sample(images(d)), variant="training",
      call=lambda lib, x, w, b: lib.functional.batch_norm(x, None, None, w, b, training=True)),
    f("batch_norm", frozen, running, call=lambda lib, x, w, b, m, v: lib.functional.batch_norm(x, m, v, w, b)),
    f("instance_norm",
      lambda x, w, b: standardized(x, tuple(range(2, x.ndim))) * channels(w, x.ndim) + channels(b, x.ndim),
      lambda d: Sample(images(d)),
      call=lambda lib, x, w, b: lib.functional.instance_norm(x, weight=w, bias=b)),
    f("group_norm", group_norm, lambda d: Sample(images(d, 2), (2,)),
      call=lambda lib, x, w, b, n: lib.functional.group_norm(x, n, w, b)),
    f("local_response_norm", local, lambda d: Sample(images(d)[:1], (d(st.integers(1, 3)), 0.1, 0.75, 1.0))),
    f("normalize", normalize, lambda d: Sample(images(d)[:1], (d(st.sampled_from([2.0, 3.0])), d(st.integers(-2, 2))))),
    f("cosine_similarity", cosine, lambda d: Sample(pair(d), (), {"dim": d(st.integers(-2, 1))})),
    f("pairwise_distance", distance, lambda d: Sample(pair(d), (), {"p": d(st.sampled_from([2.0, 3.0]))})),
    f("pdist", pdist, lambda d: Sample((array(d, (d(st.integers(1, 6)), 3)),), (d(st.sampled_from([2.0, 3.0])),))),
]  # fmt: skip
