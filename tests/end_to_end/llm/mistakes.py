"""Requests with one mistake each."""

from __future__ import annotations

import json
import random
from typing import Any


def mutated(draw: random.Random) -> tuple[str, bytes]:
    """(path, body) of a request with one mistake."""
    chat = draw.random() < 0.5
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "temperature": 0.5, "stop": ["x"]}
    body |= {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "abc"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    odd = [[], {}, [[]], "\ud800", -1, 1e300, 2**70, True, "", [None], {"a": {}}, 0.5]
    kind = draw.randrange(5)
    if kind == 0:  # a field of another kind
        name = draw.choice(["messages" if chat else "prompt", "seed", "n", "top_p", "logit_bias", "stream_options"])
        wrong = {"n": [0, -1, 1e9, "1", 99], "seed": ["a", 0.5, [], 2**70], "top_p": [0, 2, "x", [], {}],
                 "logit_bias": [{"1": 2}, 1], "stream_options": [1, "x", {"a": 1}]}  # fmt: skip
        body[name] = draw.choice(wrong.get(name, [x for x in odd if x not in ([0], "abc")]))
    elif kind == 1:  # one that is not known
        body[draw.choice(["tempereture", "", "x" * 500, "__class__", "tools ", "logits"])] = draw.choice(odd)
    elif kind == 2:  # one that is missing, or of a model that is not there
        name = draw.choice(["messages" if chat else "prompt", "model"])
        body.pop(name)
        body |= {"model": draw.choice(["", "gpt-4", "\ud800"])} if name == "model" else {}
    elif kind == 3 and chat:
        wrong = [
            {},
            {"role": "user"},
            {"role": "king", "content": "a"},
            {"role": "user", "content": 1},
            "a",
            None,
            {"role": "user", "content": [{"type": "image"}]},
            {"role": "user", "content": "a", "x": 1},
        ]
        body["messages"].insert(draw.randrange(2), draw.choice(wrong))
    elif kind == 3:
        body["prompt"] = draw.choice([[61], [-1], ["a", 1], [["a"]], [[]], {"a": 1}, "a" * 66000, [3] * 65536, [1.5]])
    text = json.dumps(body).encode()
    if kind == 4:  # broken on the way
        at = draw.randrange(1, len(text) - 1)
        text = draw.choice([text[:at], text[:at] + b"\xff" + text[at:], b"[" * at, b"9" * 5000, text + b"}", b"", b"1"])
    return path, text
