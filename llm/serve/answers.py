"""The text that was written, in OpenAI's words: whole answers and the events of a stream."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

import numpy as np

MARK = "the text of an event stands here"


@dataclass
class Answer:
    """The head that all parts of one answer share."""

    key: str
    model: str
    chat: bool
    created: int = field(default_factory=lambda: int(time.time()))
    around: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # what stands around a text in its events

    def _head(self, part: bool) -> dict[str, Any]:
        name = ("chat.completion" + ".chunk" * part) if self.chat else "text_completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.key}", "object": name, "created": self.created, "model": self.model}

    def whole(self, texts: Sequence[str], reasons: Sequence[str], usage: dict[str, int]) -> dict[str, Any]:
        choices = []
        for i, (text, reason) in enumerate(zip(texts, reasons)):
            said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
            choices.append({"index": i, **said, "logprobs": None, "finish_reason": reason})
        return {**self._head(False), "choices": choices, "usage": usage}

    def first(self, index: int) -> dict[str, Any]:
        """A chat's stream begins with who speaks."""
        return self._part(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def piece(self, index: int, text: str, reason: str = "") -> dict[str, Any]:
        said: dict[str, Any] = {"delta": {"content": text} if text else {}} if self.chat else {"text": text}
        return self._part(index, said, reason or None)

    def _part(self, index: int, said: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, **said, "logprobs": None, "finish_reason": reason}
        return {**self._head(True), "choices": [choice]}

    def event(self, index: int, text: str, reason: str = "") -> bytes:
        """`piece` as an event: of a text that goes on nothing but the text itself is made anew."""
        if reason or not text:
            return event(self.piece(index, text, reason))
        if index not in self.around:
            before, _, after = event(self.piece(index, MARK)).rpartition(f'"{MARK}"'.encode())
            self.around[index] = before, after
        before, after = self.around[index]
        return before + encode_basestring(text).encode() + after

    def last(self, usage: dict[str, int]) -> dict[str, Any]:
        return {**self._head(True), "choices": [], "usage": usage}


def usage(prompt: int, written: int | None = None) -> dict[str, int]:
    """Tokens that were read and written; None: none can be (vectors)."""
    found = {"prompt_tokens": prompt, "total_tokens": prompt + (written or 0)}
    return found if written is None else {**found, "completion_tokens": written}


def vectors(found: Sequence[np.ndarray], model: str, tokens: int, coded: bool) -> dict[str, Any]:
    """Rows (texts, dim) float32 as numbers or as base64 of their little-endian bytes."""
    rows = [base64.b64encode(r.astype("<f4").tobytes()).decode() if coded else r.tolist() for r in found]
    data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
    return {"object": "list", "data": data, "model": model, "usage": usage(tokens)}


def models(names: Sequence[str], created: int) -> dict[str, Any]:
    return {"object": "list", "data": [model(name, created) for name in names]}


def model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "manygrad"}


def event(data: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
