"""The API of manygrad.llm, as docs and examples use it."""

from __future__ import annotations

from pathlib import Path

import pytest

from manygrad.llm import Embedder, SamplingParams, TextModel
from tests.end_to_end.llm.tiny import write_model


def test_texts_one_after_the_other(tmp_path: Path) -> None:
    model = TextModel(str(write_model(tmp_path)))
    assert "".join(model.generate("abc", 12, ignore_end=True)) == "EysyYJfY"
    assert model.made == 12
    assert "".join(model.generate("abc", 12, ignore_end=True)) == "EysyYJfY", "what was written before is not seen"
    assert "".join(model.generate("abc", 12, stop=["YJ"], ignore_end=True)) == "Eysy"
    assert "".join(model.generate(model.encode("abc"), 64)) == "Eys"
    warm = ["".join(model.generate("abc", 8, SamplingParams(1.0, seed=s), ignore_end=True)) for s in (1, 1, 2)]
    assert warm[0] == warm[1] != warm[2]


def test_mistakes_are_told_at_the_call(tmp_path: Path) -> None:
    model = TextModel(str(write_model(tmp_path, context=1024)))
    with pytest.raises(ValueError, match="the prompt is empty"):
        model.generate([])
    model.reserve(200)
    with pytest.raises(ValueError, match=r"\d+ tokens do not fit the \d+ that reserve\(\) made room for"):
        model.generate("abc", 500)
    with pytest.raises(ValueError, match="temperature"):
        model.generate("abc", 4, SamplingParams(temperature=-1))
    with pytest.raises(ValueError, match="there is no file or folder 'nowhere'"):
        TextModel("nowhere")


def test_vectors(minilm: str) -> None:
    vectors = Embedder.load(minilm)(["A cat sits.", "A kitten is sitting.", "Shares fell."])
    assert vectors.shape == (3, 384) and vectors[0] @ vectors[1] > 0.7 > 0.3 > vectors[0] @ vectors[2]
