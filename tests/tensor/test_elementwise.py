"""Elementwise operators against NumPy: types, shapes, broadcasting, special values, Python's operators."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from manygrad import Context, Tensor, dtypes
from manygrad.tensor.dtype import promote, to_dtype
from tests.tensor.oracle import PAIRS, SHAPES, check, numbers, wide

RNG = np.random.default_rng(0)
INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
ALL = ["bool", *INTS, *FLOATS]
NONZERO = {"div", "floordiv", "mod", "fmod", "trunc_div"}


@pytest.fixture(autouse=True, params=["PYTHON", "CPU"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with Context(DEVICE=request.param):
        yield request.param


def few(device: str, values: Any) -> Any:
    """All of it on the interpreter; the ends on the CPU, where each kernel is compiled."""
    return values if device == "PYTHON" else values[:: max(1, len(values) - 1)]


def trunc_div(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (
        np.trunc(a / b) if a.dtype.kind == "f" else (np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)).astype(a.dtype)
    )


BINARY: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[..., Any], list[str]]] = {
    "add": (operator.add, np.add, [*INTS, *FLOATS]),
    "sub": (operator.sub, np.subtract, [*INTS, *FLOATS]),
    "mul": (operator.mul, np.multiply, ALL),
    "div": (operator.truediv, np.divide, FLOATS),
    "floordiv": (operator.floordiv, np.floor_divide, [*INTS, *FLOATS]),
    "mod": (operator.mod, np.remainder, [*INTS, *FLOATS]),
    "fmod": (lambda a, b: a.fmod(b), np.fmod, [*INTS, *FLOATS]),
    "trunc_div": (lambda a, b: a.div(b, rounding_mode="trunc"), trunc_div, [*INTS, *FLOATS]),
    "maximum": (lambda a, b: a.maximum(b), np.maximum, ALL),
    "minimum": (lambda a, b: a.minimum(b), np.minimum, ALL),
    "lt": (operator.lt, np.less, ALL),
    "le": (operator.le, np.less_equal, ALL),
    "gt": (operator.gt, np.greater, ALL),
    "ge": (operator.ge, np.greater_equal, ALL),
    "eq": (operator.eq, np.equal, ALL),
    "ne": (operator.ne, np.not_equal, ALL),
    "and": (operator.and_, np.bitwise_and, ["bool", *INTS]),
    "or": (operator.or_, np.bitwise_or, ["bool", *INTS]),
    "xor": (operator.xor, np.bitwise_xor, ["bool", *INTS]),
    "logical_and": (lambda a, b: a.logical_and(b), np.logical_and, ALL),
    "logical_or": (lambda a, b: a.logical_or(b), np.logical_or, ALL),
}


@pytest.mark.parametrize("name", BINARY)
def test_binary_types(name: str, device: str) -> None:
    f, g, kinds = BINARY[name]
    for kind in few(device, kinds):
        a, b = numbers(RNG, kind, (4, 5)), numbers(RNG, kind, (4, 5))
        a[0], b[0] = 1, 1
        if name in NONZERO:
            b = np.where(b == 0, b.dtype.type(3), b)
        want = g(wide(a), wide(b))
        got = f(Tensor(a), Tensor(b))
        assert got.dtype is (dtypes.bool if want.dtype == bool else to_dtype(kind))
        check(got, want)


@pytest.mark.parametrize("name", ["sub", "maximum", "lt"])
def test_binary_shapes(name: str, device: str) -> None:
    f, g, _ = BINARY[name]
    for left, right in few(device, PAIRS) if name != "sub" else PAIRS:
        a, b = numbers(RNG, "float32", left), numbers(RNG, "float32", right)
        check(f(Tensor(a), Tensor(b)), g(a, b))


def test_mixed_types_compute_in_the_promoted_type(device: str) -> None:
    for left, right in few(
        device,
        [
            ("int32", "float32"),
            ("uint8", "int8"),
            ("bool", "int16"),
            ("float16", "float32"),
            ("int64", "float16"),
            ("bfloat16", "float16"),
        ],
    ):
        a, b = numbers(RNG, left, (6,)), numbers(RNG, right, (6,))
        kind = promote(to_dtype(left), to_dtype(right))
        got = Tensor(a) * Tensor(b)
        assert got.dtype is kind
        check(got, wide(wide(a).astype(kind.np)) * wide(wide(b).astype(kind.np)))


UNARY: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., Any], list[str], float, float]] = {
    "neg": (operator.neg, np.negative, [*INTS, *FLOATS], -4, 4),
    "abs": (abs, np.abs, [*INTS, *FLOATS], -4, 4),
    "sign": (lambda t: t.sign(), np.sign, [*INTS, *FLOATS], -4, 4),
    "invert": (operator.invert, np.invert, ["bool", *INTS], -4, 4),
    "logical_not": (lambda t: t.logical_not(), np.logical_not, ALL, -1, 1),
    "square": (lambda t: t.square(), np.square, [*INTS, *FLOATS], -4, 4),
    "reciprocal": (lambda t: t.reciprocal(), np.reciprocal, FLOATS, -4, 4),
    "sqrt": (lambda t: t.sqrt(), np.sqrt, FLOATS, 0, 9),
    "rsqrt": (lambda t: t.rsqrt(), lambda a: 1 / np.sqrt(a), FLOATS, 0.1, 9),
    "exp": (lambda t: t.exp(), np.exp, FLOATS, -4, 4),
    "log": (lambda t: t.log(), np.log, FLOATS, 0.01, 9),
    "sin": (lambda t: t.sin(), np.sin, FLOATS, -4, 4),
    "trunc": (lambda t: t.trunc(), np.trunc, [*INTS, *FLOATS], -4, 4),
    "floor": (lambda t: t.floor(), np.floor, [*INTS, *FLOATS], -4, 4),
    "ceil": (lambda t: t.ceil(), np.ceil, [*INTS, *FLOATS], -4, 4),
    "round": (lambda t: t.round(), np.round, [*INTS, *FLOATS], -4, 4),
}


@pytest.mark.parametrize("name", UNARY)
def test_unary_types(name: str, device: str) -> None:
    f, g, kinds, low, high = UNARY[name]
    for kind in few(device, kinds):
        a = numbers(RNG, kind, (4, 5), low, high)
        got = f(Tensor(a))
        assert got.dtype is (dtypes.bool if name == "logical_not" else to_dtype(kind))
        check(got, g(wide(a)), atol=1e-5 if name == "sin" and kind == "float32" else None)


def test_unary_shapes(device: str) -> None:
    for shape in SHAPES:
        a = numbers(RNG, "float32", shape, 0.1, 4)
        check(Tensor(a).sqrt(), np.sqrt(a))
        check(-Tensor(a), -a)


def test_functions_of_integers_give_float32() -> None:
    check(Tensor([0, 1, 2]).exp(), np.exp(np.arange(3, dtype=np.float32)))
    check(Tensor([True, False]).sqrt(), np.float32([1, 0]))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rests_of_large_quotients(dtype: str, device: str) -> None:
    rng = np.random.default_rng(0)
    for size in (1e2, 1e8, 1e12):
        with np.errstate(over="ignore", invalid="ignore"):
            a = np.minimum(rng.standard_normal(500) * size, 60000 if dtype == "float16" else np.inf).astype(dtype)
            b = (rng.standard_normal(500) * 3).astype(dtype)
            rest, whole = np.fmod(a, b), np.remainder(a, b)
        np.testing.assert_array_equal(Tensor(a).fmod(Tensor(b)).numpy(), rest)
        np.testing.assert_allclose((Tensor(a) % Tensor(b)).numpy(), whole, rtol=0, atol=float(np.finfo(dtype).eps) * 16)


def test_integers_divide_exactly_at_the_limits(device: str) -> None:
    """floor_divide rounds down, trunc towards zero, remainder has the sign of the divisor, fmod of the dividend."""
    a = np.array([7, -7, 7, -7, 0, 2**62, -(2**62), -(2**63) + 1], np.int64)
    b = np.array([2, 2, -2, -2, 5, -3, 3, -1], np.int64)
    check(Tensor(a) // Tensor(b), a // b)
    check(Tensor(a) % Tensor(b), a % b)
    check(Tensor(a).fmod(Tensor(b)), np.fmod(a, b))
    check(Tensor(a) // 3, a // 3)
    check(Tensor(a) % -3, a % -3)
    u = np.array([2**64 - 1, 2**63, 7], np.uint64)
    check(Tensor(u) // Tensor(np.full(3, 2, np.uint64)), u // 2)


def test_integer_arithmetic_wraps(device: str) -> None:
    for kind in few(device, INTS):
        info = np.iinfo(kind)
        a = np.array([info.max, info.min, info.max // 2 + 1], kind)
        with np.errstate(over="ignore"):
            check(Tensor(a) + 1, a + a.dtype.type(1))
            check(Tensor(a) * 3, a * a.dtype.type(3))
            check(-Tensor(a), -a)


def test_shifts(device: str) -> None:
    for kind in few(device, INTS):
        a = np.array([1, 2, 3, 100], kind)
        check(Tensor(a) << 2, a << a.dtype.type(2))
        check(Tensor(a) >> 1, a >> a.dtype.type(1))
    check(Tensor(np.int32([-8, -1])) >> 1, np.int32([-4, -1]))


SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan], np.float32)


@pytest.mark.parametrize(
    "name", ["sqrt", "exp", "log", "reciprocal", "abs", "sign", "trunc", "floor", "ceil", "round", "square", "neg"]
)
def test_special_values(name: str) -> None:
    f, g, *_ = UNARY[name]
    with np.errstate(all="ignore"):
        want = g(SPECIAL)
    if name == "sign":
        want = np.where(np.isnan(SPECIAL), 0, want)  # as torch.sign
    check(f(Tensor(SPECIAL)), want)


def test_signed_zero_survives() -> None:
    for f, want in [
        (operator.neg, [True, False]),
        (lambda t: t + -0.0, [False, True]),
        (lambda t: t * 1, [False, True]),
        (lambda t: t.trunc().reshape(2, 1), [False, True]),
        (lambda t: t.cast("float64").cast("float16"), [False, True]),
    ]:
        assert np.signbit(f(Tensor([0.0, -0.0])).numpy()).reshape(-1).tolist() == want


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("number", [0.0, -0.0, 1e-60, 1.0])
def test_what_a_constant_leaves_alone_has_numpys_bits(number: float, dtype: str) -> None:
    """A rule of the simplifier that takes `x + 0.0` for `x` changes the sign of -0.0."""
    x = np.array([0.0, -0.0, 1.5, np.inf])
    rounded = np.float64(number if dtype == "float64" else np.float32(number))
    for op in (operator.add, operator.sub, operator.mul, operator.truediv):
        for f in (lambda t, c, op=op: op(t, c), lambda t, c, op=op: op(c, t)):
            with np.errstate(all="ignore"):
                want = f(x, rounded)
            got = f(Tensor(x, dtype=dtype), number).double().numpy()
            keep = ~np.isnan(want)
            assert np.signbit(got[keep]).tolist() == np.signbit(want[keep]).tolist(), op


@pytest.mark.parametrize(
    "name",
    ["add", "sub", "mul", "div", "pow", "maximum", "minimum", "fmod", "remainder", "atan2", "hypot", "copysign",
     "floor_divide", "logaddexp", "logaddexp2", "xlogy", "lt", "le", "gt", "ge", "eq", "ne", "fmax", "fmin"],
)  # fmt: skip
def test_a_number_is_as_a_tensor_of_it(name: str) -> None:
    """Also NaN and the infinities, which rules for constants forget."""
    t, f = Tensor(SPECIAL), getattr(Tensor, name)
    for number in (math.nan, math.inf, -math.inf, 0.0, 1.0, -1.0, 2.5, 3, -3):
        with np.errstate(all="ignore"):
            want = f(t, Tensor(np.full(SPECIAL.shape, number, SPECIAL.dtype))).numpy()
        np.testing.assert_array_equal(f(t, number).numpy(), want, err_msg=str(number))


ACTIVATIONS: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(["celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu",
                     "logsigmoid", "mish", "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softshrink",
                     "softsign", "tanh", "tanhshrink"], ()),
    "threshold": (0.5, 2.0),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_keeps_nan(name: str) -> None:
    """Else a run goes on with numbers after its first NaN."""
    x = Tensor([math.nan, 1.0], requires_grad=True)
    out = getattr(x, name)(*ACTIVATIONS[name])
    assert out.isnan().tolist() == [True, False]


def test_special_values_of_two_operands() -> None:
    a, b = (x.reshape(-1) for x in np.meshgrid(SPECIAL, SPECIAL))
    with np.errstate(all="ignore"):
        check(Tensor(a) + Tensor(b), a + b)
        check(Tensor(a) * Tensor(b), a * b)
        check(Tensor(a) / Tensor(b), a / b)
        check(Tensor(a).maximum(Tensor(b)), np.maximum(a, b))
        check(Tensor(a).minimum(Tensor(b)), np.minimum(a, b))
        for name in ("lt", "le", "gt", "ge", "eq", "ne"):
            check(BINARY[name][0](Tensor(a), Tensor(b)), BINARY[name][1](a, b))


def test_tests_of_floats() -> None:
    t = Tensor(SPECIAL)
    check(t.isnan(), np.isnan(SPECIAL))
    check(t.isinf(), np.isinf(SPECIAL))
    check(t.isfinite(), np.isfinite(SPECIAL))
    for x in (Tensor([1, 2]), Tensor([True, False])):
        assert x.isnan().tolist() == x.isinf().tolist() == [False, False] and x.isfinite().tolist() == [True, True]


def test_pow(device: str) -> None:
    a = np.array([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0])
    for e in few(device, [0, 1, 2, 3, 7, 8, 11, -1, -2, -9, 0.5, -0.5, 1.7, 2.5]):
        with np.errstate(all="ignore"):
            check(Tensor(a) ** e, a**e, rtol=1e-9)
            check(Tensor(a) ** Tensor(np.full(7, e)), a ** np.float64(e), rtol=1e-9)
    check(2.0 ** Tensor(a), 2.0**a, rtol=1e-9)
    check(Tensor([2, 3, -2]) ** 3, np.array([8, 27, -8]))


def test_pow_of_integers_is_exact(device: str) -> None:
    a, e = np.array([2, 3, -3, 7, -1, 1, 0, 5, -1]), np.array([62, 39, 39, 0, 2**40 + 1, 99, 0, 70, 2**40])
    want = [pow(int(x), int(y), 2**64) for x, y in zip(a, e)]
    check(Tensor(a) ** Tensor(e), np.array(want, np.uint64).astype(np.int64))
    assert (Tensor([2, 1, -1, -1, 0]) ** Tensor([-1, -2, -3, -4, -5])).tolist() == [0, 1, -1, 1, 0]
    assert (Tensor([3, 200], dtype="uint8") ** Tensor([5, 3], dtype="uint8")).tolist() == [243, 200**3 % 256]
    assert (Tensor([True, False, False]) ** Tensor([True, False, True])).tolist() == [True, True, False]


def test_where_chooses_and_promotes() -> None:
    c, a, b = np.array([[True], [False]]), numbers(RNG, "float32", (2, 3)), numbers(RNG, "int32", (3,))
    check(Tensor(c).where(Tensor(a), Tensor(b)), np.where(c, a, b).astype(np.float32))
    check(Tensor(c).where(Tensor(a), 2), np.where(c, a, np.float32(2)))
    check(Tensor(c).where(2, Tensor(a)), np.where(c, np.float32(2), a))
    check(Tensor(c).where(Tensor(b), 0.5), np.where(c, b, 0.5).astype(np.float32))
    check(Tensor(c).where(1, 0), np.where(c, 1, 0))
    check(Tensor(c).where(1.0, 0), np.where(c, 1.0, 0.0).astype(np.float32))
    assert Tensor(np.array([True, False])).where(math.nan, 1.0).isnan().tolist() == [True, False]
    check(Tensor(a).masked_fill(Tensor(c), -1.0), np.where(c, np.float32(-1), a))


def test_clamp_and_lerp() -> None:
    a = numbers(RNG, "float32", (9,))
    check(Tensor(a).clamp(-1, 1.5), a.clip(-1, 1.5))
    check(Tensor(a).clip(min=0.5), a.clip(0.5))
    check(Tensor(a).clamp(max=0.5), a.clip(None, 0.5))
    check(Tensor([1, 5, 9]).clamp(2, 7), np.array([2, 5, 7]))
    check(Tensor(a).lerp(Tensor(a[::-1].copy()), 0.25), a + (a[::-1] - a) * np.float32(0.25))


def test_casts(device: str) -> None:
    a = np.array([0.0, 1.0, 2.7, 100.0, 3.5])
    for source in few(device, ALL):
        for target in few(device, ALL):
            x = a.astype(to_dtype(source).np)
            check(Tensor(x).cast(target), wide(x).astype(to_dtype(target).np))
    check(Tensor([-1.7, 2.9]).cast("int32"), np.int32([-1, 2]))
    check(Tensor([300, -1]).cast("uint8"), np.uint8([44, 255]))
    check(Tensor([0.0, math.nan, -0.5]).bool(), np.array([False, True, True]))
    for alias, kind in (
        ("half", "float16"),
        ("bfloat16", "bfloat16"),
        ("float", "float32"),
        ("double", "float64"),
        ("int", "int32"),
        ("long", "int64"),
        ("bool", "bool"),
    ):
        assert getattr(Tensor([1.0]), alias)().dtype is to_dtype(kind)


def test_bitcast() -> None:
    a = np.float32([1.0, -2.5, 0.0, math.inf])
    check(Tensor(a).bitcast("int32"), a.view(np.int32))
    check(Tensor(a).bitcast("uint32").bitcast("float32"), a)
    check(Tensor(a).bitcast("int64"), a.view(np.int64))
    check(Tensor(a.reshape(2, 2)).view("uint8"), a.reshape(2, 2).view(np.uint8))
    check(Tensor(a).view("int16").view("float64"), a.view(np.float64))
    with pytest.raises(ValueError, match=r"bitcast \(3,\) from float32 to int64: the last dim must divide by 2"):
        Tensor(a[:3]).bitcast("int64")
    with pytest.raises(ValueError, match="bitcast of a 0-d tensor from float32 to int64: the widths differ"):
        Tensor(1.0).bitcast("int64")


def test_python_operators_on_both_sides() -> None:
    a = np.float32([1.0, 2.0, 4.0])
    t = Tensor(a)
    for got, want in [
        (3 + t, 3 + a), (3 - t, 3 - a), (3 * t, 3 * a), (3 / t, 3 / a), (t / 4, a / 4), (t // 3, a // 3),
        (t % 3, a % 3), (7 // t, 7 // a), (7 % t, 7 % a), (+t, a),
        (2 < t, 2 < a), (2 >= t, 2 >= a), (t == 2, a == 2), (t != 2, a != 2), (abs(-t), a), (t + a, a + a),
        (a + t, a + a),
    ]:  # fmt: skip
        check(got, want)
    i = Tensor([6, 3])
    for got, want in [(i & 2, [2, 2]), (1 | i, [7, 3]), (i ^ 5, [3, 6]), (~i, [-7, -4])]:
        assert got.tolist() == want


def test_in_place_operators_write_the_same_tensor() -> None:
    t = Tensor([1.0, 2.0]).realize()
    same = t
    t += 1
    t *= 3
    t -= 2
    t /= 2
    assert same is t and t.tolist() == [2.0, 3.5]


def test_numbers_lists_and_arrays_are_operands() -> None:
    t = Tensor([1.0, 2.0])
    assert (t + [1, 2]).tolist() == [2.0, 4.0]
    assert (t * np.float32(2)).tolist() == [2.0, 4.0]
    assert (np.float32([3, 4]) - t).tolist() == [2.0, 2.0]
