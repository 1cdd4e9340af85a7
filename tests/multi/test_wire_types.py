"""Gradients that travel in a half type: who rounds what, and how many bytes go over the wire."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from manygrad import Tensor
from manygrad.nn.optim import SGD, AdamW
from manygrad.runtime.storage import storage
from manygrad.tensor.uop import GroupOp, Ops
from tests.multi.cluster import assert_same_collectives, lowered, run, workers
from tests.schedule.programs import linear_of

X = np.random.default_rng(0).standard_normal((12, 40)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((40, 3)).astype(np.float32)
SUMS = (Ops.ALLREDUCE, Ops.REDUCESCATTER)
FOUR = tuple(f"CPU:{i}" for i in range(4))
HALVES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def gradient(devices: Any, dtype: str | None, axis: int | None = None) -> Tensor:
    """Of a weight by rows that are cut over devices, as an optimiser has it for its step."""
    w = Tensor(W).shard(devices, axis) if isinstance(devices, tuple) else Tensor(W)
    x = Tensor(X).shard(devices, 0) if isinstance(devices, tuple) else Tensor(X)
    (g,) = (x @ w).square().sum().gradient(w)
    return g if dtype is None else g._op(Ops.WIRE, dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_terms_are_rounded_and_their_sum_once(dtype: str, size: int) -> None:
    with workers(size) as world:
        g = gradient(world.devices, dtype)
        linears = lowered([g])
        assert_same_collectives(linears)
        sums = [c.src[0] for c in linears[0].src if c.src[0].op in GroupOp.COLLECTIVE]
        assert [c.dtype.name for c in sums if c.arg.size > 1] == [dtype]
        parts = [p for rank in run([g]) for p in rank[0] if p is not None]
    half = HALVES[dtype]
    bounds = [-(-i * 12 // size) for i in range(size + 1)]
    terms = [2 * X[a:b].T @ (X[a:b] @ W) for a, b in itertools.pairwise(bounds)]
    exact = sum(t.astype(half).astype(np.float32) for t in terms)
    for p in parts:
        assert (p == parts[0]).all() and (p == p.astype(half).astype(np.float32)).all()
        assert np.allclose(p.reshape(W.shape), exact, rtol=float(ml_dtypes.finfo(half).eps), atol=0.5)


def test_on_one_device_nothing_is_rounded() -> None:
    assert (gradient(None, "bfloat16").numpy() == gradient(None, None).numpy()).all()


def test_a_weight_that_is_cut_takes_its_part_of_the_sum() -> None:
    updated = {}
    for dtype in ("bfloat16", None):
        w = Tensor(W).shard(FOUR, 0).contiguous().realize()
        g = (Tensor(X).shard(FOUR, 0) @ w).square().sum().gradient(w)[0]
        w.assign(w - (g if dtype is None else g._op(Ops.WIRE, dtype)))
        found = {(c.src[0].op, c.src[0].dtype.name) for c in linear_of(w).src if c.src[0].op in GroupOp.COLLECTIVE}
        assert (Ops.REDUCESCATTER, dtype or "float32") in found, found
        updated[dtype] = w.numpy()
    assert np.allclose(updated["bfloat16"], updated[None], rtol=0.02, atol=1.0)


@pytest.mark.parametrize("optimizer", [SGD, AdamW])
def test_devices_stay_alike_over_steps(optimizer: Any) -> None:
    losses = {}
    for dtype in (None, "bfloat16"):
        w = Tensor(W * 0.1).shard(FOUR).requires_grad_()
        o = optimizer([w], lr=0.01, all_reduce_dtype=dtype)
        found = []
        with Tensor.train():
            for _ in range(5):
                o.zero_grad()
                loss = (Tensor(X).shard(FOUR, 0) @ w).square().mean()
                loss.backward()
                o.step()
                found.append(loss.item())
        losses[dtype] = found
        parts = storage(o.flats[0].flat.uop)
        assert isinstance(parts, list)
        values = [p.copyout() for p in parts if p is not None]
        assert len(values) == 4 and all((v == values[0]).all() for v in values)
    assert losses[None] != losses["bfloat16"]
    assert np.allclose(losses[None], losses["bfloat16"], rtol=0.02) and losses[None][-1] < losses[None][0]


@pytest.mark.parametrize("cuts", [(0, 1), (0, None), (None, None)], ids=["cut", "one_cut", "whole"])
def test_sums_of_an_optimiser_travel_in_the_type(cuts: tuple[int | None, ...]) -> None:
    """Of parameters that are cut, and of those that are whole."""
    found = {}
    for dtype in ("bfloat16", None):
        first, second = (Tensor.ones(8, 8).shard(FOUR, cut).contiguous().realize().requires_grad_() for cut in cuts)
        o = SGD([first, second], lr=0.01, all_reduce_dtype=dtype)
        with Tensor.train():
            (Tensor(X[:, :8]).shard(FOUR, 0) @ first @ second).square().sum().backward()
            todo = o.schedule_step()
        calls = [c.src[0] for c in linear_of(todo).src if c.src[0].op in SUMS]
        found[dtype] = {(c.op, c.dtype.name) for c in calls}
    ops = {op for op, _ in found[None]}
    assert (
        ops and found[None] == {(op, "float32") for op in ops} and found["bfloat16"] == {(op, "bfloat16") for op in ops}
    )


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="all_reduce_dtype must be bfloat16, float16 or None, got int8"):
        SGD([Tensor(W)], all_reduce_dtype="int8")
