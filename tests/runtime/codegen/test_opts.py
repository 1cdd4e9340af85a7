"""Lists of Opts: what is legal, their canonical form, and that every legal list computes what PYTHON computes."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.runtime.codegen.kernel.dots import BYTES
from manygrad.runtime.codegen.opts import (
    KINDS,
    Opt,
    canonical,
    neighbours,
    sums,
)
from manygrad.runtime.codegen.pipeline import prepare
from manygrad.runtime.devices import get_device
from manygrad.runtime.devices.target import host_target
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.environment import Context
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import (
    I,
    add,
    bytes_product,
    f32,
    gemm,
    load,
    logsumexp,
    loop,
    mul,
    red,
    reduce,
    run,
    sink,
    store,
)
from tests.runtime.codegen.test_random import kernels

SETTINGS = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
SIZES = st.sampled_from([1, 2, 5, 16, 17, 33, 40, 65])
DTYPES = st.sampled_from([f32, f32, f32, dtypes.float64, dtypes.bfloat16, dtypes.float16, dtypes.int32, dtypes.int8])


def run_with(ast: UOp, arrays: list[np.ndarray], opts: tuple[Opt, ...], simplify: bool = True) -> np.ndarray:
    """Argument 0 after the CPU's kernel under `opts`."""
    device = get_device("CPU")
    handles = [device.alloc(a.nbytes) for a in arrays]
    for h, a in zip(handles, arrays):
        device.copyin(h, memoryview(a.reshape(-1).view(np.uint8)))
    with Context(CACHE=0):
        device.compile_with(ast, opts, simplify)(handles)
    got = device.as_numpy(handles[0], arrays[0].nbytes).copy().view(arrays[0].dtype).reshape(arrays[0].shape)
    for h, a in zip(handles, arrays):
        device.free(h, a.nbytes)
    return got


def lanes() -> int:
    return host_target().machine.vector_bytes // 4


# *** the families of kernels ***


