"""What every backend that computes has to do, compared with the PYTHON device."""

from __future__ import annotations

import numpy as np

from manygrad import Tensor, TinyJit
from manygrad.runtime.devices import get_device
from manygrad.tensor.dtype import dtypes
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
    n = UOp(Ops.DEFINE_VAR, dtypes.index, (), ("n", 1, 100))
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
    steps = device.graph([(double, [b, a], ()), (double, [a, b], ())])
    steps()
    stamps = steps(timed=True)
    device.synchronize()
    out = np.empty(100, np.float32)
    device.copyout(memoryview(out).cast("B"), a)
    assert (out == 16).all() and stamps is not None and len(stamps) == 3 and stamps == sorted(stamps)


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


CHECKS = (memory, kernels, graphs, programs)
