"""SmolLM2-135M as transformers has it (`make_golden.py`): tokens, logits, text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, TinyJit, Variable, nn
from manygrad.llm.engine.writer import Writer
from manygrad.llm.load import load
from manygrad.llm.sharding import rules
from manygrad.llm.stream import TextStream

TOKENS = 8  # of texts that several devices write together
GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2.json").read_text())


@pytest.fixture(scope="module")
def loaded(smollm2: str) -> Any:
    model, tokenizer = load(smollm2)
    model.reserve(1, 256)
    Tensor.realize(*model.parameters(), *model.buffers())
    return model, tokenizer


@pytest.mark.parametrize("told", GOLDEN["prompts"], ids=lambda told: told["prompt"][:16])
def test_logits_and_greedy_text_are_those_of_transformers(loaded: Any, told: dict[str, Any]) -> None:
    model, tokenizer = loaded
    ids = (
        tokenizer.chat([{"role": "user", "content": told["prompt"]}])
        if told["chat"]
        else tokenizer.encode(told["prompt"])
    )
    assert ids == told["ids"]
    with Tensor.no_grad():
        logits = model(Tensor([ids]), 0, len(ids) - 1).numpy()[0]
    np.testing.assert_allclose(logits[::256], told["logits"], atol=1e-3)
    writer = Writer(model, 256)
    tokens = [writer.start(ids)]
    while len(tokens) < 64:
        tokens.append(writer.write(tokens[-1]))
    assert tokens == told["tokens"]
    stream = TextStream(tokenizer)
    assert "".join(map(stream.add, tokens)) + stream.end() == tokenizer.decode(tokens)


def test_decoded_weights_give_the_same_logits(loaded: Any, smollm2: str) -> None:
    quantised, tokenizer = loaded
    decoded, _ = load(smollm2, "float32")
    decoded.reserve(1, 256)
    ids = tokenizer.encode(GOLDEN["prompts"][0]["prompt"])
    for part in (ids, ids[:1]):  # a block of rows; one row, which reads the blocks
        with Tensor.no_grad():
            one, other = (m(Tensor([part]), 0, len(part) - 1).numpy() for m in (quantised, decoded))
        np.testing.assert_allclose(one, other, atol=1e-3)


@pytest.mark.parametrize("dtype, activations", [(None, "int8"), ("bfloat16", "bfloat16")])
def test_rounded_activations_find_the_same_tokens_likely(
    loaded: Any, smollm2: str, dtype: str | None, activations: str
) -> None:
    """The text that float32 activations write, token by token."""
    exact, _ = loaded
    rounding, _ = load(smollm2, dtype, activations)
    rounding.reserve(1, 256)
    kept = rounding.layers[0].self_attn.cache.values.dtype.name
    assert kept == ("bfloat16" if activations == "bfloat16" else "float32")
    Tensor.realize(*rounding.buffers())
    told = GOLDEN["prompts"][0]
    ids, first = told["ids"] + told["tokens"][:24], len(told["ids"])

    def chances(model: Any) -> np.ndarray:
        """The logarithm of that of each token, after those before it."""
        step = TinyJit(lambda last: model(Tensor([ids]), 0, last).log_softmax(-1).realize())
        with Tensor.no_grad():
            found = [step(Variable("last", 0, len(ids) - 1).bind(i - 1)).numpy()[0] for i in range(first, len(ids))]
        return np.array([logarithms[i] for i, logarithms in zip(ids[first:], found)])

    difference = chances(exact) - chances(rounding)
    assert abs(difference.mean()) < 0.05 and np.abs(difference).max() < 0.5, difference


@pytest.mark.parametrize("count", [2, 4])
def test_devices_write_the_same(smollm2: str, count: int) -> None:
    """Three heads of keys, with nine of queries: two devices share one of them, of four one has none."""
    devices, told = tuple(f"CPU:{i}" for i in range(count)), GOLDEN["prompts"][0]
    model, _ = load(smollm2, devices=devices)
    model.reserve(1, 256)
    nn.shard_rules(model, rules(model, devices), devices)
    Tensor.realize(*model.parameters(), *model.buffers())
    writer = Writer(model, 256)
    tokens = [writer.start(told["ids"])]
    while len(tokens) < TOKENS:
        tokens.append(writer.write(tokens[-1]))
    assert tokens == told["tokens"][:TOKENS]


@pytest.mark.parametrize("count", [2, 4])
def test_nodes_write_the_same(smollm2: str, count: int, command: Callable[..., Any]) -> None:
    told = GOLDEN["prompts"][0]
    given = ["--model", smollm2, "--prompt", told["prompt"], "--tokens", str(TOKENS), "--ignore-end"]
    run = command("-m", "manygrad.llm.generate", "--nodes", str(count), "--", *given).wait()
    _, tokenizer = load(smollm2)
    stream = TextStream(tokenizer, prompt=told["ids"])
    text = "".join(map(stream.add, told["tokens"][:TOKENS])) + stream.end()
    assert run.code == 0 and run.out == f"0:0: {text}\n", run.out + run.err


def test_text_becomes_the_tokens_of_transformers(loaded: Any) -> None:
    _, tokenizer = loaded
    for told in GOLDEN["texts"]:
        assert tokenizer.encode(told["text"]) == told["ids"], told["text"]
        assert tokenizer.inner.decode(told["ids"], skip_special_tokens=False) == told["text"]
