"""OpenAI's requests as clients send them: what is taken, as what, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from manygrad.llm.serve import api
from manygrad.llm.serve.errors import ApiError
from manygrad.llm.tokenizer import Tokenizer, from_folder
from tests.end_to_end.llm.tiny import write_model

CONTEXT = 64


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return from_folder(write_model(tmp_path_factory.mktemp("model")))


def asked(tokenizer: Tokenizer, chat: bool = False, **given: Any) -> api.ApiRequest:
    start = {"messages": [{"role": "user", "content": "ab"}]} if chat else {"prompt": "ab"}
    return api.writing({**start, "max_tokens": 2, **given}, chat, "tiny", tokenizer, CONTEXT)


# what OpenAI's client makes of an answer that is sent back: `answer.choices[0].message.model_dump()`
DUMPED = {
    "content": "c", "refusal": None, "role": "assistant", "annotations": None, "audio": None, "function_call": None,
    "tool_calls": None, "reasoning_content": None,
}  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"annotations": []}, {"tool_calls": []}])
def test_messages_as_a_client_dumps_them(tokenizer: Tokenizer, more: dict[str, Any]) -> None:
    said = {"role": "user", "content": "ab", "name": None}
    (request,) = asked(tokenizer, True, messages=[said, {**DUMPED, **more}, {**said, "name": "x"}]).requests
    assert tokenizer.decode(request.ids) == "uabacuab"


def test_fields_that_are_null_are_not_given(tokenizer: Tokenizer) -> None:
    fields = (
        "temperature",
        "n",
        "stop",
        "seed",
        "logprobs",
        "tools",
        "functions",
        "stream_options",
        "of a later version",
    )
    assert len(asked(tokenizer, **dict.fromkeys(fields)).requests) == 1
    with pytest.raises(ApiError, match="of a later version: this server knows no such field"):
        asked(tokenizer, **{"of a later version": 0})
    with pytest.raises(ApiError, match=r"messages\[0\].tool_calls: this server does not do that"):
        asked(tokenizer, True, messages=[{**DUMPED, "tool_calls": [{"id": "1"}]}])


@pytest.mark.parametrize(
    "given, want",
    [
        ({}, (None, None)),
        ({"top_k": -1}, (None, None)),
        ({"top_k": 0}, (None, None)),
        ({"top_k": 5, "top_p": 0.5}, (5, 0.5)),
        ({"top_p": 1}, (None, 1.0)),
        ({"top_p": 0}, (1, None)),  # the fewest tokens that have any share: the likeliest
        ({"top_p": 0.0, "top_k": 9}, (1, None)),
    ],
)
def test_top_k_and_top_p(tokenizer: Tokenizer, given: dict[str, Any], want: tuple[Any, Any]) -> None:
    choice = asked(tokenizer, **given).requests[0].choice
    assert (choice.top_k, choice.top_p) == want


@pytest.mark.parametrize("given", [{"top_k": -2}, {"top_p": -0.1}, {"top_p": 1.1}])
def test_top_k_and_top_p_out_of_range(tokenizer: Tokenizer, given: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="lies outside"):
        asked(tokenizer, **given)


def test_long_prompts_are_refused_before_all_of_them_is_tokens(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters: list[int] = []
    inner = tokenizer.inner

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def encode(self, text: str, **how: Any) -> Any:
            letters.append(len(text))
            return inner.encode(text, **how)

        def encode_batch(self, texts: list[str]) -> Any:
            letters.extend(map(len, texts))
            return inner.encode_batch(texts)

    counting = Tokenizer(Counting(), tokenizer.ends, template=tokenizer.template)  # type: ignore[arg-type]
    long = "a" * 1_000_000
    for chat, given in ((False, {"prompt": long}), (True, {"messages": [{"role": "user", "content": long}]})):
        with pytest.raises(ApiError, match="the prompt's more than 64 tokens and 2 more do not fit") as refused:
            asked(counting, chat, **given)
        assert refused.value.code == "context_length_exceeded"
    with pytest.raises(ApiError, match=r"input\[1\] has more than the model's 64 tokens"):
        api.embedding({"input": ["ab", long]}, "tiny", counting, CONTEXT)
    assert sum(letters) < 20_000
    with pytest.raises(ApiError, match="the prompt's 63 tokens and 2 more do not fit the context of 64"):
        asked(tokenizer, prompt="a" * 63)


def test_texts_longer_than_the_encoder_takes_are_refused(tokenizer: Tokenizer) -> None:
    given = {"input": ["ab", "a" * 64, [3] * 64]}
    rows, coded = api.embedding(given, "tiny", tokenizer, CONTEXT)
    assert [len(r) for r in rows] == [2, 64, 64] and rows[2] == (3,) * 64 and not coded
    for bad in (["a" * 65], [[3] * 65], [3] * 65):
        with pytest.raises(ApiError, match=r"input\[0\] has more than the model's 64 tokens") as refused:
            api.embedding({"input": bad}, "tiny", tokenizer, CONTEXT)
        assert (refused.value.status, refused.value.param) == (400, "input")


def test_a_long_text_has_the_tokens_that_it_has(smollm2: str) -> None:
    from manygrad.llm.load import load

    tokenizer = load(smollm2)[1]
    text = "It was the best of times, it was the worst of times. " * 400
    assert tokenizer.encode(text, 10_000) == tokenizer.encode(text) == tokenizer.encode_all([text], 10_000)[0]
    began = time.perf_counter()
    assert len(tokenizer.encode(text * 100, 1024)) > 1024
    assert time.perf_counter() - began < 1


def test_the_tokenizer_of_a_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.encode("abc", 2) == tokenizer.encode("abc") == [3, 4, 5]
