"""A loop around two TinyJits gives what it gives without: the same tensors again and again, written from outside
between the calls, results as arguments of the next call, lazy values of state and results that are computed later, or
never."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from manygrad import Context, Tensor, TinyJit, Variable
from manygrad.errors import JitError

EXAMPLES = 60
N = 4
DEVICES = ("CPU:0", "CPU:1")
BODIES = ("add", "state", "part", "copy", "argument", "inner", "number", "view", "random")
ARGUMENTS = ("first", "second", "result", "lazy", "view", "fresh")
BETWEEN = ("write", "part", "hold", "hold state", "read", "replace", "forget", "step", "realize", "write state")
REFUSED = "is the same memory", "were one tensor at capture", "writes something else", "was captured as shape"
Program = dict[str, Any]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """What the functions do; which is called with what, and what is done between the calls."""
    usual = draw(st.tuples(st.sampled_from(ARGUMENTS), st.sampled_from(ARGUMENTS)))
    other = st.tuples(st.sampled_from(ARGUMENTS), st.sampled_from(ARGUMENTS))
    call = st.one_of(st.just(usual), st.just(usual), st.just(usual), other)
    between = st.lists(st.sampled_from(BETWEEN), max_size=3)
    return {
        "bodies": [draw(st.lists(st.sampled_from(BODIES), min_size=1, max_size=4)) for _ in range(2)],
        "realize": draw(st.booleans()),
        "axis": draw(st.sampled_from((None, None, 0))),
        "calls": draw(st.lists(st.tuples(st.sampled_from((0, 0, 1)), call, between), min_size=3, max_size=12)),
    }


class Side:
    """One of the two: its tensors, and its way to call the function."""

    def __init__(self, program: Program, jit: bool):
        self.bodies, self.realize, self.axis = program["bodies"], program["realize"], program["axis"]
        self.state = self.stored(np.arange(N)).realize()
        self.total = self.stored(np.zeros(N)) if self.axis is not None else Tensor.zeros(N).contiguous()
        self.first = self.stored(np.ones(N)).realize()
        self.second = self.stored(np.arange(2 * N))[::2]
        self.result = self.stored(np.full(N, 2)).realize()
        self.held: list[Tensor] = []
        self.steps: list[Any] = [self.step(body) for body in self.bodies]
        if jit:
            self.steps = [TinyJit(step) for step in self.steps]
        self.number = Variable("n", 1, N)
        self.own = () if jit else (self.state, self.total, self.first)

    def stored(self, values: np.ndarray) -> Tensor:
        t = Tensor(values.astype(np.float32))
        return t if self.axis is None else t.shard(DEVICES, self.axis)

    def step(self, body: list[str]) -> Any:
        return lambda a, b, n=1: self.plain(body, a, b, n)

    def plain(self, body: list[str], a: Tensor, b: Tensor, n: Any) -> Tensor:
        x = a + 2 * b
        for part in body:
            if part == "add":
                x = x * 0.5 + 1
            elif part == "state":
                self.state.assign(self.state * 0.5 + x)
            elif part == "part":
                self.state[1:3] = x[:2]
            elif part == "copy":
                x = x.contiguous() + self.state
            elif part == "argument":
                a.assign(b * 0.5 + 1)
            elif part == "inner":
                self.total += x
                x = (x + self.total).realize() if self.realize else x + self.total
            elif part == "number":
                x = x * n
            elif part == "random":
                x = x + x.rand_like()
            else:
                x = x.flip(0) + self.state[:1]
        return x

    def argument(self, kind: str, k: int) -> Tensor:
        if kind == "lazy":
            return self.first * 0.5
        if kind == "view":
            return self.first.flip(0)
        if kind == "fresh":
            return self.stored(np.arange(N) + k)
        value = getattr(self, kind)
        assert isinstance(value, Tensor)
        return value

    def between(self, what: str, k: int) -> list[np.ndarray]:
        if what == "write":
            self.first.assign(self.first * 0.5 + k)
        elif what == "part":
            self.first[:2] = float(k)
        elif what == "hold":
            self.held.append(self.result * 2 + 1)
        elif what == "hold state":
            self.held.append(self.state.flip(0) - self.total)
        elif what == "replace":
            self.first = self.stored(np.full(N, k)).realize()
        elif what == "forget" and self.held:
            self.held.pop(0)
        elif what == "step":
            self.total += self.result
        elif what == "realize" and self.held:
            self.held[-1].realize()
        elif what == "write state":
            self.state.assign(self.state - 1)
        elif what == "read":
            return self.seen()
        return []

    def seen(self) -> list[np.ndarray]:
        return [t.numpy() for t in (self.result, self.state, self.total, self.first, self.second, *self.held)]

    def call(self, which: int, kinds: tuple[str, str], k: int) -> None:
        Tensor.manual_seed(k)
        number = [self.number.bind(1 + k % N)] if "number" in self.bodies[which] else []
        self.result = self.steps[which](*(self.argument(kind, k) for kind in kinds), *number)
        self.result.realize(*self.own)  # (a graph has one value for a variable)


def check(program: Program) -> None:
    with Context(DEVICE="CPU"):
        want, got = Side(program, False), Side(program, True)
        for k, (which, kinds, between) in enumerate(program["calls"]):
            try:
                got.call(which, kinds, k)
            except JitError as error:
                assert any(reason in str(error) for reason in REFUSED), error
                return
            want.call(which, kinds, k)
            # (what a TinyJit has returned it returns again, with other values)
            for what in between:
                for a, b in zip(got.between(what, k), want.between(what, k), strict=True):
                    np.testing.assert_array_equal(a, b)
        for a, b in zip(got.seen(), want.seen(), strict=True):
            np.testing.assert_array_equal(a, b)
