"""Pieces of text as they become certain: characters of several tokens, at a prompt's end as well, and stop strings."""

from __future__ import annotations

import pytest

from manygrad.llm.stream import TextStream
from manygrad.llm.tokenizer import Tokenizer, from_folder
from tests.end_to_end.llm.tiny import write_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Each byte is a token."""
    found = from_folder(write_model(tmp_path_factory.mktemp("model")))
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Inner(models.BPE({c: i for i, c in enumerate(letters)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return Tokenizer(inner, found.ends)


TEXT = "na\u00efve caf\u00e9 \u2603 \U0001f600\U0001f600, \ufffd and on it goes " + "\u00e9" * 10


@pytest.mark.parametrize("cut", range(60))
def test_a_text_goes_on_from_anywhere_in_it(tokenizer: Tokenizer, cut: int) -> None:
    ids = tokenizer.encode(TEXT)
    stream = TextStream(tokenizer, prompt=ids[:cut])
    said = "".join(map(stream.add, ids[cut:])) + stream.end()
    whole = tokenizer.decode(ids[:cut]).rstrip("\ufffd") if cut < len(ids) else TEXT
    # (the character that the prompt ends in belongs to what is said)
    assert said == TEXT[len(whole) :] or (TEXT.startswith(whole + "\ufffd") and said == TEXT[len(whole) + 1 :])


def test_a_text_that_ends_inside_a_character_says_so(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\u2603")
    stream = TextStream(tokenizer)
    assert [*map(stream.add, ids[:-1]), stream.end()] == ["a", "", "", "\ufffd"]


def test_what_may_become_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["\u00e9x"])
    assert [stream.add(i) for i in tokenizer.encode("a\u00e9b\u00e9xc")[:-1]] == ["a", "", "", "\u00e9b", "", "", ""]
    assert stream.stopped
