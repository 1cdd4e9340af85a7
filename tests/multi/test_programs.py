"""Random programs on sharded tensors give what they give unsharded: forward and gradient, uneven and empty shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad import Context, Tensor, Variable, dtypes, nn
from manygrad.tensor.engine import engine


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> Iterator[None]:
    with Context(DEVICE="PYTHON"):
        yield


def devices(n: int, kind: str = "PYTHON") -> tuple[str, ...]:
    return tuple(f"{kind}:{i}" for i in range(n))


UNARY: list[tuple[str, Callable[..., Tensor]]] = [
    ("square", lambda t: t * t),
    ("tanh", lambda t: (t * 0.3).tanh()),
    ("negative of a sum", lambda t: -(t.sum(0, keepdim=True)) + t),
    ("sum 0", lambda t: t.sum(0)),
    ("mean last", lambda t: t.mean(-1, keepdim=True)),
    ("max 0", lambda t: t.amax(0)),
    ("transpose", lambda t: t.transpose(0, -1)),
    ("flat", lambda t: t.reshape(-1)),
    ("split first", lambda t: t.reshape(2, t.shape[0] // 2, *t.shape[1:]) if t.ndim and t.shape[0] % 2 == 0 else t),
    ("join first", lambda t: t.reshape(t.shape[0] * t.shape[1], *t.shape[2:]) if t.ndim > 1 else t),
    ("expand", lambda t: t.unsqueeze(0).expand(3, *t.shape)),
    ("flip", lambda t: t.flip(0)),
    ("flip last", lambda t: t.flip(-1)),
    ("pad", lambda t: t.pad(((1, 0), *((0, 0),) * (t.ndim - 1)))),
    ("tail", lambda t: t[1:] if t.shape[0] > 1 else t),
    ("every other", lambda t: t[::2]),
    ("column", lambda t: t[..., 0] if t.ndim > 1 else t),
    ("twice", lambda t: t.cat(t * 2, dim=-1)),
    ("above itself", lambda t: t.cat(t, dim=0)),
    ("softmax", lambda t: t.softmax(-1)),
    ("softmax 0", lambda t: t.softmax(0)),
    ("rows", lambda t: t[Tensor([0, -1, 0]).to(t.device)]),
    ("relu", lambda t: t.relu()),
    ("cumulative", lambda t: t.cumsum(0)),
    ("gram", lambda t: t.reshape(t.shape[0], -1) @ t.reshape(t.shape[0], -1).T),
    ("stored", lambda t: t.contiguous()),
]


@st.composite
def programs(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    return shape, draw(st.lists(st.integers(0, len(UNARY) - 1), min_size=1, max_size=4))


def run(ops: list[int], x: Tensor, y: Tensor) -> Tensor:
    out = x * y + y
    for op in ops:
        if not out.ndim:
            out = out.reshape(1)
        out = UNARY[op][1](out)
    return out


@settings(max_examples=90)
@given(programs(), st.integers(2, 4), st.integers(-1, 2), st.integers(-1, 2))
def test_sharded_programs(case: tuple[tuple[int, ...], list[int]], n: int, axis_x: int, axis_y: int) -> None:
    shape, ops = case
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(0.2, 1.5, shape) for _ in range(2)]
    plain = [Tensor(a, requires_grad=True) for a in arrays]
    want = run(ops, *plain)
    weight = rng.standard_normal(want.shape)
    (want * Tensor(weight)).sum().backward()
    axes = [None if a < 0 or a >= len(shape) else a for a in (axis_x, axis_y)]
    cut = [Tensor(a).shard(devices(n), axis).contiguous().realize().requires_grad_() for a, axis in zip(arrays, axes)]
    got = run(ops, *cut)
    note = f"{[UNARY[o][0] for o in ops]} of {shape}, cut along {axes} over {n}"
    assert got.shape == want.shape, note
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-9, atol=1e-9, err_msg=note)
    (got * Tensor(weight).shard(devices(n))).sum().backward()
    for g, w in zip(cut, plain):
        assert g.grad is not None and w.grad is not None
        np.testing.assert_allclose(g.grad.numpy(), w.grad.numpy(), rtol=1e-9, atol=1e-9, err_msg=f"gradient of {note}")


@pytest.mark.parametrize("kind", ["bool", "int8", "int32", "int64", "uint8", "float16", "bfloat16", "float64"])
def test_every_type_crosses_devices(kind: str) -> None:
    n = 3
    d = getattr(dtypes, kind)
    a = np.random.default_rng(0).integers(0, 2, (5, 4)).astype(d.np)
    for axis in (0, 1):
        t = Tensor(a).shard(devices(n, "CPU"), axis)
        np.testing.assert_array_equal(t.numpy(), a)
        np.testing.assert_array_equal(t.sum(0).numpy().astype(np.float64), a.astype(np.float64).sum(0))
        np.testing.assert_array_equal(t.max().numpy(), a.max())
        np.testing.assert_array_equal(t.shard(devices(n, "CPU"), 1 - axis).numpy(), a)
    assert bool(t.any().item()) is True


def test_half_types_are_added_in_float32_over_devices() -> None:
    """4 x 1024 ones: adding 1 to 2048 in float16 gives 2048."""
    a = np.ones((4, 1024), np.float16)
    assert Tensor(a).shard(devices(4, "CPU"), 0).sum().item() == 4096


def test_what_is_cut_over_devices_stays_cut_when_it_is_brought_to_them() -> None:
    """`x.to(world.devices)` of a batch must not make a whole copy of it on each; `shard(devices)` says that."""
    t = Tensor(np.arange(10.0)).shard(devices(3), 0)
    assert t.to(devices(3)) is t and current_axis(t) == 0
    assert t.to(t) is t and current_axis(t.to(devices(3), "float32")) == 0
    assert current_axis(t.shard(devices(3))) is None
    layer = nn.Linear(4, 6)
    nn.shard_rules(layer, {"weight": 0}, devices(3))
    layer.to(devices(3))
    assert current_axis(layer.weight) == 0


def current_axis(t: Tensor) -> int | None:  # (None: whole copies)
    return engine().sharding_axis(t.uop)


def test_replicate_to_and_back() -> None:
    a = np.arange(10.0)
    t = Tensor(a, device="PYTHON:0")
    everywhere = t.to(devices(3))
    assert everywhere.device == devices(3) and everywhere.shape == (10,)
    np.testing.assert_array_equal(everywhere.numpy(), a)
    back = (everywhere * 2).to("PYTHON:1")
    assert back.device == "PYTHON:1"
    np.testing.assert_array_equal(back.numpy(), a * 2)
    u = Tensor(a).shard_(devices(2), 0)
    np.testing.assert_array_equal((u + 1).to("PYTHON:1").numpy(), a + 1)
    assert Tensor(a).to_("PYTHON:1").device == "PYTHON:1"


def test_constants_join_any_devices() -> None:
    t = Tensor(np.arange(6.0)).shard(devices(3), 0)
    for got, want in [
        (t + 1, np.arange(6) + 1),
        (t * Tensor.arange(6), np.arange(6) ** 2),
        (Tensor.ones(6).where(t, 0), np.arange(6)),
        (t + Tensor(2.0), np.arange(6) + 2),
    ]:
        assert got.device == devices(3)
        np.testing.assert_array_equal(got.numpy(), want)


def test_zero_sized_and_zero_d() -> None:
    t = Tensor(np.zeros((0, 3))).shard(devices(2), 0)
    assert t.numpy().shape == (0, 3) and t.sum().item() == 0.0
    s = Tensor(np.float64(4)).shard(devices(2))
    assert (s * s).item() == 16.0


def test_devices_in_another_order() -> None:
    a = np.arange(7.0)
    for names in (("PYTHON:2", "PYTHON:0"), ("PYTHON:1", "PYTHON:2", "PYTHON:0")):
        t = Tensor(a).shard(names, 0)
        np.testing.assert_array_equal((t * 2).numpy(), a * 2)
        assert t.sum().item() == a.sum()


def test_assignment_to_shards_and_lazy_readers() -> None:
    a = np.arange(10.0).reshape(5, 2)
    t = Tensor(a).shard(devices(3), 0).contiguous().realize()
    old = t * 10
    t.assign(t.flip(0))
    t.assign(t + t.sum(0, keepdim=True))
    np.testing.assert_array_equal(old.numpy(), a * 10)
    np.testing.assert_array_equal(t.numpy(), a[::-1] + a.sum(0))


def test_errors_name_shapes_and_devices() -> None:
    x, y = Tensor(np.zeros((4, 2))).shard(devices(2), 0), Tensor(np.zeros((4, 2))).shard(devices(3), 0)
    with pytest.raises(
        ValueError,
        match=(
            r"operands are on different devices: \(4, 2\) on \('PYTHON:0', 'PYTHON:1'\) and \(4, 2\) on "
            r"\('PYTHON:0', 'PYTHON:1', 'PYTHON:2'\)"
        ),
    ):
        x + y
    with pytest.raises(ValueError, match=r"assign: the value is on"):
        x.contiguous().realize().assign(y)
    with pytest.raises(ValueError, match="already on"):
        x.shard(devices(3), 0)
    np.testing.assert_array_equal(x.numpy(), np.zeros((4, 2)))


def scale_gradient(t: Tensor) -> Tensor:
    """Of the scale of a norm over the last dim, whose statistics other kernels need, too."""
    w = Tensor.ones(t.shape[-1]).shard(t.device).contiguous().realize().requires_grad_()
    x = t.contiguous().requires_grad_()
    (x.layer_norm(t.shape[-1], w) * t).sum().backward()
    assert w.grad is not None and x.grad is not None
    return w.grad * x.grad.sum()


def test_reductions_give_the_same_bits_on_1_2_4_8_devices() -> None:
    """float32 sums in one order whatever the number of devices (sizes that 8 divides)."""
    rng = np.random.default_rng(1)
    a = (rng.standard_normal((16, 24, 3)) * 10 ** rng.uniform(-3, 3, (16, 24, 3))).astype(np.float32)
    w = rng.standard_normal((24, 5)).astype(np.float32)
    fs: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda t: t.sum(), "sum 0": lambda t: t.sum(0), "sum 0 1": lambda t: t.sum((0, 1)),
        "mean 0 2": lambda t: t.mean((0, 2)),
        "squares": lambda t: t.square().sum(0), "var": lambda t: t.var(0), "softmax": lambda t: t.softmax(0).sum(0),
        "max": lambda t: t.max(),
        "loss": lambda t: (t[:, :, 0] @ Tensor(w).shard(t.device)).square().sum(),
        "weight gradient": lambda t: t[:, :, 0].T @ t[:, :, 1],
        "logsumexp": lambda t: t.logsumexp(0), "layer norm": lambda t: t.layer_norm(3).sum((0, 1)),
        "scale gradient": scale_gradient,
    }  # fmt: skip
    for name, f in fs.items():
        bits = {n: f(Tensor(a, device="CPU").shard(devices(n, "CPU"), 0)).numpy().tobytes() for n in (1, 2, 4, 8)}
        assert len(set(bits.values())) == 1, name


# *** ops of several operands that are cut along several dims ***

RNG = np.random.default_rng(0)
IMAGES, FILTERS, GROUPED = (RNG.standard_normal(s) for s in ((4, 4, 7, 6), (6, 4, 3, 3), (6, 2, 3, 3)))
TABLE, ROWS = RNG.standard_normal((5, 3)), RNG.standard_normal((6, 3))
INDEX, CLASSES = RNG.integers(0, 5, (6, 3)), RNG.integers(0, 3, 6)
Axes = list[tuple[int | None, ...]]
OPERATORS: dict[str, tuple[Callable[..., Tensor], tuple[np.ndarray, ...], Axes]] = {
    "convolution": (lambda x, w: x.conv2d(w, padding=1, stride=2), (IMAGES, FILTERS),
                    [(0, None), (1, None), (2, None), (0, 0), (None, 0), (3, 1)]),
    "grouped convolution": (lambda x, w: x.conv2d(w, groups=2), (IMAGES, GROUPED),
                            [(0, None), (1, None), (None, 0), (1, 0)]),
    "max pooling": (lambda x: x.max_pool2d(2), (IMAGES,), [(0,), (1,), (2,), (3,)]),
    "average pooling": (lambda x: x.avg_pool2d(3, 1, 1), (IMAGES,), [(0,), (1,), (2,), (3,)]),
    "attention": (lambda x: x.scaled_dot_product_attention(x, x, is_causal=True), (IMAGES,), [(0,), (1,), (2,), (3,)]),
    "scatter_add": (lambda b, i, s: b.scatter_add(0, i, s), (TABLE, INDEX, ROWS),
                    [(None, None, None), (0, None, None), (None, 0, 0), (0, 0, 0), (1, 1, 1), (None, 1, 0)]),
    "gather": (lambda b, i: b.gather(0, i), (TABLE, INDEX), [(None, 0), (0, None), (0, 0), (1, 1), (0, 1), (None, 1)]),
    "embedding": (lambda b, i: b[i], (TABLE, INDEX), [(None, 0), (0, None), (0, 0), (1, None), (1, 0), (1, 1)]),
    "cross entropy": (lambda x, y: x.cross_entropy(y), (ROWS, CLASSES), [(0, 0), (None, 0), (0, None), (1, None)]),
    "einsum": (lambda x, y: x.einsum("ij,kj->ik", y), (ROWS, TABLE), [(0, None), (1, 1), (None, 0), (0, 1)]),
    "stack": (lambda x, y: x.stack(y, dim=1), (IMAGES, IMAGES), [(0, 0), (0, 1), (1, None)]),
    "product": (lambda x: x.prod(0), (ROWS,), [(0,), (1,)]),
    "triangle": (lambda x: x.tril(), (IMAGES,), [(0,), (2,), (3,)]),
    "roll": (lambda x: x.roll(2, 0), (ROWS,), [(0,), (1,)]),
    "largest of sums": (lambda x: x.sum(0).max(), (ROWS,), [(0,), (1,)]),
    "sum of largest": (lambda x, i: x.amax(0, keepdim=True).scatter_add(0, i[:1] * 0, x[:1]), (ROWS, INDEX),
                       [(0, None), (1, None)]),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("n", [3, 7])
def test_operators(name: str, n: int) -> None:
    """n = 7: more devices than rows."""
    f, arrays, all_axes = OPERATORS[name]
    floats = [a.dtype.kind == "f" for a in arrays]
    plain = [Tensor(a, requires_grad=f or None) for a, f in zip(arrays, floats)]
    want = f(*plain)
    (want * want).sum().backward()
    for axes in all_axes:
        cut = [Tensor(a).shard(devices(n), axis).contiguous().realize() for a, axis in zip(arrays, axes)]
        for t, is_float in zip(cut, floats):
            t.requires_grad = is_float or None
        got = f(*cut)
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-9, atol=1e-9, err_msg=f"{axes}")
        (got * got).sum().backward()
        for a, b, is_float in zip(cut, plain, floats):
            if is_float:
                assert a.grad is not None and b.grad is not None
                np.testing.assert_allclose(
                    a.grad.numpy(), b.grad.numpy(), rtol=1e-9, atol=1e-9, err_msg=f"gradient, {axes}"
                )


@pytest.mark.parametrize("axis", [0, 1])
def test_symbolic_sizes_beside_the_cut_dim(axis: int) -> None:
    t = Tensor(ROWS).shard(devices(2), axis).contiguous().realize()
    for k in (1, 4, 6):
        np.testing.assert_allclose(t[: Variable("n", 1, 6).bind(k)].sum(0).numpy(), ROWS[:k].sum(0), rtol=1e-12)


def test_writing_through_indices_and_views() -> None:
    for axis in (0, 1):
        a = np.arange(24.0).reshape(6, 4)
        t = Tensor(a).shard(devices(3), axis).contiguous().realize()
        t[Tensor([1, 4]).to(devices(3))] = -1.0
        t[::2] = t[::2] * 10
        t[:, 1:3] = 0.5
        a[[1, 4]], a[::2], a[:, 1:3] = -1, a[::2] * 10, 0.5
        a[[1, 4]] = [[-1, 0.5, 0.5, -1], [-10, 0.5, 0.5, -10]]
        np.testing.assert_array_equal(t.numpy(), a)
