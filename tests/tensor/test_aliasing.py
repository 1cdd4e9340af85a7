"""Which results share memory with the input, by PyTorch's rules: a write to one shows in the other, or does not.

The sweep runs every case of tests/tensor/cases; the tables below are calls whose result equals the input, where a
shortcut would return it. The rules are those of PyTorch's page "Tensor Views" and of the pages of the operators that it
does not name (`positive` returns its input, `einsum` may return a view, dropout returns its input where it drops
nothing).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad import Context, Tensor, linalg, no_grad
from manygrad.nn import functional as F
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.storage import storage
from manygrad.tensor.uop.shape import unviewed
from tests.tensor.cases.case import Case, Sample
from tests.tensor.test_ops import EVERY, MANYGRAD, as_type, flat

ALWAYS = set(  # views; of 0-d tensors and where nothing changes, the tensor itself
    """T H mT mH t adjoint as_strided broadcast_to chunk diagonal dsplit expand expand_as hsplit moveaxis movedim narrow
    permute real select split split_with_sizes squeeze swapaxes swapdims tensor_split transpose unbind unflatten unfold
    unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze view view_as vsplit atleast_1d atleast_2d atleast_3d
    broadcast_tensors meshgrid positive detach
    reshape reshape_as flatten ravel""".split()  # (the last four: of the tensors here, which lie in memory in order)
)
SOMETIMES = set(
    """contiguous einsum cartesian_prod sum_to_size to type type_as cast float double half bfloat16 int long short
    char byte bool cpu dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout""".split()
)


def mutate(t: Tensor) -> None:
    with no_grad():
        try:
            t.assign(t.logical_not() if t.dtype.is_bool else t + 1)
        except ValueError as e:
            assert "expanded view" in str(e)


def made(a: np.ndarray, how: str) -> Tensor:
    """In memory, not computed yet, or in memory with a write that waits."""
    if how != "written":
        return Tensor(a.copy()).realize() if how == "stored" else Tensor(a.copy()).clone()
    t = Tensor(a.copy()).realize()
    t.assign(t.clone())
    return t


def aliases(f: Callable[..., Any], arrays: list[np.ndarray], how: str) -> set[str]:
    """Which writes show: "in" of the inputs in a result, "out" of the results in an input."""

    def run() -> tuple[list[Tensor], list[Tensor]]:
        Tensor.manual_seed(1)
        inputs = [made(a, how) for a in arrays]
        return inputs, [o for o in flat(f(*inputs)) if isinstance(o, Tensor) and o.numel()]

    want = [o.numpy().copy() for o in run()[1]]
    inputs, results = run()
    for t in inputs:
        mutate(t)
    shown = (
        {"in"}
        if any(not np.array_equal(o.numpy(), w, equal_nan=w.dtype.kind == "f") for o, w in zip(results, want))
        else set()
    )
    inputs, results = run()
    for o in results:
        mutate(o)
    return shown | (
        {"out"}
        if any(not np.array_equal(t.numpy(), a, equal_nan=a.dtype.kind == "f") for t, a in zip(inputs, arrays))
        else set()
    )


HOW = st.sampled_from(["stored", "lazy", "written"])


@EVERY
@settings(max_examples=3)
@given(data=st.data(), how=HOW)
def test_results_are_views_or_copies(case: Case, data: st.DataObject, how: str) -> None:
    sample: Sample = case.samples(data.draw)
    arrays = [as_type(np.array(a), case.dtypes[0]) for a in sample.arrays]
    name = case.op.rpartition(".")[2]
    with Context(DEVICE="PYTHON"):
        found = aliases(lambda *inputs: case.run(MANYGRAD, inputs, sample), arrays, how)
    if name not in ALWAYS | SOMETIMES:
        assert not found, f"{case.name}: PyTorch's result is a copy"
    elif name in ALWAYS and found:
        assert "in" in found, f"{case.name}: PyTorch's result is a view"


def none() -> Tensor:
    """No positions, on the device of the test."""
    return Tensor(np.zeros(0, np.int64))


def nowhere() -> Tensor:
    return Tensor(np.zeros((0, 3, 1), np.int64))


def written(x: Tensor) -> Tensor:
    y = (x * 0).contiguous().realize()
    y[:] = x
    return y


OF_FLOATS: dict[str, Callable[[Tensor], Any]] = {  # of x, (2, 3, 1)
    "flip()": lambda x: x.flip(()),
    "flip 2": lambda x: x.flip(2),
    "fliplr": lambda x: x[:, :1].fliplr(),
    "roll 0": lambda x: x.roll(0, 0),
    "roll n": lambda x: x.roll(2, 0),
    "repeat": lambda x: x.repeat(1, 1, 1),
    "tile": lambda x: x.tile((1,)),
    "tile ()": lambda x: x.tile(()),
    "repeat_interleave": lambda x: x.repeat_interleave(1, 0),
    "pad": lambda x: F.pad(x, (0, 0)),
    "pad reflect": lambda x: F.pad(x, (0, 0), mode="reflect"),
    "pad circular": lambda x: F.pad(x, (0, 0), mode="circular"),
    "pad repl": lambda x: F.pad(x, (0, 0), mode="replicate"),
    "rot90 0": lambda x: x.rot90(0),
    "rot90 4": lambda x: x.rot90(4),
    "clamp": lambda x: x.clamp(-100, 100),
    "clip": lambda x: x.clip(min=-1e9),
    "cumsum": lambda x: x.cumsum(2),
    "cumprod": lambda x: x.cumprod(2),
    "cummax": lambda x: x.cummax(2),
    "cummin": lambda x: x.cummin(2),
    "logcumsumexp": lambda x: x.logcumsumexp(2),
    "sum 2": lambda x: x.sum(2),
    "sum 2 keep": lambda x: x.sum(2, keepdim=True),
    "mean": lambda x: x.mean(2),
    "prod": lambda x: x.prod(2),
    "amax": lambda x: x.amax(2),
    "amin": lambda x: x.amin(2),
    "max": lambda x: x.max(2),
    "min": lambda x: x.min(2),
    "median": lambda x: x.median(2),
    "mode": lambda x: x.mode(2),
    "kthvalue": lambda x: x.kthvalue(1, 2),
    "nansum": lambda x: x.nansum(2),
    "nanmean": lambda x: x.nanmean(2),
    "nanmedian": lambda x: x.nanmedian(2),
    "quantile": lambda x: x.quantile(0.5, 2),
    "nanquantile": lambda x: x.nanquantile(0.5, 2),
    "logsumexp": lambda x: x.logsumexp(2),
    "norm": lambda x: x.norm(1, 2),
    "aminmax": lambda x: x.aminmax(dim=2),
    "sort": lambda x: x.sort(2),
    "msort": lambda x: x[:1].msort(),
    "topk": lambda x: x.topk(1, 2),
    "sum_()": lambda x: x[0, 0, 0].sum(),
    "max 0d": lambda x: x[0, 0, 0].max(),
    "amax 0d": lambda x: x[0, 0, 0].amax(),
    "mean 0d": lambda x: x[0, 0, 0].mean(),
    "prod 0d": lambda x: x[0, 0, 0].prod(),
    "sort 0d": lambda x: x[0, 0, 0].sort(),
    "median 0d": lambda x: x[0, 0, 0].median(),
    "kth 0d": lambda x: x[0, 0, 0].kthvalue(1),
    "topk 0d": lambda x: x[0, 0, 0].topk(1),
    "cumsum 0d": lambda x: x[0, 0, 0].cumsum(0),
    "cummax 0d": lambda x: x[0, 0, 0].cummax(0),
    "mode 0d": lambda x: x[0, 0, 0].mode(),
    "sum dim 0d": lambda x: x[0, 0, 0].sum(0),
    "max dim 0d": lambda x: x[0, 0, 0].max(0),
    "aminmax0": lambda x: x[0, 0, 0].aminmax(),
    "nanmedian0": lambda x: x[0, 0, 0].nanmedian(),
    "quantile0": lambda x: x[0, 0, 0].quantile(0.5),
    "msort 0d": lambda x: x[0, 0, 0].msort(),
    "cat": lambda x: Tensor.cat(x),
    "cat empty": lambda x: Tensor.cat(x, x[:0]),
    "stack": lambda x: Tensor.stack(x),
    "hstack": lambda x: Tensor.hstack([x]),
    "vstack": lambda x: Tensor.vstack([x]),
    "dstack": lambda x: Tensor.dstack([x]),
    "column_stack": lambda x: Tensor.column_stack([x]),
    "block_diag": lambda x: Tensor.block_diag(x[0]),
    "masked_fill": lambda x: x.masked_fill(x.isnan(), 0.0),
    "where": lambda x: x.where(x.eq(x), x * 0),
    "masked_fill const": lambda x: x.masked_fill(Tensor(False), 0.0),
    "where const": lambda x: Tensor.where(Tensor(True), x, x * 0),
    "index_select": lambda x: x.index_select(0, Tensor([0, 1])),
    "gather": lambda x: x.gather(2, x.long() * 0),
    "take": lambda x: x.take(Tensor.arange(6)),
    "x[idx]": lambda x: x[Tensor([0, 1])],
    "x[arange]": lambda x: x[Tensor.arange(2)],
    "x[[0,1]]": lambda x: x[[0, 1]],
    "x[mask]": lambda x: x[x.eq(x)],
    "x[True]": lambda x: x[True],
    "x[mask 2]": lambda x: x[Tensor([True, True])],
    "take_along": lambda x: x.take_along_dim(x.long() * 0, 2),
    "masked_select": lambda x: x.masked_select(x.eq(x)),
    "masked_select 0d": lambda x: x[0, 0, 0].masked_select(Tensor(True)),
    "triu": lambda x: x.triu(-10),
    "tril": lambda x: x.tril(10),
    "diag1": lambda x: x[0, :, 0].diag(),
    "diag2": lambda x: x[0].diag(),
    "diag_embed": lambda x: x.diag_embed(),
    "diagflat": lambda x: x[0, 0, 0].diagflat(),
    "diag 1x1": lambda x: x[:1, :1, 0].diag(),
    "diag_embed 1": lambda x: x[0, :1, 0].diag_embed(),
    "trace": lambda x: x[0, :1].trace(),
    "+0": lambda x: x + 0,
    "-0": lambda x: x - 0,
    "*1": lambda x: x * 1,
    "/1": lambda x: x / 1,
    "**1": lambda x: x**1,
    "pow": lambda x: x.pow(1),
    "0+": lambda x: 0 + x,
    "1*": lambda x: 1 * x,
    "add": lambda x: x.add(0),
    "sub": lambda x: x.sub(0),
    "mul": lambda x: x.mul(1.0),
    "div": lambda x: x.div(1),
    "add alpha": lambda x: x.add(x, alpha=0),
    "addcmul": lambda x: x.addcmul(x, x, value=0),
    "lerp": lambda x: x.lerp(x, 0.0),
    "lerp1": lambda x: (x * 2).lerp(x, 1.0),
    "maximum": lambda x: x.maximum(x),
    "minimum": lambda x: x.minimum(x),
    "fmax": lambda x: x.fmax(x),
    "abs": lambda x: x.abs(),
    "ldexp": lambda x: x.ldexp(Tensor(0)),
    "float_power": lambda x: x.double().float_power(1),
    "nan_to_num": lambda x: x.nan_to_num(),
    "copysign": lambda x: x.copysign(x),
    "rsub": lambda x: x.rsub(0).rsub(0),
    "logaddexp": lambda x: x.logaddexp(x),
    "true_divide": lambda x: x.true_divide(1),
    "hypot": lambda x: x.hypot(x * 0),
    "+= tensors": lambda x: x + Tensor(0.0),
    "mul t": lambda x: x * Tensor(1.0),
    "mul ones": lambda x: x * x.ones_like(),
    "add zeros": lambda x: x + x.zeros_like(),
    "mul c": lambda x: Tensor(1.0) * x,
    "xlogy": lambda x: x.xlogy(Tensor(np.e)),
    "clone": lambda x: x.clone(),
    "diff": lambda x: x.diff(n=0),
    "matrix_power": lambda x: x[:1, :1].squeeze(2).matrix_power(1),
    "mp1": lambda x: linalg.matrix_power(x[:1, :1, 0], 1),
    "interp": lambda x: F.interpolate(x, size=1),
    "interp lin": lambda x: F.interpolate(x, size=1, mode="linear"),
    "interp area": lambda x: F.interpolate(x, size=1, mode="area"),
    "interp1": lambda x: F.interpolate(x, scale_factor=1.0),
    "avg_pool": lambda x: F.avg_pool1d(x, 1),
    "max_pool": lambda x: F.max_pool1d(x, 1),
    "adaptive": lambda x: F.adaptive_avg_pool1d(x, 1),
    "adaptmax": lambda x: F.adaptive_max_pool1d(x, 1),
    "unfold": lambda x: F.unfold(x.reshape(2, 3, 1, 1), 1),
    "fold": lambda x: F.fold(x.reshape(2, 3, 1), (1, 1), 1),
    "ps": lambda x: F.pixel_shuffle(x.reshape(2, 3, 1, 1), 1),
    "pu": lambda x: F.pixel_unshuffle(x.reshape(2, 3, 1, 1), 1),
    "cs": lambda x: F.channel_shuffle(x.reshape(2, 3, 1, 1), 1),
    "cs3": lambda x: F.channel_shuffle(x.reshape(2, 3, 1, 1), 3),
    "lp_pool": lambda x: F.lp_pool1d(x, 1, 1),
    "max_unpool": lambda x: F.max_unpool1d(x, x.long() * 0, 1),
    "grid": lambda x: F.grid_sample(x.reshape(2, 3, 1, 1), Tensor.zeros(2, 1, 1, 2)),
    "hardtanh": lambda x: F.hardtanh(x, -100, 100),
    "threshold": lambda x: F.threshold(x, -100, 0),
    "leaky": lambda x: F.leaky_relu(x, 1.0),
    "prelu": lambda x: F.prelu(x, Tensor([1.0])),
    "elu": lambda x: F.elu(x),
    "rrelu": lambda x: F.rrelu(x),
    "celu": lambda x: F.celu(x),
    "normalize": lambda x: F.normalize(x),
    "softshrink": lambda x: F.softshrink(x, 0.0),
    "hardshrink": lambda x: F.hardshrink(x, 0.0),
    "renorm": lambda x: x.renorm(2, 0, 1e9),
    "scatter e": lambda x: x.scatter(0, nowhere(), x),
    "scatter_add e": lambda x: x.scatter_add(0, nowhere(), x),
    "scatter_reduce e": lambda x: x.scatter_reduce(0, nowhere(), x, "sum"),
    "index_add e": lambda x: x.index_add(0, none(), x[:0]),
    "index_copy e": lambda x: x.index_copy(0, none(), x[:0]),
    "index_fill e": lambda x: x.index_fill(0, none(), 1.0),
    "index_reduce e": lambda x: x.index_reduce(0, none(), x[:0], "prod"),
    "put e": lambda x: x.put(none(), x.flatten()[:0]),
    "index_put e": lambda x: x.index_put((none(),), Tensor(1.0)),
    "index_put mask": lambda x: x.index_put((x.isnan(),), Tensor(1.0)),
    "masked_scatter": lambda x: x.masked_scatter(x.isnan(), x),
    "masked_scatter all": lambda x: (x * 0).masked_scatter(x.eq(x), x),
    "as_strided_scatter": lambda x: x.as_strided_scatter(x.flatten()[:0], (0,), (1,)),
    "as_strided_scatter all": lambda x: x.as_strided_scatter(x.flatten() * 1, (6,), (1,)),
    "select_scatter": lambda x: x[:1].select_scatter(x[0], 0, 0),
    "slice_scatter": lambda x: (x * 2).slice_scatter(x, 0),
    "slice_scatter e": lambda x: x.slice_scatter(x[:0], 0, 0, 0),
    "diagonal_scatter": lambda x: (x[:1, :1, 0] * 2).diagonal_scatter(x[0, 0]),
    "diagonal_scatter e": lambda x: x[:, :, 0].diagonal_scatter(x[0, 0][:0], 5),
    "select_scatter src": lambda x: (x[:1] * 2).select_scatter(x[0], 0, 0),
    "matmul 1": lambda x: x.matmul(Tensor([[1.0]])),
    "outer": lambda x: x[0, :, 0].outer(Tensor([1.0])),
    "dot1": lambda x: x[0, 0].dot(Tensor([1.0])),
    "kron": lambda x: x.kron(Tensor([1.0])),
    "inner": lambda x: x.inner(Tensor([1.0])),
    "tensordot": lambda x: x.tensordot(Tensor(1.0), 0),
    "bmm": lambda x: x.bmm(Tensor.ones(2, 1, 1)),
    "addmm beta": lambda x: x[0].addmm(x[0], Tensor([[0.0]])),
    "addmm0": lambda x: x[0].addmm(x[0], Tensor([[1.0]]), beta=0),
    "linear": lambda x: F.linear(x, Tensor([[1.0]])),
    "combinations": lambda x: x[0, :, 0].combinations(1),
    "cov": lambda x: x[0, :, 0].cov(),
    "softmax1": lambda x: x.softmax(2),
    "cross": lambda x: x.expand(2, 3, 3).cross(x.expand(2, 3, 3)),
    "dist": lambda x: x.dist(x),
    "unique": lambda x: x[0, 0].unique(),
    "uniquec": lambda x: x[0, 0].unique_consecutive(),
    "narrow_copy": lambda x: x.narrow_copy(0, 0, 2),
    "std": lambda x: x.std(0),
    "layer_norm": lambda x: F.layer_norm(x, (1,)),
    "to copy": lambda x: x.to(x.device, copy=True),
    "new_tensor": lambda x: x.new_tensor(x),
    "like": lambda x: x.zeros_like(),
    "full": lambda x: Tensor.full((3,), x[0, 0, 0]),
    "full_like": lambda x: x.full_like(x[0, 0, 0]),
    "fill": lambda x: (x * 1).fill_(x[0, 0, 0]),
    "copy_": lambda x: (x * 0).copy_(x),
    "copy_ stored": lambda x: (x * 0).contiguous().realize().copy_(x),
    "assign": lambda x: (x * 0).assign(x),
    "setitem": lambda x: written(x),
    "one row": lambda x: x[:1].sum(0),
    "masked mean": lambda x: x.mean((2,)),
    "var": lambda x: x.var(0),
    "pinverse": lambda x: x[0].pinverse(),
    "triangular": lambda x: x[:1, :1, 0].triangular_solve(x[:1, :1, 0]),
    "lu": lambda x: linalg.lu_factor(x[:1, :1, 0]),
    "qr": lambda x: linalg.qr(x[:1, :1, 0]),
    "eye": lambda x: x[:1, :1, 0].inverse(),
    "svd": lambda x: linalg.svd(x[:1, :1, 0]),
    "det": lambda x: linalg.det(x[:1, :1, 0]),
    "cholesky": lambda x: linalg.cholesky(x[1:, 1:2, 0]),
    "bag": lambda x: F.embedding(Tensor([0, 1]), x[:, :, 0]),
    "mse": lambda x: F.mse_loss(x, x * 0, reduction="none").sqrt(),
    "l1": lambda x: F.l1_loss(x, x * 0, reduction="none"),
    "mse0": lambda x: F.l1_loss(x[0, 0, 0], Tensor(0.0)),
    "pairwise": lambda x: F.pairwise_distance(x, x * 0),
}
OF_INTS: dict[str, Callable[[Tensor], Any]] = {
    "ceil": lambda x: x.ceil(),
    "floor": lambda x: x.floor(),
    "trunc": lambda x: x.trunc(),
    "fix": lambda x: x.fix(),
    "round": lambda x: x.round(),
    "nan_to_num": lambda x: x.nan_to_num(),
    "|0": lambda x: x | 0,
    "^0": lambda x: x ^ 0,
    "<<0": lambda x: x << 0,
    ">>0": lambda x: x >> 0,
    "&-1": lambda x: x & -1,
    "~~": lambda x: ~~x,
    "//1": lambda x: x // 1,
    "%": lambda x: x % 1000,
    "abs": lambda x: x.abs(),
    "+0": lambda x: x + 0,
    "*1": lambda x: x * 1,
    "**1": lambda x: x**1,
    "sum": lambda x: x.sum(2),
    "cumsum": lambda x: x.cumsum(2),
    "clamp": lambda x: x.clamp(-100, 100),
    "sign": lambda x: x.sign(),
    "gcd": lambda x: x.gcd(x * 0),
    "fmod": lambda x: x.fmod(1000),
    "maximum": lambda x: x.maximum(x),
    "where": lambda x: x.where(x.eq(x), x),
    "round d": lambda x: x.round(decimals=0),
    "sort": lambda x: x.sort(2),
    "floor_divide": lambda x: x.floor_divide(1),
    "bincount": lambda x: x.flatten().bincount(),
    "div floor": lambda x: x.div(1, rounding_mode="floor"),
    "bitwise_or self": lambda x: x.bitwise_or(x),
    "and self": lambda x: x & x,
    "unique": lambda x: x[0, 0].unique(),
    "amax": lambda x: x.amax(2),
    "prod": lambda x: x.prod(2),
}
OF_BOOLS: dict[str, Callable[[Tensor], Any]] = {
    "any": lambda x: x.any(2),
    "all": lambda x: x.all(2),
    "or": lambda x: x | False,
    "and": lambda x: x & True,
    "xor": lambda x: x ^ False,
    "lor": lambda x: x.logical_or(x),
    "land": lambda x: x.logical_and(Tensor(True)),
    "not": lambda x: x.logical_not().logical_not(),
    "max": lambda x: x.maximum(x),
    "ne": lambda x: x.ne(False),
    "eq": lambda x: x.eq(True),
    "amax": lambda x: x.amax(2),
    "any all": lambda x: x[0, 0, 0].any(),
    "all 0d": lambda x: x[0, 0, 0].all(),
    "where": lambda x: x.where(x, x),
    "nonzero": lambda x: x.nonzero(),
    "masked": lambda x: x.masked_fill(~x, False),
    "eq T": lambda x: x == Tensor(True),
}

FLOAT, INT, BOOL = (
    np.arange(1.0, 7).reshape(2, 3, 1).astype(np.float32),
    np.arange(1, 7).reshape(2, 3, 1),
    np.array([[[True], [False], [True]]] * 2),
)
CALLS = [
    (f"{a.dtype}: {name}", f, a)
    for table, a in ((OF_FLOATS, FLOAT), (OF_INTS, INT), (OF_BOOLS, BOOL))
    for name, f in table.items()
]


@pytest.mark.parametrize(("f", "a"), [c[1:] for c in CALLS], ids=[c[0] for c in CALLS])
def test_what_changes_nothing_is_a_copy(f: Callable[[Tensor], Any], a: np.ndarray) -> None:
    with Context(DEVICE="PYTHON"):
        for how in ("stored", "lazy", "written"):
            assert not aliases(f, [a], how), how


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to(x.device),
    "float": lambda x: x.float(),
    "type_as": lambda x: x.type_as(x),
    "reshape": lambda x: x.reshape(6),
    "x[:]": lambda x: x[:],
    "x[...]": lambda x: x[...],
    "x[::2]": lambda x: x[:, ::2],
    "x[None]": lambda x: x[None],
    "x[0]": lambda x: x[0],
    "view(dtype)": lambda x: x.view("int32"),
    "real": lambda x: x.real,
    "meshgrid": lambda x: Tensor.meshgrid(x[0, :, 0]),
    "positive": lambda x: +x,
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    for how in ("stored", "lazy", "written"):
        assert "in" in aliases(VIEWS[name], [FLOAT], how), how


def test_a_slice_that_nothing_else_refers_to_is_stored_by_itself() -> None:
    """As `docs/pytorch.md` says: without the rest, so contiguous, and a reshape of it is a view. With the rest it is a
    copy."""
    for whole_is_held in (False, True):
        y = Tensor(np.arange(24, dtype=np.float32).reshape(4, 6)) * 1
        x = y[:, :2]
        if whole_is_held:
            y.realize()
        else:
            del y
        x.realize()
        buffer = storage(unviewed(x.uop))
        assert isinstance(buffer, Buffer) and buffer.nbytes == (96 if whole_is_held else 32)
        flat = x.reshape(-1)
        x.fill_(7)
        assert flat.tolist() == ([0, 1, 6, 7, 12, 13, 18, 19] if whole_is_held else [7] * 8)


STEPS = ("read base", "read view", "write base", "write view")


@pytest.mark.parametrize("first", STEPS)
@pytest.mark.parametrize("detached", [False, True])
def test_a_view_and_its_base_with_a_history(first: str, detached: bool) -> None:
    """A value that a gradient flows through is made anew by a write; it is one storage with its views before and after,
    whether it was read in between or not."""
    for order in itertools.product((first,), STEPS, STEPS, STEPS):
        leaf = Tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
        base = (leaf * 2).detach() if detached else leaf * 2
        view = base[1]
        want = np.array([[2.0, 4.0], [6.0, 8.0]], np.float32)
        for step in order:
            if step == "write base":
                base += 1
                want += 1
            elif step == "write view":
                view *= 3
                want[1] *= 3
            else:
                what, t = (want, base) if step == "read base" else (want[1], view)
                np.testing.assert_array_equal(t.numpy(), what, str(order))
        np.testing.assert_array_equal(view.numpy(), want[1], str(order))
        np.testing.assert_array_equal(base.numpy(), want, str(order))
