"""The texts of one request while they are written: from tokens to pieces of text with the reason for their end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from manygrad.llm.engine.batch import SampledToken
from manygrad.llm.serve.api import ApiRequest
from manygrad.llm.serve.errors import ApiError
from manygrad.llm.serve.metrics import Metrics
from manygrad.llm.serve.scheduler import Scheduler
from manygrad.llm.stream import TextStream
from manygrad.llm.tokenizer import Tokenizer


@dataclass(frozen=True)
class CompletionPiece:
    index: int  # of the text
    text: str
    reason: str = ""  # why it ends: "stop" or "length"


class Completion:
    """`async for piece in writing`; whoever stops before the end calls `leave`. `written` counts tokens."""

    def __init__(self, asked: ApiRequest, scheduler: Scheduler, tokenizer: Tokenizer, metrics: Metrics, limit_s: float):
        self.asked, self.scheduler, self.metrics = asked, scheduler, metrics
        self.began = time.monotonic()
        self.keys, self.out = scheduler.submit(asked.requests)
        self.streams = {
            key: (i, TextStream(tokenizer, asked.stops, request.ids))
            for i, (key, request) in enumerate(zip(self.keys, asked.requests))
        }
        # one timer for all tokens; what it puts comes after those that are there already
        loop = asyncio.get_running_loop()
        self.late = loop.call_later(limit_s, self.out.put_nowait, (self.keys[0], too_late(limit_s)))
        self.last: dict[int, float] = {}  # when the last token of a text came
        self.written = 0
        metrics.prompt_tokens += asked.prompts

    def leave(self) -> None:
        self.late.cancel()
        self.scheduler.leave(list(self.streams))
        self.streams = {}

    async def __aiter__(self) -> AsyncIterator[CompletionPiece]:
        while self.streams:
            key, found = await self.out.get()
            if isinstance(found, ApiError):
                raise found
            if isinstance(found, SampledToken) and key in self.streams:
                piece = self._piece(key, found)
                if piece.text or piece.reason:
                    yield piece
        self.late.cancel()

    def _piece(self, key: int, made: SampledToken) -> CompletionPiece:
        now = time.monotonic()
        histogram = self.metrics.between if key in self.last else self.metrics.first
        histogram.add(now - self.last.get(key, self.began))
        self.last[key] = now
        self.written += 1
        self.metrics.written_tokens += 1
        index, stream = self.streams[key]
        reason = made.reason
        text = "" if reason == "stop" else stream.add(made.token)
        if stream.stopped:
            reason = "stop"
            self.scheduler.leave([key])
        elif reason:
            text += stream.end()
        if reason:
            del self.streams[key]
        return CompletionPiece(index, text, reason)


def too_late(limit_s: float) -> ApiError:
    return ApiError(408, f"the answer took longer than {limit_s:g} s; ask for fewer tokens", code="timeout")
