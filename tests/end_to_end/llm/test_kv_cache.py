"""Keys and values in fewer bits: how far off they are, in one text and in several, on one device and on two."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Tensor, Variable
from manygrad.llm.engine.writer import SamplingParams, Writer
from manygrad.llm.kv_cache import KINDS, KVCache
from tests.end_to_end.llm.test_batch import LENGTH, alone, batch_of, requests, run
from tests.end_to_end.llm.test_variants import decoder
from tests.end_to_end.llm.variants import TOKENS

ERRORS = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": 0.5 / 127}  # of the largest of a row


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_again(kind: str) -> None:
    rng = np.random.default_rng(0)
    cache, whole = KVCache(2, 3, 16, 8, kind), np.zeros((2, 2, 3, 16, 8), np.float32)
    for at, count in ((0, 5), (5, 1), (3, 4)):
        found = rng.standard_normal((2, 1, 3, count, 8)).astype(np.float32) * 10.0 ** rng.integers(-3, 3)
        found[:, :, 1] = 0
        position = Variable(f"position{count}", 0, 16 - count).bind(at)
        where = (slice(None), slice(1, 2), slice(None), slice(position, position + count))
        cache.write(where, Tensor(found))
        whole[:, 1:2, :, at : at + count] = found
    got = cache.read((slice(None), slice(None), slice(None), slice(None, 9))).numpy()
    off = np.abs(got - whole[:, :, :, :9]) / np.maximum(np.abs(whole[:, :, :, :9]).max(-1, keepdims=True), 1e-30)
    assert off.max() <= ERRORS[kind] * 1.001


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_logits_are_nearly_the_same(kind: str, devices: int) -> None:
    names = tuple(f"CPU:{i}" for i in range(devices)) if devices > 1 else ()
    exact, rounded = decoder("qwen3"), decoder("qwen3", devices=names, kind=kind)
    differences, spread = [], []
    with Tensor.no_grad():
        for at, tokens in ((0, TOKENS[:8]), (8, TOKENS[8:9]), (9, TOKENS[9:10])):
            given = Tensor(np.array([tokens]))
            position = Variable(f"position{len(tokens)}", 0, 64 - len(tokens)).bind(at)
            until = Variable(f"last{len(tokens)}", 0, len(tokens) - 1).bind(len(tokens) - 1)
            want = exact(given, position, until).numpy()
            got = rounded(given.shard(names) if names else given, position, until).numpy()
            differences.append(np.abs(got - want).max())
            spread.append(want.std())
    assert 0 < max(differences) < 12 * ERRORS[kind] * max(spread)


def test_several_texts_are_what_they_are_alone() -> None:
    rng = np.random.default_rng(1)
    asked = requests(6, (SamplingParams(), SamplingParams(0.9, seed=3)), rng)
    model = decoder("llama", LENGTH, kind="int8")
    writers = {choice: Writer(model, LENGTH, choice) for choice in {r.choice for r in asked}}
    want = [alone(writers[r.choice], r) for r in asked]
    made = run(batch_of("llama", 4, kind="int8"), asked, rng, ())
    assert {i: [m.token for m in row] for i, row in made.items()} == dict(enumerate(want))