def values(seed: int, d: DType, n: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(-3, 4, n).astype(d.np) if d.is_int else (rng.standard_normal(n)).astype(d.np)


def softmax_gradient(m: int, n: int) -> UOp:
    """out = s * (y - sum(s * y)) over each row, s = softmax(x)."""
    i, j, r, s, q = loop(m, 0), loop(n, 1), red(n, 2), red(n, 3), red(n, 4)
    top = reduce(load(1, add(mul(i, n), r)), r, op=Ops.MAX)
    e = lambda c: load(1, add(mul(i, n), c)).alu(Ops.SUB, top).alu(Ops.EXP)  # noqa: E731
    total = reduce(e(s), s)
    dot = reduce(e(q).alu(Ops.FDIV, total).alu(Ops.MUL, load(2, add(mul(i, n), q))), q)
    value = e(j).alu(Ops.FDIV, total).alu(Ops.MUL, load(2, add(mul(i, n), j)).alu(Ops.SUB, dot))
    return sink(store(0, add(mul(i, n), j), value, i, j))


def any_bytes(seed: int, d: DType, count: int) -> np.ndarray:
    """All values, both ends often."""
    rng = np.random.default_rng(seed)
    found = rng.integers(d.min, d.max, count, endpoint=True)
    return np.where(rng.random(count) < 0.2, rng.choice([d.min, d.max], count), found).astype(d.np)


@st.composite
def products_of_bytes(draw: st.DrawFn) -> tuple[UOp, list[np.ndarray]]:
    m, n, k, seed = draw(SIZES), draw(SIZES), draw(st.sampled_from([16, 17, 40, 67, 130])), draw(st.integers(0, 9))
    a, b = draw(st.sampled_from(BYTES)), draw(st.sampled_from(BYTES))
    padded, scaled = draw(st.booleans()), draw(st.booleans())
    ast = bytes_product(m, n, k, draw(st.sampled_from(["NN", "NT", "TN", "TT"])), (a, b), padded, scaled)
    out = np.zeros((m, n), np.float32 if scaled else np.int32)
    return ast, [out, any_bytes(seed, a, m * k), any_bytes(seed + 1, b, k * n), values(seed, f32, n)]


@st.composite
def products_of_bfloat16(draw: st.DrawFn) -> tuple[UOp, list[np.ndarray]]:
    m, n, k, seed, d = (
        draw(SIZES),
        draw(SIZES),
        draw(st.sampled_from([16, 17, 40, 67, 130])),
        draw(st.integers(0, 9)),
        dtypes.bfloat16,
    )
    ast = gemm(m, n, k, draw(st.sampled_from(["NN", "NT", "TN", "TT"])), d)
    return ast, [np.zeros((m, n), d.np), values(seed, d, m * k), values(seed + 1, d, k * n)]


@st.composite
def sums_of_exponentials(draw: st.DrawFn) -> tuple[UOp, list[np.ndarray]]:
    m, n, seed = draw(SIZES), draw(SIZES), draw(st.integers(0, 9))
    return logsumexp(m, n, draw(st.booleans())), [np.zeros(m, np.float32), values(seed, f32, m * n)]


@st.composite
def families(draw: st.DrawFn) -> tuple[UOp, list[np.ndarray]]:
    """A kernel as training has them, of odd sizes and of several dtypes, with its arguments."""
    d, seed = draw(DTYPES), draw(st.integers(0, 9))
    m, n, k = draw(SIZES), draw(SIZES), draw(SIZES)
    zeros = lambda *shape: np.zeros(shape, d.np)  # noqa: E731
    i, j, r = loop(m, 0), loop(n, 1), red(k, 2)
    match draw(
        st.sampled_from(
            ["elementwise", "reduce", "product", "product", "shared", "softmax", "rows", "padded", "convolution"]
        )
    ):
        case "elementwise":
            a = load(1, add(mul(i, n), j) if draw(st.booleans()) else add(mul(j, m), i), d)
            value = a.alu(Ops.MUL, load(2, j, d)).alu(Ops.ADD, load(3, i, d))
            return sink(store(0, add(mul(i, n), j), value, i, j)), [
                zeros(m, n),
                values(seed, d, m * n),
                values(1, d, n),
                values(2, d, m),
            ]
        case "reduce":
            terms = draw(st.permutations([(i, m), (j, n), (r, k)]))
            offset, stride = I(0), 1
            for x, size in terms:
                offset, stride = add(offset, mul(x, stride)), stride * size
            value = reduce(load(1, offset, d), r, op=draw(st.sampled_from([Ops.ADD, Ops.MAX])))
            return sink(store(0, add(mul(i, n), j), value, i, j)), [zeros(m, n), values(seed, d, stride)]
        case "product":
            layout = draw(st.sampled_from(["NN", "NT", "TN", "TT"]))
            return gemm(m, n, k, layout, d), [zeros(m, n), values(seed, d, m * k), values(seed + 1, d, k * n)]
        case "shared":  # two reductions in one loop, one of which does not depend on the columns
            x = load(1, add(mul(i, k), r))
            value = reduce(x.alu(Ops.MUL, load(2, add(mul(r, n), j))), r).alu(Ops.ADD, reduce(x, r, op=Ops.MAX))
            ast = sink(store(0, add(mul(i, n), j), value, i, j))
            return ast, [np.zeros((m, n), np.float32), values(seed, f32, m * k), values(seed + 1, f32, k * n)]
        case "softmax":
            s, j = red(n, 3), loop(n, 1)
            r = red(n, 2)
            at = lambda c: load(1, add(mul(i, n), c))  # noqa: E731
            top = reduce(at(r), r, op=Ops.MAX)
            total = reduce(at(s).alu(Ops.SUB, top).alu(Ops.EXP), s)
            value = at(j).alu(Ops.SUB, top).alu(Ops.EXP).alu(Ops.FDIV, total)
            return sink(store(0, add(mul(i, n), j), value, i, j)), [
                np.zeros((m, n), np.float32),
                values(seed, f32, m * n),
            ]
        case "rows":  # the gradient of a softmax: what one reduction computes is used in another, and in the result
            ast = softmax_gradient(m, n)
            return ast, [np.zeros((m, n), np.float32), values(seed, f32, m * n), values(seed + 1, f32, m * n)]
        case "padded":
            inside = I(1).alu(Ops.CMPLT, j).alu(Ops.AND, j.alu(Ops.CMPLT, I(n - 1)))
            value = inside.alu(Ops.WHERE, load(1, add(mul(i, n), j, -1), d, inside), load(2, i, d))
            return sink(store(0, add(mul(i, n), j), value, i, j)), [
                zeros(m, n),
                values(seed, d, m * n),
                values(1, d, m),
            ]
        case _:
            width = min(n, 20)
            b, o, y, x = loop(2, 0), loop(min(m, 6), 1), loop(5, 2), loop(width, 3)
            c, ky, kx = red(min(k, 4), 4), red(3, 5), red(3, 6)
            row, col = add(y, ky, -1), add(x, kx, -1)
            valid = None
            for v, size in ((row, 5), (col, width)):
                one = I(-1).alu(Ops.CMPLT, v).alu(Ops.AND, v.alu(Ops.CMPLT, I(size)))
                valid = one if valid is None else valid.alu(Ops.AND, one)
            ci, co = min(k, 4), min(m, 6)
            source = load(1, add(mul(b, ci * 5 * width), mul(c, 5 * width), mul(row, width), col), valid=valid)
            weight = load(2, add(mul(o, ci * 9), mul(c, 9), mul(ky, 3), kx))
            out = add(mul(b, co * 5 * width), mul(o, 5 * width), mul(y, width), x)
            ast = sink(store(0, out, reduce(source.alu(Ops.MUL, weight), c, ky, kx), b, o, y, x))
            shapes = (2 * ci * 5 * width, co * ci * 9)
            return ast, [np.zeros((2, co, 5, width), np.float32), *(values(seed, f32, s) for s in shapes)]


def rows_plus_columns(rows: int, columns: int) -> UOp:
    i, j = loop(rows, 0), loop(columns, 1)
    return sink(store(0, add(mul(i, columns), j), add(load(1, i), load(2, j)), i, j))


def walk(draw: st.DrawFn, ast: UOp, split: bool) -> tuple[Opt, ...]:
    """A list that the search can come to: a few steps from the heuristic's or from the one without optimisation."""
    prepared = prepare(ast, host_target().machine)
    sig = signature(prepared.ast)
    opts = canonical(sig, prepared.opts)
    if split and draw(st.booleans()):
        opts = ()
    for _ in range(draw(st.integers(1, 5))):
        around = neighbours(sig, opts, lanes(), split)
        if not around:
            break
        kinds = sorted({o.kind for x in around for o in x if o not in opts})
        kind = draw(st.sampled_from(kinds)) if kinds else None
        around = [x for x in around if kind is None or any(o.kind == kind and o not in opts for o in x)]
        opts = draw(st.sampled_from(around))
    return opts


def close(got: np.ndarray, want: np.ndarray) -> None:
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, want)
    else:
        tolerance = {8: 1e-10, 4: 1e-4}.get(got.dtype.itemsize, 5e-2)
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=tolerance, atol=tolerance)


