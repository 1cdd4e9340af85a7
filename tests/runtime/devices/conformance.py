"""What every backend that computes has to do, compared with the PYTHON device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import Context, Tensor, TinyJit, Variable
from manygrad.nn import functional as F
from manygrad.nn.optim import AdamW
from manygrad.runtime.buffer import Buffer, copy_buffer
from manygrad.runtime.devices import get_device
from manygrad.runtime.devices.numbers import Numbers
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.args import VarArg
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import elementwise, f32, gemm, load, logsumexp, loop, run, sink, store


def memory(name: str) -> None:
    """Data comes back, views are parts, a freed block serves again."""
    device = get_device(name)
    a = device.alloc(1000)
    device.copyin(a, memoryview(bytes(1000)))
    device.copyin(device.view(a, 64, 200), memoryview(bytes(range(200))))
    out = bytearray(50)
    device.copyout(memoryview(out), device.view(a, 128, 50))
    assert list(out) == list(range(64, 114))
    in_use = device.allocated
    device.free(a, 1000)
    assert device.allocated == in_use - 1024 and device.cached >= 1024
    assert device.alloc(1000) is a and device.allocated == in_use
    device.free(a, 1000)
    device.trim()
    assert device.cached == 0


def kernels(name: str) -> None:
    rng = np.random.default_rng(0)
    n = UOp(Ops.DEFINE_VAR, dtypes.index, (), VarArg("n", 1, 100))
    i = loop(n, 0)
    cases = [
        (elementwise(lambda a, b: a.alu(Ops.MUL, b).alu(Ops.EXP), [f32, f32], 70), [70, 70, 70], ()),
        (gemm(17, 19, 23), [17 * 19, 17 * 23, 23 * 19], ()),
        (logsumexp(5, 33), [5, 5 * 33], ()),
        (sink(store(0, i, load(1, i).alu(Ops.ADD, load(1, i)), i)), [100, 100], (61,)),
    ]
    for ast, sizes, vars in cases:
        arrays = [np.zeros(sizes[0], np.float32), *(rng.standard_normal(s).astype(np.float32) for s in sizes[1:])]
        got, want = run(ast, arrays, vars, device=name)[0], run(ast, arrays, vars)[0]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def graphs(name: str) -> None:
    """Calls run in order, as often as they are asked for; `synchronize` waits for them."""
    device = get_device(name)
    double = device.compile(elementwise(lambda a: a.alu(Ops.ADD, a), [f32], 100))
    a, b = device.alloc(400), device.alloc(400)
    device.copyin(a, memoryview(np.ones(100, np.float32)).cast("B"))
    steps = device.graph([(double, [b, a], Numbers()), (double, [a, b], Numbers())])
    steps()
    stamps = steps(timed=True)
    device.synchronize()
    out = np.empty(100, np.float32)
    device.copyout(memoryview(out).cast("B"), a)
    assert (out == 16).all() and stamps is not None and len(stamps) == 3 and stamps == sorted(stamps)


def moved_graphs(name: str) -> None:
    """Calls read a part of other memory in place of the first one, and of that again; it may begin anywhere."""
    device = get_device(name)
    double = device.compile(elementwise(lambda a: a.alu(Ops.ADD, a), [f32], 8))

    def block(value: float, offset: int) -> Any:
        own = device.view(device.alloc(128), offset, 64)
        device.copyin(own, memoryview(np.full(16, value, np.float32)).cast("B"))
        return own

    a, b, other = block(1, 0), block(0, 0), block(5, 4)
    graph = device.graph([(double, [b, device.view(a, 32, 32)], Numbers()), (double, [b, b], Numbers())])
    move = graph.mover(a)
    if move is None:  # (a queue that calls kernels one by one is made anew)
        return
    for handle, want in ((a, 4), (other, 20), (a, 4)):
        move(handle)
        graph()
        device.synchronize()
        out = np.empty(8, np.float32)
        device.copyout(memoryview(out).cast("B"), device.view(b, 0, 32))
        assert (out == want).all()


def parts_of_memory(name: str) -> None:
    """Views that begin anywhere, read and written, and copied to devices of the same kind: without the host's help,
    where it does not see the memory."""
    x = Tensor(np.arange(1000, dtype=np.float32), device=name).realize()
    assert (x[3:803].contiguous() * 2).tolist() == [2.0 * i for i in range(3, 803)]
    y = Tensor.zeros(1000, device=name).contiguous().realize()
    y[1:901] = x[13:913] + 1
    assert y.tolist() == [0.0, *[float(i + 1) for i in range(13, 913)], *[0.0] * 99]
    source = Buffer(name, 100, f32).copyin(np.arange(100, dtype=np.float32))
    for to in (name, f"{name}0"):
        target = Buffer(to, 100, f32).copyin(np.zeros(100, np.float32))
        with pytest.MonkeyPatch.context() as patch:
            if get_device(name).allocator.copy is not None:
                patch.setattr(Buffer, "copyout", None)  # (what a copy through the host would call)
            copy_buffer(target.view(7, f32, 40), source.view(7, f32, 12))
        assert target.copyout().tolist() == [0] * 10 + list(range(3, 10)) + [0] * 83


def programs(name: str) -> None:
    """Tensors: a gradient, a copy to another device, a replayed step."""
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((6, 5)).astype(np.float32), rng.standard_normal((5, 3)).astype(np.float32)

    def gradient(device: str) -> tuple[np.ndarray, np.ndarray]:
        a, b = Tensor(x, device=device), Tensor(w, device=device, requires_grad=True)
        loss = (a @ b).softmax().square().sum()
        loss.backward()
        assert b.grad is not None
        return loss.to("PYTHON").numpy(), b.grad.numpy()

    for got, want in zip(gradient(name), gradient("PYTHON")):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)

    @TinyJit
    def step(a: Tensor) -> Tensor:
        return (a.exp().sum(1, keepdim=True) + a).realize()

    for k in range(4):
        a = x + k
        np.testing.assert_allclose(
            step(Tensor(a, device=name).realize()).numpy(), np.exp(a).sum(1, keepdims=True) + a, rtol=1e-4
        )


# *** the operators, of every type ***

FLOAT_OPS = (Ops.ADD, Ops.SUB, Ops.MUL, Ops.FDIV, Ops.MAX, Ops.CMPLT, Ops.CMPNE, Ops.CMPEQ)
INT_OPS = (Ops.ADD, Ops.SUB, Ops.MUL, Ops.IDIV, Ops.MOD, Ops.MAX, Ops.CMPLT, Ops.CMPNE, Ops.CMPEQ, Ops.AND, Ops.OR,
           Ops.XOR, Ops.SHL, Ops.SHR)  # fmt: skip
BOOL_OPS = (Ops.ADD, Ops.MUL, Ops.MAX, Ops.CMPLT, Ops.CMPNE, Ops.CMPEQ, Ops.AND, Ops.OR, Ops.XOR)
EXACT_UNARY = (Ops.NEG, Ops.RECIP, Ops.SQRT, Ops.TRUNC)  # rounded once
SPECIAL = (0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 255.5, -128.5, 1e10, -1e10, 3e38, 65504.0, 65520.0, 6e-8,
           -6.1e-5, 1e-40, 2.0**31, -(2.0**31), 2.0**63, 2.0**64, 1.0039063)  # fmt: skip


def data(d: DType, n: int) -> np.ndarray:
    """Values of type `d`, the extreme ones first."""
    rng = np.random.default_rng(d.itemsize)
    if d.is_bool:
        return rng.random(n) < 0.5
    with np.errstate(all="ignore"):
        if d.is_float:
            x = (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)).astype(d.np)
            x[: len(SPECIAL)] = np.array(SPECIAL).astype(d.np)
            return x
        x = rng.integers(int(d.min), int(d.max), n, dtype=d.np, endpoint=True)
        x[:4] = np.array([0, 1, int(d.max), int(d.min)]).astype(d.np)
        return x


def same(name: str, values: Callable[..., list[UOp]], arrays: list[np.ndarray], types: list[DType]) -> None:
    """The device stores `values(loads of the arrays)` as PYTHON does: bit for bit, but for the bits of NaN."""
    n, i = arrays[0].size, loop(arrays[0].size, 0)
    found = values(*(load(50 + k, i, d) for k, d in enumerate(types)))
    first = len(found)
    found = values(*(load(first + k, i, d) for k, d in enumerate(types)))
    ast = sink(*(store(k, i, v, i) for k, v in enumerate(found)))
    given = [*(np.zeros(n, v.dtype.np) for v in found), *arrays]
    for noopt in (0, 1) if types[0] in (f32, dtypes.int32) else (0,):
        with Context(NOOPT=noopt, CACHE=0):
            got, want = run(ast, given, device=name), run(ast, given)
        for v, g, w in zip(found, got, want):
            exact = g.astype(np.float64) if v.dtype.is_half else g
            np.testing.assert_array_equal(
                exact, w.astype(exact.dtype), err_msg=f"{v.op.name} {v.src[0].dtype} {v.dtype}"
            )


def operators(name: str) -> None:
    for d in dtypes.all:
        ops = FLOAT_OPS if d.is_float else BOOL_OPS if d.is_bool else INT_OPS
        a, b = data(d, 320), data(d, 320)[::-1].copy()
        if d.is_int:
            edges = np.array([0, 1, int(d.max), int(d.min), 0 if d.is_unsigned else -1], dtype=d.np)
            pairs = np.array(list(itertools.product(edges, edges)))
            a[: len(pairs)], b[: len(pairs)] = pairs[:, 0], pairs[:, 1]
            b[40:200] = np.random.default_rng(0).integers(0, d.itemsize * 8 + 3, 160).astype(d.np)
        same(name, lambda x, y, ops=ops: [x.alu(op, y) for op in ops], [a, b], [d, d])
        unary = EXACT_UNARY if d.is_float else (Ops.NOT,) if d.is_bool else (Ops.NOT, Ops.NEG, Ops.TRUNC)
        same(name, lambda x, unary=unary: [x.alu(op) for op in unary], [a], [d])
        mask = np.arange(320) % 3 == 0
        same(name, lambda c, x, y: [c.alu(Ops.WHERE, x, y)], [mask, a, b], [dtypes.bool, d, d])


def constants(name: str) -> None:
    """Operations with what is known, as renderers print them in other ways."""
    for d in (d for d in dtypes.all if d.is_float):
        for number in (np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.5):
            c = UOp.const(d, number)
            same(name, lambda x, c=c: [v for op in FLOAT_OPS for v in (x.alu(op, c), c.alu(op, x))], [data(d, 64)], [d])
    for d in (d for d in dtypes.all if d.is_int):
        for by in (1, 3, 7, d.itemsize * 8, int(d.max), 0, *(() if d.is_unsigned else (-1, -3))):
            c = UOp.const(d, by)
            ops = (Ops.IDIV, Ops.MOD, Ops.SHL, Ops.SHR) if by >= 0 else (Ops.IDIV, Ops.MOD)
            if by in (3, 0) or d in (dtypes.int32, dtypes.uint8):
                same(name, lambda x, ops=ops, c=c: [x.alu(op, c) for op in ops], [data(d, 64)], [d])


def conversions(name: str) -> None:
    for a in dtypes.all:
        same(name, lambda x: [x.cast(b) for b in dtypes.all], [data(a, 64)], [a])
        if not a.is_bool:
            fit = [b for b in dtypes.all if b.itemsize == a.itemsize and not b.is_bool]
            same(name, lambda x, fit=fit: [x.bitcast(b) for b in fit], [data(a, 64)], [a])
    halves = np.arange(1 << 16, dtype=np.uint16)
    for h in (dtypes.float16, dtypes.bfloat16):  # all of them, there and back
        same(name, lambda x: [x.cast(dtypes.float32), x.cast(dtypes.float32).cast(x.dtype)], [halves.view(h.np)], [h])
    near = (1 + np.arange(256) / 256.0 + 2.0**-40 * (np.arange(256) % 3 - 1)) * 2.0 ** (np.arange(256) % 31 - 16)
    same(name, lambda x: [x.cast(dtypes.float16)], [near], [dtypes.float64])  # rounds once


def fused(name: str) -> None:
    """A sum of products is rounded where the program says so, and nowhere else."""
    rng = np.random.default_rng(3)
    for d in (f32, dtypes.float64):
        a, b, c = (rng.standard_normal(100).astype(d.np) for _ in range(3))
        c[:50] = -(a * b)[:50]
        apart = lambda x, y, z: [x.alu(Ops.MUL, y).alu(Ops.ADD, z)]  # noqa: E731
        same(name, apart, [a, b, c], [d, d, d])
    exact = (a64 := a.astype(np.float32)).astype(np.float64) * (b64 := b.astype(np.float32))
    i, c = loop(100, 0), (-exact).astype(np.float32)
    ast = sink(store(0, i, load(1, i).alu(Ops.FMA, load(2, i), load(3, i)), i))
    got = run(ast, [np.zeros(100, np.float32), a64, b64, c], device=name)[0]
    np.testing.assert_array_equal(got, (exact + c).astype(np.float32))


def transcendentals(name: str) -> None:
    x = np.concatenate([np.linspace(-90, 90, 500), 10.0 ** np.linspace(-30, 30, 200), SPECIAL]).astype(np.float32)
    y = np.random.default_rng(4).permutation(x)
    i = loop(x.size, 0)
    unary = [load(4, i).alu(op) for op in (Ops.EXP, Ops.LOG, Ops.SIN)]
    ast = sink(*(store(k, i, u, i) for k, u in enumerate([*unary, load(4, i).alu(Ops.POW, load(5, i))])))
    given = [*(np.zeros_like(x) for _ in range(4)), x, y]
    with Context(CACHE=0):
        found = run(ast, given, device=name)
    for got, want in list(zip(found, run(ast, given)))[:4]:
        np.testing.assert_allclose(got, want, rtol=3e-7, atol=1e-44)


# *** tensors ***


def alike(name: str, program: Callable[[str], list[Tensor]], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """A program gives what it gives on PYTHON; with `rtol` 0, to the bit."""
    results = []
    for device in (name, "PYTHON"):
        Tensor.manual_seed(5)
        results.append([t.numpy() for t in program(device)])
    for got, want in zip(*results):
        assert got.dtype == want.dtype and got.shape == want.shape
        if rtol:
            np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)
        else:
            np.testing.assert_array_equal(got, want)


def inputs(device: str, *shapes: tuple[int, ...], dtype: DType = f32) -> list[Tensor]:
    rng = np.random.default_rng(2)
    return [Tensor(rng.standard_normal(s).astype(np.float32), device=device).cast(dtype).realize() for s in shapes]


def random_numbers(name: str) -> None:
    """The same bits as everywhere."""

    def program(device: str) -> list[Tensor]:
        uniform = [Tensor.rand(7, 13, device=device, dtype=d) for d in (f32, dtypes.float16, dtypes.float64)]
        with Tensor.train():
            dropped = Tensor.ones(100, device=device).dropout(0.3)
        return [*uniform, Tensor.randint(50, low=-5, high=100, device=device), dropped]

    alike(name, program, rtol=0)
    alike(name, lambda device: [Tensor.randn(64, device=device)])


def products(name: str) -> None:
    def program(device: str) -> list[Tensor]:
        a, b, c, v = inputs(device, (37, 50), (50, 70), (2, 3, 50, 20), (50,))
        ints = [(x * 3).cast(dtypes.int32) for x in (a, b)]
        small = [(x * 3).cast(dtypes.int8).cast(dtypes.int32) for x in (a, b)]
        halves = [x.cast(dtypes.float16) for x in (a, b)]
        return [a @ b, b.T @ a.T, a @ c, a @ v, v @ b, ints[0] @ ints[1], small[0] @ small[1],
                (halves[0] @ halves[1]).float(), (a @ b + 1).relu()]  # fmt: skip

    alike(name, program, rtol=2e-3)
    alike(name, lambda d: [x @ y for x, y in [inputs(d, (160, 200), (200, 144))]], atol=1e-4)


def convolutions(name: str) -> None:
    def program(device: str) -> list[Tensor]:
        x, w, b = (t.requires_grad_() for t in inputs(device, (2, 3, 12, 11), (5, 3, 3, 3), (5,)))
        y = F.conv2d(x, w, b, padding=1, stride=2)
        z = F.max_pool2d(F.conv2d(x, w, b).relu(), 2)
        (y.square().sum() + z.sum()).backward()
        assert x.grad is not None and w.grad is not None and b.grad is not None
        return [y, z, x.grad, w.grad, b.grad]

    alike(name, program, atol=1e-3)


def rows(name: str) -> None:
    """Rows that are normalised, and sums of them, of many widths."""

    def program(device: str) -> list[Tensor]:
        found = []
        for shape in ((3, 5), (4, 33), (2, 300), (70, 16)):
            x, *_ = inputs(device, shape)
            found += [x.softmax(), x.log_softmax(), F.layer_norm(x, shape[1:]), x.logsumexp(1), x.var(1), x.amax(1)]
            found += [x.sum(0), x.cumsum(1), x.argmax(1), x.sort(1)[0]]
        return found

    alike(name, program)


def attention(name: str) -> None:
    def program(device: str) -> list[Tensor]:
        q, k, v = (t.requires_grad_() for t in inputs(device, (2, 2, 20, 8), (2, 2, 20, 8), (2, 2, 20, 8)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y.square().sum().backward()
        assert q.grad is not None and k.grad is not None and v.grad is not None
        return [y, q.grad, k.grad, v.grad]

    alike(name, program)
    long = [(1, 1, 130, 16)] * 3
    alike(name, lambda device: [F.scaled_dot_product_attention(*inputs(device, *long))])


def updates(name: str) -> None:
    """What is written where it lies: parts, sums of what meets, an optimiser's weights and states."""

    def program(device: str) -> list[Tensor]:
        x, w, y = inputs(device, (6, 8), (8, 4), (6, 4))
        at = Tensor([1, 3, 3, 0], device=device)
        x[1:4, 2:5] = 7.0
        x[at] += 1.0
        total = Tensor.zeros(8, device=device).contiguous().realize()
        total.scatter_add_(0, Tensor([1, 1, 2, 7, 1], device=device), Tensor([1.0, 2.0, 3.0, 4.0, 5.0], device=device))
        w.requires_grad_()
        optimizer = AdamW([w], lr=0.05)
        with Tensor.train():
            for _ in range(3):
                optimizer.zero_grad()
                (x @ w - y).square().mean().backward()
                optimizer.step()
        return [x, total, w, x.T.contiguous()]

    alike(name, program)


