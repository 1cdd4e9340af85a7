"""Programs with parts in (nested) `@function`s give what they give without: values, gradients, assignments;
sharded or not, in a TinyJit or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from manygrad import Context, Tensor, TinyJit, function

EXAMPLES = 40
N = 4
OPS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda a, b: a * b + 1,
    lambda a, b: (a @ b).tanh(),
    lambda a, b: a - b.mean(0, keepdim=True),
    lambda a, b: a.relu().cumsum(1) + b.T,
    lambda a, b: a.softmax(1) * b.sum(),
    lambda a, b: a.flip(0) + b[1:].pad(((0, 1), (0, 0))),
]
Program = tuple[list[Any], str, bool, bool]


def bodies(depth: int) -> st.SearchStrategy[Any]:
    """Steps over a growing list of values: (op, i, j); ("call", body, i, j); ("state", i): a tensor from outside is
    assigned; ("row",): a view of it is read; ("pass", body, i): the tensor itself, or a view of it, is an argument."""
    step = (
        st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 5), st.integers(0, 5))
        | st.tuples(st.just("state"), st.integers(0, 5))
        | st.tuples(st.just("row"))
    )
    if depth:
        step = (
            step
            | st.tuples(st.just("pass"), bodies(depth - 1), st.integers(0, 5))
            | st.tuples(st.just("call"), bodies(depth - 1), st.integers(0, 5), st.integers(0, 5))
        )
    return st.lists(step, min_size=1, max_size=4)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    return (
        draw(bodies(2)),
        draw(st.sampled_from(("one", "rows", "columns", "copies"))),
        draw(st.booleans()),
        draw(st.booleans()),
    )


class Run:
    def __init__(self, place: str, wrapped: bool):
        rng = np.random.default_rng(3)
        devices, axis = ("PYTHON:0", "PYTHON:1"), {"rows": 0, "columns": 1}.get(place)
        self.wrapped = wrapped
        self.calls: dict[int, Any] = {}
        made = [Tensor(rng.standard_normal((N, N))) for _ in range(4)]
        made = made if place == "one" else [t.shard(devices, axis) for t in made]
        self.x, self.w, self.state, self.start = (t.realize() for t in made)
        self.w.requires_grad = True
        self.row, self.views = self.state[1:2], [self.state, self.state.T, self.state.detach()]

    def body(self, steps: list[Any], a: Tensor, b: Tensor) -> Tensor:
        values = [a, b, self.w]
        for step in steps:
            if step[0] == "state":
                self.state.assign(self.state * 0.5 + values[step[1] % len(values)].detach())
                values.append(self.state * 2)
            elif step[0] == "row":
                values.append(self.row + values[0] * 0.5)
            elif step[0] == "pass":
                values.append(self.call(step[1], self.views[step[2] % 3], values[step[2] % len(values)]))
            elif step[0] == "call":
                values.append(self.call(step[1], values[step[2] % len(values)], values[step[3] % len(values)]))
            else:
                values.append(OPS[step[0]](values[step[1] % len(values)], values[step[2] % len(values)]))
        return values[-1]

    def call(self, steps: list[Any], a: Tensor, b: Tensor) -> Tensor:
        if not self.wrapped:
            return self.body(steps, a, b)
        f = self.calls.get(id(steps))
        if f is None:
            f = self.calls[id(steps)] = function(lambda p, q: self.body(steps, p, q))
        return f(a, b)

    def results(self, steps: list[Any], jit: bool, early: bool) -> list[np.ndarray]:
        def step(x: Tensor) -> tuple[Tensor, Tensor]:
            self.w.grad = None
            out = self.call(steps, x, self.w * 2)
            if early:
                out.realize()
            ((out * 0.1).sum() + (self.w * 0).sum()).backward()
            assert self.w.grad is not None
            return out.realize(self.w.grad), self.w.grad

        run = TinyJit(step) if jit else step
        found = []
        for i in range(4 if jit else 2):
            self.state.assign(self.start)
            out, grad = run((self.x * (1 + i)).realize())
            found += [out.numpy(), grad.numpy(), self.state.numpy()]
        return found


def check(program: Program) -> None:
    steps, place, jit, early = program
    with Context(DEVICE="PYTHON"):
        try:
            want = Run(place, False).results(steps, False, early)
        except RuntimeError as error:  # the tensor is to be differentiated through as it was before it is assigned
            if early and "was overwritten" in str(error):
                return
            raise
        try:
            got = Run(place, True).results(steps, jit, early)
        except (
            RuntimeError
        ) as error:  # a call is differentiated as a whole, also where its results do not depend on what it assigns
            if early and "was overwritten" in str(error) and "backward()" in str(error):
                return
            raise
        for a, b in zip(got, want):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
