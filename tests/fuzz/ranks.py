"""Random programs on the devices of several workers: lowered rank by rank, all ranks have the same list of collectives,
and run in lockstep they give what the program gives on one device: forward and gradient, uneven and empty parts, values
that one rank alone reads, all-reduces whole and in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st

from manygrad import Context, Tensor
from manygrad.collectives import cost
from manygrad.multi.rules import store_spec
from manygrad.multi.world import Link
from tests.multi.cluster import run, workers
from tests.multi.test_programs import UNARY

EXAMPLES = 60
Program = dict[str, Any]


def _like(t: Tensor, u: Tensor) -> Tensor:
    """`u`, cut like it is, in the shape of `t`."""
    return u.reshape(-1).sum() * 0.1 + t


BINARY: list[tuple[str, Callable[[Tensor, Tensor, Callable[[np.ndarray], Tensor]], Tensor]]] = [
    ("plus", lambda t, u, put: t + u if t.shape == u.shape else _like(t, u)),
    ("times", lambda t, u, put: t * u if t.shape == u.shape else t * u.sum()),
    ("cat", lambda t, u, put: t.cat(u, dim=0) if t.shape[1:] == u.shape[1:] else t),
    ("matmul", lambda t, u, put: t @ u.T if t.ndim == u.ndim == 2 and t.shape[1] == u.shape[1] else t),
    (
        "sum then scatter",
        lambda t, u, put: (
            t.sum(0).relu().reshape(-1).scatter_add(0, put(np.arange(u.numel()) % max(1, t[0].numel())), u.reshape(-1))
        ),
    ),
    ("scatter", lambda t, u, put: t.scatter_add(0, put(np.zeros(u.shape, np.int64)), u) if t.shape == u.shape else t),
    ("gather", lambda t, u, put: t.gather(0, put(np.arange(t.numel()).reshape(t.shape) % t.shape[0]))),
    (
        "normalised",
        lambda t, u, put: (
            (t - t.mean(0, keepdim=True)) * ((t - t.mean(0, keepdim=True)).square().mean(0, keepdim=True) + 0.1).rsqrt()
        ),
    ),
    # (no ties: equal elements are above their mean or not by the last bit of its sum)
    ("where", lambda t, u, put: (t > t.mean() + 1e-6).where(t, u.mean())),
    ("max of both", lambda t, u, put: t.maximum(u.amax())),
]
OPS = len(UNARY) + len(BINARY)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    return {
        "shape": shape,
        "ops": draw(st.lists(st.integers(0, OPS - 1), min_size=1, max_size=4)),
        "nodes": draw(st.integers(1, 8)),
        "devices per node": draw(st.integers(1, 2)),
        "axes": [draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) for _ in range(2)],
        "on one": draw(st.booleans()),
        "cut result": draw(st.booleans()),
        "in parts": draw(st.booleans()),
    }


def compute(p: Program, x: Tensor, y: Tensor, put: Callable[[np.ndarray], Tensor]) -> list[Tensor]:
    out = x * y + y
    for op in p["ops"]:
        if not out.ndim:
            out = out.reshape(1)
        out = UNARY[op][1](out) if op < len(UNARY) else BINARY[op - len(UNARY)][1](out, y, put)
    gradients = (out * out).sum().gradient(x, y)
    return [out, *gradients, out.sum(), gradients[0].reshape(-1).cat(gradients[1].reshape(-1))]


def check(p: Program) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(0.2, 1.5, p["shape"]) for _ in range(2)]
    with Context(DEVICE="PYTHON"), patch.object(cost, "PART_ALIGN", 1):
        want = [t.numpy() for t in compute(p, Tensor(arrays[0]), Tensor(arrays[1]), Tensor)]
        with workers(p["nodes"], p["devices per node"], "PYTHON") as world:
            devices = world.devices
            world.link = Link("zmq", 1.0) if p["in parts"] else None  # each all-reduce in up to MAX_PARTS
            cut = [Tensor(a).shard(devices, axis) for a, axis in zip(arrays, p["axes"])]
            got = compute(p, *cut, lambda a: Tensor(a).shard(devices, 0 if a.ndim and p["cut result"] else None))
            if p["cut result"] and got[0].ndim:
                got.append(got[0].shard(devices, 0))
                want.append(want[0])
            if p["on one"]:
                got.append(got[1].to(devices[len(devices) // 2]))
                want.append(want[1])
            found = run(got)
            for i, (t, w) in enumerate(zip(got, want)):
                _compare(t, w, [ranks[i] for ranks in found], f"output {i} of {p}")


def _compare(t: Tensor, want: np.ndarray, ranks: list[list[np.ndarray | None]], note: str) -> None:
    """Every device's part, by the rank that holds it."""
    parts = [next((p for p in on_device if p is not None), None) for on_device in zip(*ranks)]
    assert all(p is not None for p in parts), f"{note}: nobody holds {[i for i, p in enumerate(parts) if p is None]}"
    axis, bounds = store_spec(t.uop) if isinstance(t.device, tuple) else (None, ())
    for i, part in enumerate(parts):
        mine = want if axis is None else np.take(want, np.arange(bounds[i], bounds[i + 1]), axis)
        np.testing.assert_allclose(
            np.asarray(part).reshape(mine.shape), mine, rtol=1e-9, atol=1e-9, err_msg=f"device {i}, {note}"
        )