def replays(name: str) -> None:
    """A captured step: other inputs each time, state that it changes, a variable, random numbers."""

    def program(device: str) -> list[Tensor]:
        state = Tensor.zeros(5, device=device).contiguous().realize()
        n = Variable("n", 1, 8)

        @TinyJit
        def step(a: Tensor, length: Variable) -> tuple[Tensor, Tensor]:
            state.assign(state + a.sum(0))
            return (a[:length].sum() + state.sum()).realize(), Tensor.rand(3, device=device).realize()

        found = []
        for k in range(5):
            a = Tensor(np.arange(40, dtype=np.float32).reshape(8, 5) + k, device=device).realize()
            found += [t + 0 for t in step(a, n.bind(1 + k))]
            found[-1].realize(), found[-2].realize()
        return [*found, state]

    alike(name, program)


def replays_of_results(name: str) -> None:
    """A captured step that is given what it gave before: it writes where it reads."""

    @TinyJit
    def step(a: Tensor) -> Tensor:
        half = (a * 0.5).contiguous()
        return (half + a.sum() + half.flip(0)).realize()

    x, want = Tensor(np.arange(6, dtype=np.float32), device=name).realize(), np.arange(6, dtype=np.float32)
    for _ in range(7):
        x, want = step(x), want * 0.5 + want.sum() + (want * 0.5)[::-1]
        np.testing.assert_allclose(x.numpy(), want, rtol=1e-5)

    n = 4096
    state = Tensor.zeros(n, device=name).contiguous().realize()

    @TinyJit
    def keep(a: Tensor) -> Tensor:
        state.assign(a.flip(0) + 1)
        return (a.sum() + 0).realize()

    numbers = np.arange(n, dtype=np.float32)
    for k in range(4):
        keep(Tensor(numbers + k, device=name).realize())
    keep(state)  # (now it is (numbers + 3) reversed, plus 1)
    np.testing.assert_array_equal(state.numpy(), numbers + 5)


