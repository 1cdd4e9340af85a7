"""Quantised weights against the `gguf` package: every format, products of few and many rows, looked-up rows, what
`nn.quantize` makes of float weights, cut over devices."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest

from manygrad import GlobalCounters, Tensor, TinyJit, nn
from manygrad.nn.quantized.blocks import FORMATS, BlockFormat
from manygrad.nn.quantized.grid_formats import GRID_FORMATS
from tests.nn.test_gguf import blocks

RNG = np.random.default_rng(0)
# of standard normal weights: the root of the mean square error; what docs/inference.md says
ERRORS = {
    "q8_0": 0.006,
    "q6_k": 0.02,
    "q5_k": 0.042,
    "q5_1": 0.042,
    "q5_0": 0.048,
    "q4_k": 0.085,
    "q4_1": 0.085,
    "q4_0": 0.095,
}


def weight(kind: BlockFormat, rows: int, columns: int) -> tuple[nn.QuantizedWeight, np.ndarray]:
    """Random blocks, and what they are in float32."""
    raw = blocks(kind.name.upper(), rows, columns)
    values = gguf.dequantize(raw, gguf.GGMLQuantizationType(kind.number))
    return nn.QuantizedWeight(Tensor(raw.reshape(rows, -1, kind.nbytes)), kind.name), values


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_products_and_rows_of_every_format(kind: BlockFormat) -> None:
    w, values = weight(kind, 48, 512)
    assert w.shape == (48, 512)
    np.testing.assert_allclose(w.dequantize().numpy(), values, rtol=1e-5, atol=1e-5)
    for rows in (1, 3, 32, 100):
        x = normal(rows, 512)
        want = x @ values.T
        np.testing.assert_allclose(w.linear(Tensor(x)).numpy(), want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    at = np.array([[0, 47], [3, 3]])
    np.testing.assert_allclose(w.rows(Tensor(at)).numpy(), values[at], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_few_rows_times_a_weight_are_one_kernel_that_reads_the_blocks(kind: BlockFormat) -> None:
    w, _ = weight(kind, 49, 256)
    x = normal(16, 256)
    w.blocks.realize()
    alone = [w.linear(Tensor(row)).numpy() for row in x]
    for rows in (1, 2, 5, 8, 11, 16):
        given = Tensor(x[:rows]).realize()
        before = GlobalCounters.kernel_count
        out = w.linear(given).realize()
        assert GlobalCounters.kernel_count == before + 1
        np.testing.assert_array_equal(out.numpy(), np.stack(alone[:rows]), f"a row alone and among {rows}")


@pytest.mark.parametrize("kind", ERRORS)
def test_quantize_makes_weights_of_small_error(kind: str) -> None:
    linear = nn.Linear(512, 96)
    linear.weight.assign(Tensor(normal(96, 512)))
    floats, bias = linear.weight.numpy(), linear.bias.numpy()
    made = nn.quantize(linear, kind)
    assert isinstance(made, nn.QuantizedLinear) and made.weight.shape == (96, 512)
    raw = made.weight.blocks.numpy()
    number = gguf.GGMLQuantizationType[kind.upper()]
    values = gguf.dequantize(raw.reshape(96, -1), number)
    assert np.sqrt(np.square(values - floats).mean()) < ERRORS[kind]
    if not kind.endswith("k"):  # (the package makes no others)
        np.testing.assert_array_equal(raw.reshape(96, -1), gguf.quantize(floats, number))
    x = normal(2, 512)
    np.testing.assert_allclose(made(Tensor(x)).numpy(), x @ values.T + bias, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", ERRORS)
def test_rows_of_zeros_and_of_one_sign(kind: str) -> None:
    floats = np.stack([np.zeros(256), np.full(256, 0.5), -np.linspace(0.1, 1, 256)]).astype(np.float32)
    made = nn.quantize(nn.Embedding.from_pretrained(Tensor(floats)), kind)
    np.testing.assert_allclose(made(Tensor([0, 1, 2])).numpy(), floats, atol=0.07)


def test_quantize_a_model_in_place() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            self.embed = nn.Embedding(10, 64)
            self.layers = [nn.Linear(64, 40, bias=False), nn.ReLU(), nn.Linear(40, 64)]
            self.head = nn.Linear(64, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    model = Model()
    tokens = Tensor([[1, 2, 3]])
    want = model(tokens).numpy()
    assert nn.quantize(model, "q8_0") is model
    assert isinstance(model.layers[0], nn.QuantizedLinear)
    assert type(model.layers[2]) is nn.Linear  # rows of 40 are no whole blocks
    assert model.head.weight is model.embed.weight
    np.testing.assert_allclose(model(tokens).numpy(), want, atol=0.05)
    with pytest.raises(ValueError, match="'q3_k' cannot be made; these can: q8_0, q4_0"):
        nn.quantize(model, "q3_k")


def rounded(x: np.ndarray) -> np.ndarray:
    """What int8 activations are, in float64: of each 32 elements of a row the largest is 127 times their scale. (Which
    integer is nearest float32 says: a quotient close to a half may be on either side of it.)"""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    integers = np.rint(groups * (np.float32(127) / np.where(largest == 0, np.float32(1), largest)))
    return (integers.astype(np.float64) * (largest.astype(np.float64) / 127)).reshape(x.shape)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_int8_activations_of_every_format(kind: BlockFormat) -> None:
    """Rounded inputs times the weights' own numbers: so exact that what rounding costs is all that is left. Rows that
    are no multiple of 16, and inputs of zeros, too."""
    w, values = weight(kind, 43, 512)
    w = nn.QuantizedWeight(w.blocks, kind.name, activations="int8")
    values = values.astype(np.float64)
    for rows in (1, 3, 20):
        x = normal(rows, 512)
        x[0, 32:96] = 0
        found, sizes = w.linear(Tensor(x)).numpy(), np.abs(x.astype(np.float64)) @ np.abs(values).T
        assert found.shape == (rows, 43)
        close = np.abs(found - rounded(x) @ values.T)
        assert (close <= 2e-6 * sizes).all()
        # half a step is the most that an element is off
        steps = np.repeat(np.abs(x.reshape(rows, -1, 32)).max(-1) / 254, 32, -1)
        assert (np.abs(found - x @ values.T) <= 2e-6 * sizes + steps @ np.abs(values).T).all()
    np.testing.assert_array_equal(w.linear(Tensor(np.zeros((2, 512), np.float32))).numpy(), np.zeros((2, 43)))


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_int8_activations_take_three_small_kernels_and_a_product(kind: BlockFormat) -> None:
    """Scales, numbers and their sums; nothing of the weights is stored unpacked, for many rows neither."""
    w = nn.QuantizedWeight(weight(kind, 32, 512)[0].blocks, kind.name, "int8")
    Tensor.realize(*w.buffers())
    for rows in (1, 4, 33):
        x = Tensor(normal(rows, 512)).realize()
        before = GlobalCounters.kernel_count
        w.linear(x).realize()
        assert GlobalCounters.kernel_count == before + 4


def test_int8_activations_of_a_quantised_model() -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    x = normal(5, 64)
    want = model(Tensor(x)).numpy()
    nn.quantize(model, "q8_0", activations="int8")
    assert "activations='int8'" in repr(model[0]) and "packed" not in "".join(model.state_dict())
    np.testing.assert_allclose(model(Tensor(x)).numpy(), want, atol=0.03)
    half = model(Tensor(x).cast("bfloat16"))
    assert half.dtype.name == "bfloat16"
    np.testing.assert_allclose(half.float().numpy(), want, atol=0.06)


@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_gradients_go_through_to_the_input(activations: str) -> None:
    w, values = weight(FORMATS[1], 8, 64)
    w = nn.QuantizedWeight(w.blocks, w.kind, activations)
    x = Tensor(normal(2, 64), requires_grad=True)
    (w.linear(x) * Tensor(upstream := normal(2, 8))).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), upstream @ values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["q4_1", "q8_0", "q6_k"])
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("rule", [0, (1, 2), None], ids=str)
def test_int8_activations_cut_over_devices(kind: str, devices: int, rule: int | tuple[int, int] | None) -> None:
    names = tuple(f"CPU:{i}" for i in range(devices))
    whole = nn.quantize(nn.Linear(512, 96), kind, activations="int8")
    blocks = Tensor(whole.weight.blocks.numpy())
    cut = nn.QuantizedLinear(nn.QuantizedWeight(blocks, kind, "int8"), Tensor(whole.bias.numpy()))
    nn.shard_rules(cut, {"weight.*": rule}, names)
    assert all(b.device == names for b in cut.weight.buffers())
    for rows in (1, 3, 40):
        x = normal(rows, 512)
        found = cut(Tensor(x).shard(names)).numpy()
        np.testing.assert_allclose(found, whole(Tensor(x)).numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["q4_1", "q8_0", "q6_k"])
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("rule", [0, (1, 2), (0, 3), None], ids=str)
def test_cut_over_devices_between_blocks(kind: str, devices: int, rule: int | tuple[int, int] | None) -> None:
    names = tuple(f"CPU:{i}" for i in range(devices))
    floats = nn.Linear(512, 9)
    weight, bias = floats.weight.numpy(), floats.bias.numpy()
    whole = nn.quantize(floats, kind)
    cut = nn.QuantizedLinear(nn.QuantizedWeight(Tensor(whole.weight.blocks.numpy()), kind), Tensor(bias))
    nn.shard_rules(cut, {"weight.blocks": rule}, names)
    assert cut.weight.blocks.device == names
    for rows in (1, 3, 40):
        x = normal(rows, 512)
        want = whole(Tensor(x)).numpy()
        np.testing.assert_allclose(cut(Tensor(x).shard(names)).numpy(), want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(want, x @ weight.T + bias, atol=0.5)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_cut_between_blocks_a_row_times_a_weight_stores_nothing_of_it(kind: BlockFormat) -> None:
    """A kernel a device for what its blocks add to, one that adds these up (of several), and the all-reduce; the table
    of a format that has one is copied to the second device."""
    devices = ("CPU:0", "CPU:1")
    w, _ = weight(kind, 32, 4096)
    w.blocks.shard_(devices, 1)
    x = Tensor(normal(1, 4096)).shard(devices, 1).realize()
    w.blocks.realize()
    before = GlobalCounters.kernel_count
    w.linear(x).realize()
    assert GlobalCounters.kernel_count == before + 2 + 2 + 1 + (kind.name in GRID_FORMATS)


def test_a_capture_reads_the_blocks_that_are_there_now() -> None:
    w, values = weight(FORMATS[1], 16, 64)
    w.blocks.realize()
    step = TinyJit(lambda x: w.linear(x).realize())
    x = normal(1, 64)
    for _ in range(3):
        np.testing.assert_allclose(step(Tensor(x)).numpy(), x @ values.T, rtol=1e-4, atol=1e-4)
    other, values = weight(FORMATS[1], 16, 64)
    w.blocks.assign(other.blocks).realize()
    np.testing.assert_allclose(step(Tensor(x)).numpy(), x @ values.T, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(ValueError, match="'q9' is not known; known are q4_0, q4_1"):
        nn.QuantizedWeight(Tensor(np.zeros((2, 1, 18), np.uint8)), "q9")
    with pytest.raises(ValueError, match=r"blocks of q4_1 are \(rows, blocks, 20\) uint8, not \(2, 1, 18\) uint8"):
        nn.QuantizedWeight(Tensor(np.zeros((2, 1, 18), np.uint8)), "q4_1")
    with pytest.raises(ValueError, match="activations 'int4' are not known; known are float32, int8"):
        nn.QuantizedWeight(Tensor(np.zeros((2, 1, 18), np.uint8)), "q4_0", "int4")
    w, _ = weight(FORMATS[0], 2, 64)
    with pytest.raises(ValueError, match="x has 32 columns, the weight 64"):
        w.linear(Tensor.zeros(1, 32))


def test_bits_a_weight() -> None:
    assert {f.name: f.bits for f in FORMATS if f.name in ERRORS} == {
        "q8_0": 8.5, "q6_k": 6.5625, "q5_k": 5.5, "q5_1": 6.0, "q5_0": 5.5, "q4_k": 4.5, "q4_1": 5.0, "q4_0": 4.5,
    }  # fmt: skip
    assert all(math.prod(f.dims) == f.size in (32, 64, 256) for f in FORMATS)


def test_every_exponent_of_mxfp4() -> None:
    """Also those of the smallest numbers, which have less of them, and of the largest."""
    raw = np.full((256, 17), 0x21, np.uint8)
    raw[:, 0] = np.arange(256)
    w = nn.QuantizedWeight(Tensor(raw.reshape(256, 1, 17)), "mxfp4")
    with np.errstate(over="ignore"):
        want = gguf.dequantize(raw, gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(w.dequantize().numpy(), want)