def test_every_list_that_the_search_can_pick() -> None:
    """What PYTHON computes; and the bits of the heuristic's kernel unless a reduction is split otherwise. Every kind
    of Opt is tried."""
    tried: set[str] = set()

    def check(data: st.DataObject, some: st.SearchStrategy[tuple[UOp, list[np.ndarray]]]) -> None:
        ast, arrays = data.draw(some)
        split = data.draw(st.booleans())
        opts = walk(data.draw, ast, split)
        tried.update(o.kind for o in opts)
        got = run_with(ast, arrays, opts)
        close(got, run(ast, arrays)[0])
        prepared = prepare(ast, host_target().machine)
        sig, chosen = signature(prepared.ast), prepared.opts
        if sums(sig, opts) == sums(sig, chosen):
            np.testing.assert_array_equal(got, run_with(ast, arrays, chosen))

    @SETTINGS
    @given(st.data())
    def all_kernels(data: st.DataObject) -> None:
        check(data, families() if data.draw(st.integers(0, 3)) else kernels())

    @settings(SETTINGS, max_examples=100)
    @given(st.data())
    def with_dots(data: st.DataObject) -> None:
        check(data, products_of_bytes() if data.draw(st.booleans()) else products_of_bfloat16())

    @settings(SETTINGS, max_examples=30)
    @given(st.data())
    def with_exponentials(data: st.DataObject) -> None:
        check(data, sums_of_exponentials())

    @settings(SETTINGS, max_examples=20)
    @given(st.data())
    def with_rows(data: st.DataObject) -> None:
        arrays = [np.zeros((20, 80), np.float32), values(0, f32, 20), values(1, f32, 80)]
        check(data, st.just((rows_plus_columns(20, 80), arrays)))

    all_kernels()
    with_rows()
    with_dots()
    with_exponentials()
    machine = host_target().machine
    absent = {"float32_parts"}  # (a search does not change it: test_parts.py)
    absent |= set() if machine.dots else {"tensorize"}
    if all(d.rows == 1 for d in machine.dots):
        absent.add("matrix")
    if machine.group_items == 1:
        absent |= {"bind", "bind_reduce", "cache_shared", "copy_ahead", "warp_matrix"}
    assert tried == {kind.kind for kind in KINDS} - absent  # (groups: test_groups.py, test_lanes.py)