def symbolic(name: str) -> None:
    """One kernel for every value of a variable."""

    def program(device: str) -> list[Tensor]:
        (t,) = inputs(device, (30, 6))
        n, i = Variable("n", 1, 30), Variable("i", 0, 29)
        found = []
        for k in (1, 4, 17, 30):
            part = t[: n.bind(k)]
            found += [part.sum(), part.sum(0), part.T @ part, (part.sum(1) * 2).sum(), t[i.bind(k - 1)] + 1]
        return found

    alike(name, program)


def indices(name: str) -> None:
    """An index out of range is an error at the next read, where the host does not see the device's memory, too."""
    table = Tensor(np.arange(12, dtype=np.float32).reshape(6, 2), device=name).realize()
    good, bad = (Tensor(np.array(x), device=name).realize() for x in ([0, 5, -1], [2, 6, 1]))
    assert table[good].numpy().tolist() == [[0, 1], [10, 11], [10, 11]]
    with pytest.raises(IndexError, match=r"index 6 is out of range: -6 to 5 are valid \(.*conformance.py"):
        table[bad].numpy()
    assert table[good].numpy().tolist() == [[0, 1], [10, 11], [10, 11]]  # (told once)

    @TinyJit
    def step(i: Tensor) -> Tensor:
        return table[i].realize()

    for k in range(4):
        assert step(Tensor(np.array([k]), device=name).realize()).numpy().tolist() == [[2 * k, 2 * k + 1]]
    step(Tensor(np.array([-7]), device=name).realize())
    with pytest.raises(IndexError, match="index -7 is out of range"):
        table.numpy()


CHECKS = (memory, kernels, graphs, moved_graphs, parts_of_memory, programs, operators, constants, conversions, fused,
          transcendentals, random_numbers, products, convolutions, rows, attention, updates, replays,
          replays_of_results, symbolic, indices)  # fmt: skip
