"""OpenAI's requests -> what is to be written (or embedded), or an `ApiError` that names the field."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from manygrad.llm.embedder import Text
from manygrad.llm.engine.batch import Request
from manygrad.llm.engine.writer import SamplingParams
from manygrad.llm.serve.errors import ApiError
from manygrad.llm.serve.fields import Fields, kind
from manygrad.llm.tokenizer import Tokenizer

IGNORED = ("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")  # change no text
OFF: Mapping[str, tuple[Any, ...]] = {  # what this server does not do, and how that is said
    "frequency_penalty": (0, 0.0), "presence_penalty": (0, 0.0), "logit_bias": ({},), "logprobs": (False,),
    "top_logprobs": (0,), "echo": (False,), "suffix": ("",), "response_format": ({"type": "text"},), "tools": ([],),
    "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False), "functions": ([],),
    "function_call": ("none",), "modalities": (["text"],), "reasoning_effort": ("none",),
}  # fmt: skip
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXTS = 16  # at most of one request: prompts times n
STOPS = 16
INPUTS = 2048  # texts of one request for vectors
WORD = 2**32


@dataclass(frozen=True)
class ApiRequest:
    """Texts to write. `chat`: the answer is a message."""

    chat: bool
    requests: tuple[Request, ...]
    stops: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False  # a stream ends with the number of tokens
    prompts: int = 0  # tokens of all prompts, each counted once


def writing(given: Mapping[str, Any], chat: bool, model: str, tokenizer: Tokenizer, max_model_len: int) -> ApiRequest:
    """Request to /v1/completions or /v1/chat/completions; `max_model_len`: tokens of a prompt and its text together."""
    f = Fields(given)
    _model(f, model)
    prompts = [_messages(f, tokenizer, max_model_len)] if chat else _prompts(f, tokenizer, max_model_len)
    n, longest = f.integer("n", 1, TEXTS, 1), max(map(len, prompts))
    for name, allowed in {**OFF, "best_of": (n,)}.items():
        f.only(name, *allowed)
    most = f.integer("max_tokens", 1, 2**31, None)
    most = f.integer("max_completion_tokens", 1, 2**31, most) if chat else most
    tokens = most if most is not None else max(max_model_len - longest, 1) if chat else 16
    if longest + tokens > max_model_len:
        count = longest if longest <= max_model_len else f"more than {max_model_len}"
        told = f"the prompt's {count} tokens and {tokens} more do not fit the context of {max_model_len}"
        name = "messages" if chat else "prompt"
        raise ApiError(400, f"{told}: a shorter prompt, or fewer max_tokens", name, "context_length_exceeded")
    top_k, top_p = f.integer("top_k", -1, 2**31), f.number("top_p", 0, 1)
    top_k = None if top_k in (-1, 0) else top_k  # (both are said for: all)
    top_k, top_p = (1, None) if top_p == 0 else (top_k, top_p)  # (the fewest that have any share: the likeliest)
    choice = SamplingParams(
        f.number("temperature", 0, 100, 1.0), top_k, top_p, f.number("min_p", 0, 1),
        f.number("repetition_penalty", 0, 100, above=True),
        f.integer("seed", -(2**63), 2**63 - 1, secrets.randbelow(WORD)),
    )  # fmt: skip
    stream, end, stops = f.flag("stream"), f.flag("ignore_eos"), _stops(f)
    options = f.inner("stream_options")
    usage = options.flag("include_usage")
    options.take("include_obfuscation")
    options.done()
    for name in IGNORED:
        f.take(name)
    f.done()
    if len(prompts) * n > TEXTS:
        raise f.wrong("n", f"{len(prompts)} prompts times {n} are more than {TEXTS} texts")
    requests = [
        Request(tuple(ids), tokens, replace(choice, seed=(choice.seed + i) % WORD), end)
        for ids in prompts
        for i in range(n)
    ]
    return ApiRequest(chat, tuple(requests), stops, stream, usage, sum(map(len, prompts)))


def _model(f: Fields, name: str) -> None:
    asked = f.text("model", name)
    if asked != name:
        raise ApiError(404, f"there is no model {asked[:64]!r} here, but {name!r}", "model", "model_not_found")


def _prompts(f: Fields, tokenizer: Tokenizer, max_model_len: int) -> list[list[int]]:
    """The tokens of each."""
    found = _texts(f, "prompt", TEXTS, tokenizer)
    prompts = [tokenizer.encode(x, max_model_len) if isinstance(x, str) else list(x) for x in found]
    if not all(prompts):
        raise f.wrong("prompt", "it is empty: a model goes on from at least one token")
    return prompts


def _texts(f: Fields, name: str, most: int, tokenizer: Tokenizer) -> list[Text]:
    """A text, a list of texts, a list of token numbers, or a list of such lists: one to `most`."""
    x = f.take(name)
    rows = x if isinstance(x, list) and not (x and all(type(i) is int for i in x)) else [x]
    if not rows or len(rows) > most:
        raise f.wrong(name, f"one to {most} texts are expected, not {len(rows)}")
    return [_text(f, name, row, tokenizer) for row in rows]


def _text(f: Fields, name: str, x: Any, tokenizer: Tokenizer) -> Text:
    if isinstance(x, str):
        return f.unicode(name, x)
    if not isinstance(x, list) or not all(type(i) is int for i in x):
        raise f.wrong(name, f"a text or a list of token numbers is expected, not {kind(x)}")
    size = tokenizer.inner.get_vocab_size()
    if not all(0 <= i < size for i in x):
        raise f.wrong(name, f"token numbers are 0 to {size - 1}")
    return tuple(x)


def _messages(f: Fields, tokenizer: Tokenizer, max_model_len: int) -> list[int]:
    x = f.take("messages")
    if not isinstance(x, list) or not x:
        raise f.wrong("messages", "a list of messages is expected")
    messages = []
    for i, message in enumerate(x):
        if not isinstance(message, dict):
            raise f.wrong(f"messages[{i}]", f"an object is expected, not {kind(message)}")
        m = Fields(message, f"messages[{i}].")
        role = m.text("role")
        if role not in ROLES:
            raise m.wrong("role", f"one of {', '.join(ROLES)} is expected")
        messages.append({"role": ROLES[role], "content": _content(m)})
        m.take("name")
        m.take("annotations")  # (of an answer that is sent back, as are:)
        m.only("tool_calls", [])
        m.done()
    try:
        return tokenizer.chat(messages, max_model_len)
    except Exception as error:  # whatever the model's own template makes of these messages
        raise f.wrong("messages", str(error)[:200]) from None


def _content(m: Fields) -> str:
    """A text, or a list of parts that are texts."""
    x = m.take("content")
    if not isinstance(x, list):
        return m.text("content")
    texts = []
    for i, part in enumerate(x):
        p = Fields(part if isinstance(part, dict) else {}, f"{m.where}content[{i}].")
        if p.take("type") != "text":
            raise p.wrong("type", "this model reads texts only")
        texts.append(p.text("text"))
        p.done()
    return "".join(texts)


def _stops(f: Fields) -> tuple[str, ...]:
    x = f.take("stop")
    found = [] if x is None else [x] if isinstance(x, str) else x
    if not isinstance(found, list) or len(found) > STOPS or not all(isinstance(s, str) and s for s in found):
        raise f.wrong("stop", f"a text, or up to {STOPS} of them, none of them empty, is expected")
    return tuple(f.unicode("stop", s) for s in found)


def embedding(
    given: Mapping[str, Any], model: str, tokenizer: Tokenizer, max_model_len: int
) -> tuple[list[tuple[int, ...]], bool]:
    """Request to /v1/embeddings: (the tokens of texts, each at most `max_model_len`; whether vectors are to be
    base64)."""
    f = Fields(given)
    _model(f, model)
    texts = _texts(f, "input", INPUTS, tokenizer)
    if not all(texts):
        raise f.wrong("input", "a text is empty")
    coding = f.text("encoding_format", "float")
    if coding not in ("float", "base64"):
        raise f.wrong("encoding_format", "float or base64 is expected")
    f.only("dimensions")
    for name in IGNORED:
        f.take(name)
    f.done()
    encoded = iter(tokenizer.encode_all([t for t in texts if isinstance(t, str)], max_model_len))
    found = [tuple(next(encoded)) if isinstance(t, str) else t for t in texts]
    longer = [i for i, ids in enumerate(found) if len(ids) > max_model_len]
    if longer:
        raise ApiError(
            400, f"input[{longer[0]}] has more than the model's {max_model_len} tokens: make vectors of its parts",
            "input", "context_length_exceeded",
        )  # fmt: skip
    return found, coding == "base64"
