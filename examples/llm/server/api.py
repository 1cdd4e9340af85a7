"""OpenAI's requests -> what is to be written (or embedded), or an `ApiError` that names the field."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from batch import Request
from server.errors import ApiError
from server.fields import Fields, kind
from tokenizer import Tokenizer
from writer import Choice

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
class Asked:
    """Texts to write. `chat`: the answer is a message."""

    chat: bool
    requests: tuple[Request, ...]
    stops: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False  # a stream ends with the number of tokens
    prompts: int = 0  # tokens of all prompts, each counted once


def writing(given: Mapping[str, Any], chat: bool, model: str, tokenizer: Tokenizer, room: int) -> Asked:
    """Of /v1/completions or /v1/chat/completions; `room`: tokens of a prompt and its text together."""
    f = Fields(given)
    _model(f, model)
    prompts = [_messages(f, tokenizer)] if chat else _prompts(f, tokenizer)
    n, longest = f.integer("n", 1, TEXTS, 1), max(map(len, prompts))
    for name, allowed in {**OFF, "best_of": (n,)}.items():
        f.only(name, *allowed)
    most = f.integer("max_tokens", 1, 2**31, None)
    most = f.integer("max_completion_tokens", 1, 2**31, most) if chat else most
    tokens = most if most is not None else max(room - longest, 1) if chat else 16
    if longest + tokens > room:
        told = f"the prompt's {longest} tokens and {tokens} more do not fit the room for {room}"
        name = "messages" if chat else "prompt"
        raise ApiError(400, f"{told}: a shorter prompt, or fewer max_tokens", name, "context_length_exceeded")
    choice = Choice(
        f.number("temperature", 0, 100, 1.0), f.integer("top_k", 0, 2**31), f.number("top_p", 0, 1, above=True),
        f.number("min_p", 0, 1), f.number("repetition_penalty", 0, 100, above=True),
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
    return Asked(chat, tuple(requests), stops, stream, usage, sum(map(len, prompts)))


def _model(f: Fields, name: str) -> None:
    asked = f.text("model", name)
    if asked != name:
        raise ApiError(404, f"there is no model {asked[:64]!r} here, but {name!r}", "model", "model_not_found")


def _prompts(f: Fields, tokenizer: Tokenizer) -> list[list[int]]:
    """A text, a list of texts, a list of token numbers, or a list of such lists."""
    x = f.take("prompt")
    rows = x if isinstance(x, list) and not (x and all(type(i) is int for i in x)) else [x]
    if not rows or len(rows) > TEXTS:
        raise f.wrong("prompt", f"one to {TEXTS} prompts are expected, not {len(rows)}")
    return [_ids(f, row, tokenizer) for row in rows]


def _ids(f: Fields, x: Any, tokenizer: Tokenizer) -> list[int]:
    if isinstance(x, str):
        ids = tokenizer.encode(f.unicode("prompt", x))
    elif isinstance(x, list) and all(type(i) is int for i in x):
        ids, size = x, tokenizer.inner.get_vocab_size()
        if not all(0 <= i < size for i in ids):
            raise f.wrong("prompt", f"token numbers are 0 to {size - 1}")
    else:
        raise f.wrong("prompt", f"a text or a list of token numbers is expected, not {kind(x)}")
    if not ids:
        raise f.wrong("prompt", "it is empty: a model goes on from at least one token")
    return ids


def _messages(f: Fields, tokenizer: Tokenizer) -> list[int]:
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
        m.only("refusal")
        m.done()
    try:
        return tokenizer.chat(messages)
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


def embedding(given: Mapping[str, Any], model: str) -> tuple[list[str], bool]:
    """Of /v1/embeddings: (texts, whether vectors are wanted as base64)."""
    f = Fields(given)
    _model(f, model)
    x = f.take("input")
    texts = [x] if isinstance(x, str) else x
    if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts) or not texts:
        raise f.wrong("input", "a text, or a list of texts, none of them empty, is expected")
    if len(texts) > INPUTS:
        raise f.wrong("input", f"{len(texts)} texts; {INPUTS} at most")
    coding = f.text("encoding_format", "float")
    if coding not in ("float", "base64"):
        raise f.wrong("encoding_format", "float or base64 is expected")
    f.only("dimensions")
    for name in IGNORED:
        f.take(name)
    f.done()
    return [f.unicode("input", t) for t in texts], coding == "base64"
