"""Something fails at some stage of some program; then every tensor holds a value that it had at some time, or says that
it is lost, and all that is computed from there on is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from manygrad import Context, Tensor, TinyJit, Variable, function
from manygrad import schedule as scheduling
from manygrad.runtime.devices import device as device_module
from manygrad.runtime.devices import python as python_device
from manygrad.runtime.engine import linear
from manygrad.runtime.engine import realize as engine
from manygrad.runtime.executors import items
from manygrad.runtime.jit import captured, recording, tiny_jit
from manygrad.schedule import lower as lowering
from manygrad.tensor import function as functions
from manygrad.tensor import gradient, storage
from manygrad.tensor.ops import differentiation

EXAMPLES = 150
N, STATES, STEPS = 4, 3, 11
ERRORS = (ZeroDivisionError, MemoryError, KeyboardInterrupt)
STAGES: list[tuple[Any, str]] = [
    (scheduling, "normalize"),
    (scheduling, "create_linear"),
    *(
        (lowering, n)
        for n in (
            "clean",
            "lower_shards",
            "lower_checks",
            "simplify",
            "compute_in_parts",
            "lower_storage",
            "copy_old_values",
            "split_updates",
            "insert_stores",
        )
    ),
    *(
        (lowering, n)
        for n in (
            "split_kernels",
            "rangeify",
            "order_items",
            "merge_kernels",
            "chain_kernels",
            "pass_parts",
            "plan_memory",
            "lower_sink_to_linear",
        )
    ),
    (linear, "storage"),
    (linear, "exec_view"),
    (linear, "run_items"),
    (python_device, "PythonKernel"),
    (device_module.Device, "alloc"),
    (items.KernelItem, "run"),
    (items.KernelItem, "values"),
    (engine, "compile_linear"),
    (engine, "run_functions"),
    (engine.RealizeEngine, "_needed"),
    (engine, "remember"),
    (engine, "replace_lazy"),
    (recording, "stored"),
    (captured, "stored"),
    (tiny_jit, "walk"),
    (captured, "moves_of"),
    (captured, "batch_kernels"),
    (captured, "run_items"),
    (functions, "tensors_out"),
    (functions, "_read_by_gradient"),
    (functions, "gradients_of_call"),
    (functions, "flow_back"),
    (functions, "substitute"),
    (gradient, "substitute"),
    (differentiation, "compute_gradients"),
    (differentiation, "with_history"),
    (Tensor, "_new"),
    (storage, "write"),
    (storage, "move"),
    (storage, "rebased"),
    (functions, "_stand_ins"),
    (functions, "_written"),
]
AFTERWARDS = [
    (3, 0, 0, 0),
    (5, 0, 0, 3),
    (7, 0, 1, 0),
    (7, 1, 2, 0),
    (7, 2, 0, 0),
    (8, 0, 1, 0),
    (4, 0, 0, 0),
    (6, 1, 0, 0),
]
Value = Any  # an array, or None: it cannot be computed


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[tuple[int, int, int, int]], tuple[int, int, int, int]]:
    """(what, i, j, k) of each step; (step from which on, stage, call of it that fails, error)."""
    steps = draw(
        st.lists(
            st.tuples(
                st.integers(0, STEPS - 1), st.integers(0, STATES - 1), st.integers(0, STATES - 1), st.integers(0, 3)
            ),
            min_size=2,
            max_size=10,
        )
    )
    hit = draw(
        st.tuples(
            st.integers(0, len(steps) - 1),
            st.integers(0, len(STAGES) - 1),
            st.sampled_from((0, 0, 0, 1, 1, 2, 3, 5, 8)),
            st.integers(0, len(ERRORS) - 1),
        )
    )
    return steps, hit


class Fault:
    """Has a stage raise `error` once, at its `call`-th call from the moment it is `armed`."""

    def __init__(self, stage: int, call: int, error: type[BaseException]):
        (self.owner, self.name), self.call, self.error = STAGES[stage], call, error
        self.armed = False

    def __enter__(self) -> Fault:
        self.before = before = self.owner.__dict__[self.name]
        fn = before.__func__ if isinstance(before, staticmethod) else before

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.armed:
                self.call -= 1
                if self.call < 0:
                    self.armed = False
                    raise self.error(f"injected into {self.name}")
            return fn(*args, **kwargs)

        setattr(self.owner, self.name, staticmethod(wrapped) if isinstance(before, staticmethod) else wrapped)
        return self

    def __exit__(self, *exc: object) -> None:
        setattr(self.owner, self.name, self.before)


class World:
    """Tensors beside the values that they may have: of a stored one those after each
    assignment since it was last looked at."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        arrays = [rng.integers(-4, 5, N).astype(np.float64) for _ in range(STATES + 1)]
        self.states = [Tensor(a).realize() for a in arrays]
        self.versions: list[list[Value]] = [[a] for a in arrays]
        self.lazy: list[tuple[Tensor, Value]] = []
        self.weight = Tensor(np.arange(1.0, N + 1), requires_grad=True).realize()
        self.traced = function(lambda a, b: (a * b + 1, (a - b).sum()))
        state = self.states[STATES]  # the last one is the jit's

        def step(a: Tensor, b: Tensor) -> Tensor:
            state.assign(state * 0.5 + a)
            return state * 2 + b

        self.jit = TinyJit(step)
        n = Variable("n", 1, N)
        few = Tensor(np.ones(N)).realize()
        self.bad: Callable[[], Tensor] = lambda: few[: n.bind(2)].sum() + few[: n.bind(3)].sum()

    def now(self, i: int) -> Value:
        return self.versions[i][-1]

    def assigned(self, i: int, f: Callable[[], Value], write: Callable[[], Any]) -> None:
        values = [self.now(j) for j in range(STATES + 1)]
        new = None if any(v is None for v in values) else f()
        self.versions[i].append(new)  # (before: it may have been written when the step fails)
        write()

    def step(self, what: int, i: int, j: int, k: int) -> None:
        x, y = self.states[i], self.states[j]
        a, b = self.now(i), self.now(j)
        known = a is not None and b is not None
        if what == 0:
            self.versions[i].append(a * 0.5 + b if known else None)
            x.assign(x * 0.5 + y)
        elif what == 1:
            self.versions[i].append(np.concatenate([a[:k], b[k:] + 1]) if known else None)
            x[k:] = y[k:] + 1
        elif what == 2:
            self.keep((x - y).cumsum(0), (a - b).cumsum() if known else None)
        elif what == 3:
            x.realize()
            self.confirmed()
        elif what == 4 and self.lazy:
            t, want = self.lazy[k % len(self.lazy)]
            got = t.numpy()
            assert want is not None, "computed what cannot be"
            np.testing.assert_array_equal(got, want)
            self.confirmed()
        elif what == 5:
            np.testing.assert_array_equal((Tensor(np.full(N, 2.0)) * k).realize().numpy(), np.full(N, 2.0 * k))
            self.confirmed()
        elif what == 6:
            self.weight.grad = None
            (self.weight * x * 2).sum().backward()
            assert self.weight.grad is not None
            got = self.weight.grad.numpy()
            assert a is not None
            np.testing.assert_array_equal(got, a * 2)
            self.confirmed()
        elif what == 7:
            s = self.now(STATES)
            new = s * 0.5 + a if s is not None and a is not None else None
            self.versions[STATES].append(new)
            j = j if i != j else (j + 1) % STATES  # two tensors at every call
            y, b = self.states[j], self.now(j)
            got = self.jit(x, y)
            self.confirmed()
            assert new is not None and b is not None
            np.testing.assert_array_equal(got.numpy(), new * 2 + b)
        elif what == 8:
            p, q = self.traced(x, y)
            self.keep(p, a * b + 1 if known else None)
            self.keep(q, (a - b).sum() if known else None)
        elif what == 9:
            self.versions[i].append(None)
            x.assign(x + self.bad())
        elif what == 10:
            g = (self.traced(self.weight * 2, y)[0].sum()).gradient(self.weight)[0]
            self.keep(g, 2 * b if b is not None else None)

    def keep(self, t: Tensor, value: Value) -> None:
        self.lazy = [*self.lazy[-4:], (t, value)]

    def confirmed(self) -> None:
        """All that was assigned has been carried out."""
        assert all(v[-1] is not None for v in self.versions), (
            "an assignment that cannot be carried out was passed over in silence"
        )
        self.versions = [v[-1:] for v in self.versions]

    def look(self) -> None:
        """After a failure: what tensors hold is what they held at some time; it is what they hold from now on."""
        for i, t in enumerate(self.states):
            got, allowed = t.numpy(), [v for v in self.versions[i] if v is not None]
            assert any(np.array_equal(got, v) for v in allowed), f"state {i} holds {got}, it was {allowed}"
            self.versions[i] = [got]
        lazy, self.lazy = self.lazy, []
        for t, want in lazy:
            try:
                got = t.numpy()
            except (RuntimeError, ValueError) as error:
                assert want is None or "is lost" in str(error), error
            else:
                assert want is not None
                np.testing.assert_array_equal(got, want)
                self.lazy.append((t, want))

    def hopeless(self) -> bool:
        return any(v[-1] is None for v in self.versions)


def check(program: tuple[list[tuple[int, int, int, int]], tuple[int, int, int, int]]) -> None:
    steps, (hit, stage, call, error) = program
    with Context(DEVICE="PYTHON"), Fault(stage, call, ERRORS[error]) as fault:
        world = World()
        for at, step in enumerate([*steps, *AFTERWARDS]):
            fault.armed = fault.armed or at == hit
            try:
                world.step(*step)
            except (*ERRORS, ValueError, RuntimeError) as e:
                assert any(text in str(e) for text in ("injected", "bind mismatch", "is lost")), e
                fault.armed = False
                settle(world)
        fault.armed = False
        settle(world)


def settle(world: World) -> None:
    if world.hopeless():
        try:
            Tensor(np.ones(N)).realize().contiguous().realize()
            (Tensor(np.ones(N)).realize() + 1).realize()
        except ValueError as e:
            assert "bind mismatch" in str(e), e
    world.look()
