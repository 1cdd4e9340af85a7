"""SmolLM2-135M as transformers has it (`make_golden.py`): tokens, logits, text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load import load
from sharding import rules
from stream import TextStream
from writer import Writer

from manygrad import Tensor, nn

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


def test_nine_heads_on_two_devices_write_the_same(smollm2: str) -> None:
    """(more devices: test_variants.py)"""
    devices, told = ("CPU:0", "CPU:1"), GOLDEN["prompts"][0]
    model, _ = load(smollm2)
    model.reserve(1, 256)
    nn.shard_rules(model, rules(model, devices), devices)
    Tensor.realize(*model.parameters(), *model.buffers())
    writer = Writer(model, 256)
    tokens = [writer.start(told["ids"])]
    while len(tokens) < 12:
        tokens.append(writer.write(tokens[-1]))
    assert tokens == told["tokens"][:12]


def test_text_becomes_the_tokens_of_transformers(loaded: Any) -> None:
    _, tokenizer = loaded
    for told in GOLDEN["texts"]:
        assert tokenizer.encode(told["text"]) == told["ids"], told["text"]
        assert tokenizer.inner.decode(told["ids"], skip_special_tokens=False) == told["text"]
