"""Language models on CUDA, on a GPU where there is one: each token is CPU's, written alone and with others, likeliest
and drawn, with keys and values in each of their types, and with weights in blocks of each format."""

from __future__ import annotations

import numpy as np
import pytest

import tests.cuda.install  # noqa: F401
from manygrad import Tensor, nn
from manygrad.llm.engine.batch import Batch, Request
from manygrad.llm.engine.steps import Steps
from manygrad.llm.engine.writer import SamplingParams, Writer
from manygrad.llm.kv_cache import KINDS
from manygrad.llm.model import Decoder
from manygrad.nn.quantized.blocks import FORMATS, BlockFormat
from tests.end_to_end.llm.test_batch import alone, run
from tests.end_to_end.llm.test_variants import decoder
from tests.end_to_end.llm.variants import TOKENS
from tests.nn.test_quantized import weight

LIKELIEST, DRAWN = SamplingParams(), SamplingParams(0.9, top_k=20, top_p=0.9, repetition_penalty=1.3, seed=3)
RNG = np.random.default_rng(0)


def on(device: str, model: Decoder) -> Decoder:
    model.to(device)
    Tensor.realize(*model.parameters(), *model.buffers())
    return model


@pytest.mark.parametrize("choice", [LIKELIEST, DRAWN], ids=["likeliest", "drawn"])
@pytest.mark.parametrize(("variant", "kind"), list(zip(("llama", "qwen3", "gemma2", "llama"), KINDS)))
def test_tokens_are_those_of_a_cpu(variant: str, kind: str, choice: SamplingParams) -> None:
    asked = Request(tuple(TOKENS[:9]), 5, choice)
    found = [alone(Writer(on(device, decoder(variant, kind=kind)), 64, choice), asked) for device in ("CPU", "CUDA:0")]
    assert found[0] == found[1]


def test_texts_written_together_are_what_they_are_alone() -> None:
    asked = [Request(tuple(TOKENS[:n]), count, choice) for n, count, choice in ((9, 4, LIKELIEST), (2, 6, DRAWN))]
    model = on("CPU", decoder("llama"))
    want = [alone(Writer(model, 64, r.choice), r) for r in asked]
    paged = decoder("llama")
    paged.reserve_pages(2 * 64, 64)
    made = run(Batch(Steps(on("CUDA:0", paged), 2, 64)), asked, RNG)
    assert [[m.token for m in row] for row in made.values()] == want


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_weights_in_blocks_are_factors_of_every_format(kind: BlockFormat) -> None:
    w, values = weight(kind, 24, 256)
    w = nn.QuantizedWeight(w.blocks.to("CUDA:0").realize(), kind.name)
    for rows in (1, 5):
        x = RNG.standard_normal((rows, 256)).astype(np.float32)
        got = w.linear(Tensor(x, device="CUDA:0")).numpy()
        np.testing.assert_allclose(got, x @ values.T, rtol=1e-4, atol=1e-4 * np.abs(x @ values.T).max())
    at = Tensor(np.array([[0, 23], [3, 3]]), device="CUDA:0")
    np.testing.assert_allclose(w.rows(at).numpy(), values[at.numpy()], rtol=1e-5, atol=1e-5)
