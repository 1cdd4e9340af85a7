"""A TinyJit of a random function gives what the function gives: arguments of all kinds in any order, symbolic values,
state, other shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from manygrad import Context, Tensor, TinyJit, Variable
from manygrad.errors import JitError

EXAMPLES = 60
N = 4
NAMES = ("a", "b", "c", "d")
KINDS = ("tensor", "list", "dict", "view", "lazy", "symbolic", "computed", "number", "assigned")
CALLS = ("same", "reordered", "keyword", "shape", "number", "twice")
Program = tuple[list[str], list[tuple[str, int]]]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """The kind of each argument; how each call is made, and how large what is symbolic is."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=len(NAMES)))
    usual = st.sampled_from(("same", "same", "reordered"))
    return kinds, draw(st.lists(st.tuples(usual | st.sampled_from(CALLS), st.integers(1, N)), min_size=3, max_size=8))


class Side:
    """One of the two: its state, and its way to call the function."""

    def __init__(self, kinds: list[str], jit: bool):
        self.kinds = kinds
        self.state = Tensor(np.zeros(N)).realize()
        self.size = Variable("n", 1, N)
        self.step: Any = TinyJit(self.plain) if jit else self.plain

    def plain(self, **arguments: Any) -> Any:
        total = self.state * 0.5
        parts = []
        for k, name in enumerate(sorted(arguments)):
            x, kind = arguments[name], self.kinds[k]
            if kind == "number":
                total = total * x
                continue
            if kind == "list":
                x = x[0] - x[1][0]
            elif kind == "dict":
                x = x["p"] * 2 - x["q"]
            elif kind == "assigned":
                x.assign(x * 2 + 1)
            total = total + x.sum() * (k + 1)
            parts.append(x + k)
        self.state.assign(total)
        return {"total": total.realize(), "parts": parts}

    def arguments(self, call: str, size: int, seed: int) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        n = N + 1 if call == "shape" else N

        def fresh() -> Tensor:
            return Tensor(rng.integers(-4, 5, n).astype(np.float64)).realize()

        def pair() -> dict[str, Tensor]:
            p, q = fresh(), fresh()
            return {"q": q, "p": p} if seed % 2 else {"p": p, "q": q}

        def symbolic() -> Tensor:
            return fresh()[: self.size.bind(min(size, N))]

        make = {
            "tensor": fresh,
            "assigned": fresh,
            "list": lambda: [fresh(), (fresh(),)],
            "dict": pair,
            "view": lambda: fresh().flip(0),
            "lazy": lambda: fresh() * 2,
            "symbolic": lambda: symbolic() * 3,
            "computed": lambda: (symbolic() * 3).realize(),
            "number": lambda: 3 if call == "number" else 2,
        }
        given = {NAMES[k]: make[kind]() for k, kind in enumerate(self.kinds)}
        if call == "twice":
            tensors = [name for name, x in given.items() if isinstance(x, Tensor) and x.shape == (n,)]
            if len(tensors) > 1:
                given[tensors[1]] = given[tensors[0]]
        return dict(reversed(given.items())) if call == "reordered" else given

    def call(self, call: str, size: int, seed: int) -> list[np.ndarray]:
        given = self.arguments(call, size, seed)
        out = self.step(**given)
        tensors = [out["total"], *out["parts"]]
        seen = [given[NAMES[k]] for k, kind in enumerate(self.kinds) if kind == "assigned"]
        return [
            t.sum().numpy() if any(not isinstance(d, int) for d in t.shape) else t.numpy()
            for t in (*tensors, *seen, self.state)
        ]


def check(program: Program) -> None:
    kinds, calls = program
    with Context(DEVICE="PYTHON"):
        want, got = Side(kinds, False), Side(kinds, True)
        for seed, (call, size) in enumerate(calls):
            before = want.state.numpy()
            expected = want.call(call, size, seed)
            try:
                found = got.call(call, size, seed)
            except JitError as error:
                assert call in ("shape", "number", "twice") or any(
                    c in ("shape", "number", "twice") for c, _ in calls
                ), error
                want.state = Tensor(before).realize()
                np.testing.assert_array_equal(got.state.numpy(), before)
                continue
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_array_equal(a, b)
