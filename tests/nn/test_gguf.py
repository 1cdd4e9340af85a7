"""GGUF files against the `gguf` package: metadata, plain types, quantised blocks; and damaged files."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from manygrad import Tensor, nn
from manygrad.nn.state import gguf_load

RNG = np.random.default_rng(0)
# where the float16 scales of a block lie; random bits there would be NaN now and then
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ1_S": (0,),
    "IQ1_M": (),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "NVFP4": (),
}
EXPONENTS = {"MXFP4": (0, 120, 134), "IQ1_M": (55, 0x30, 0x40)}  # at a byte: from, to


def blocks(name: str, rows: int, columns: int) -> np.ndarray:
    """(rows, bytes) of random blocks."""
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    raw = RNG.integers(0, 256, (rows, columns // size, nbytes)).astype(np.uint8)
    for at in SCALES[name]:
        raw[..., at : at + 2] = RNG.standard_normal((rows, columns // size, 1)).astype(np.float16).view(np.uint8)
    if name in EXPONENTS:
        at, low, high = EXPONENTS[name]
        raw[..., at] = RNG.integers(low, high, raw.shape[:2])
    return raw.reshape(rows, -1)


def write(path: Path, tensors: dict[str, tuple[np.ndarray, str | None]]) -> None:
    w = gguf.GGUFWriter(str(path), "tests")
    w.add_uint32("count", 5)
    w.add_array("numbers", [1, 2, 3])
    w.add_array("words", ["a", "bé"])
    w.add_array("any words", ["", "a\0b", "é"])
    w.add_float32("rate", 1.5)
    w.add_bool("yes", True)
    for name, (a, kind) in tensors.items():
        w.add_tensor(name, a, raw_dtype=None if kind is None else gguf.GGMLQuantizationType[kind])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.mark.parametrize("name", SCALES)
def test_quantised_blocks(name: str, tmp_path: Path) -> None:
    raw = blocks(name, 3, 512)
    write(tmp_path / "a.gguf", {"w": (raw, name)})
    got = gguf_load(tmp_path / "a.gguf")[1]["w"]
    want = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert got.shape == want.shape == (3, 512)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-6, atol=1e-6)


def test_matrices_that_stay_quantised_share_the_files_pages(tmp_path: Path) -> None:
    raw, path = blocks("Q4_1", 3, 64), tmp_path / "a.gguf"
    write(path, {"w": (raw, "Q4_1"), "v": (np.ones(32, np.float32), None)})
    tensors = gguf_load(path, quantized=True)[1]
    w = tensors["w"]
    assert isinstance(w, nn.QuantizedWeight) and w.shape == (3, 64) and w.kind == "q4_1"
    assert isinstance(tensors["v"], Tensor)
    np.testing.assert_array_equal(w.blocks.to("CPU").numpy().reshape(3, -1), raw)
    shared = Tensor.from_dlpack(w.blocks)
    at = path.read_bytes().index(raw[0].tobytes())
    with open(path, "r+b") as f:
        f.seek(at)
        f.write(bytes([raw[0, 0] ^ 255]))
    assert shared.device == "CPU:0" and int(shared.numpy()[0, 0, 0]) == raw[0, 0] ^ 255


def test_plain_types_and_metadata(tmp_path: Path) -> None:
    a = RNG.standard_normal((2, 3, 6)).astype(np.float32)
    arrays: dict[str, tuple[np.ndarray, str | None]] = {
        "f32": (a, None), "f16": (a.astype(np.float16), None),
        "bf16": (gguf.quantize(a, gguf.GGMLQuantizationType.BF16), "BF16"), "i32": (np.arange(4, dtype=np.int32), None),
    }  # fmt: skip
    write(tmp_path / "a.gguf", arrays)
    metadata, tensors = gguf_load(tmp_path / "a.gguf")
    assert {k: metadata[k] for k in ("count", "numbers", "words", "any words", "rate", "yes")} == {
        "count": 5,
        "numbers": [1, 2, 3],
        "words": ["a", "bé"],
        "any words": ["", "a\0b", "é"],
        "rate": 1.5,
        "yes": True,
    }
    assert tensors["f32"].device.startswith("DISK:") and tensors["bf16"].dtype.name == "bfloat16"  # type: ignore[union-attr]
    np.testing.assert_array_equal(tensors["f32"].to("CPU").numpy(), a)
    np.testing.assert_array_equal(tensors["f16"].to("CPU").numpy(), a.astype(np.float16))
    np.testing.assert_allclose(tensors["bf16"].to("CPU").float().numpy(), a, rtol=1e-2)
    assert tensors["i32"].to("CPU").tolist() == [0, 1, 2, 3]


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write(path, {"a": (blocks("Q4_0", 1, 64), "Q4_0"), "b": (np.ones(8, np.float32), None)})
    whole = path.read_bytes()
    for n in [*range(0, len(whole) - 40, 37)]:
        path.write_bytes(whole[:n])
        with pytest.raises(ValueError, match="cannot be read as a GGUF file"):
            gguf_load(path)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
    name = struct.pack("<Q", 1) + b"w"
    for bad, message in [
        (b"GGML" + head[4:], "does not begin with GGUF"), (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "claims 11529215046"),
        (head + name + struct.pack("<IQIQ", 1, 1 << 62, 0, 0), "ends at byte"),
        (head + name + struct.pack("<IQIQ", 1, 33, 2, 0) + bytes(99), "not whole blocks of 32"),
        (head + name + struct.pack("<IQIQ", 1, 4, 77, 0) + bytes(99), "has the type 77"),
        (head + struct.pack("<Q", 1 << 63), "truncated"), (head + name + struct.pack("<I", 1 << 31), "2147483648 dims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + name + struct.pack("<IQIQ", 1, 8, 0, 0) + struct.pack("<Q", 1) + b"v"
         + struct.pack("<IQIQ", 1, 8, 0, 16) + bytes(99), "'w' and 'v' overlap"),
    ]:  # fmt: skip
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=message):
            gguf_load(path)
