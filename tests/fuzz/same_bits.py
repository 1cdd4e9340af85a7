"""Random training steps have the same bits on 1, 2, 4 and 8 devices, for any number of rows that gives each device
four: losses, gradients, sums over the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from manygrad import Tensor

EXAMPLES = 10
COUNTS = (1, 2, 4, 8)
Program = dict[str, Any]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    return {
        "rows": draw(st.integers(32, 120)),
        "tokens": draw(st.sampled_from([1, 2, 3])),
        "width": draw(st.sampled_from([8, 16, 32])),
        "hidden": draw(st.sampled_from([16, 40])),
        "activation": draw(st.sampled_from(["relu", "none"])),
        "loss": draw(st.sampled_from(["square", "sum"])),
        "seed": draw(st.integers(0, 1000)),
    }


def step(p: Program, devices: tuple[str, ...]) -> list[bytes]:
    rng = np.random.default_rng(p["seed"])

    def array(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    x = Tensor(array(p["rows"], p["tokens"], p["width"])).shard(devices, 0).contiguous().realize()
    w, b, v = (
        Tensor(a).shard(devices).contiguous().realize().requires_grad_()
        for a in (array(p["width"], p["hidden"]), array(p["hidden"]), array(p["hidden"], 6))
    )
    h = x.reshape(-1, p["width"]) @ w + b
    if p["activation"] != "none":
        h = getattr(h, p["activation"])()
    out = h @ v
    loss = out.square().mean() if p["loss"] == "square" else out.sum()
    grads = loss.gradient(w, b, v)
    return [t.numpy().tobytes() for t in (loss, *grads, x.sum(0), x.mean(), x.sum(2).sum(1), x.sum(1).sum())]


def check(p: Program) -> None:
    found = {n: step(p, tuple(f"CPU:{i}" for i in range(n))) for n in COUNTS}
    for n, got in found.items():
        differ = [i for i, (a, b) in enumerate(zip(got, found[1])) if a != b]
        assert not differ, f"values {differ} have other bits on {n} devices than on one: {p}"
