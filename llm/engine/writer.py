"""Text after text: the prompt in blocks, then a token a step, each a replay of what was captured once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manygrad import Tensor, TinyJit, Variable, nn
from manygrad.llm.model import Decoder
from manygrad.llm.positions import bound

BLOCKS = (512, 256, 32)  # tokens of the prompt at once: the first size that fits, the last one filled up


def blocks(count: int) -> Iterator[tuple[int, int]]:
    """`count` tokens as (begin, size of the block)."""
    at = 0
    while at < count:
        size = next((b for b in BLOCKS if b <= count - at), BLOCKS[-1])
        yield at, size
        at += size


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen (`nn.sample`): those that are None do not take part."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int = 0

    def check(self) -> None:
        """ValueError of what is out of range."""
        penalised = None if self.repetition_penalty is None else Tensor.full((1, 1), -1)
        nn.sample(Tensor.zeros(1, 1), **vars(self), history=penalised)


class Writer:
    """One text with a model whose KV cache (`Decoder.reserve`) has `length` tokens, a multiple of the last `BLOCKS`."""

    def __init__(self, model: Decoder, length: int, choice: SamplingParams = SamplingParams()):
        choice.check()
        self.model, self.length = model, length
        self.device = model.norm.weight.device
        self.steps = {size: TinyJit(self._step, warmup=0) for size in (*BLOCKS, 1)}
        # tensors, so that one capture serves all their values
        given = {k: v for k, v in vars(choice).items() if v is not None and not (k == "temperature" and v == 0)}
        self.choice = {k: Tensor(np.array(v)).to(self.device) for k, v in given.items()}
        self.history = self._none(choice, length)
        if self.history is not None:
            self.history = self.history.to(self.device).contiguous().realize()

    @staticmethod
    def _none(choice: SamplingParams, length: int) -> Tensor | None:
        """The tokens so far, none: (1, length), −1 where there is none; only a penalty needs them."""
        return None if choice.repetition_penalty is None else Tensor.full((1, length), -1)

    def _step(self, tokens: Tensor, position: Any, last: Any, begin: Any, choice: dict[str, Tensor]) -> Tensor:
        """(1, t) tokens at `position` -> (1, 1), the token that follows number `last` of them."""
        if self.history is not None:
            read = tokens.arange(tokens.shape[1]) <= last
            self.history[:, position : position + tokens.shape[1]] = read.where(tokens, -1)
        logits = self.model(tokens, position, last, begin)
        settings: dict[str, Any] = {"temperature": 0, **choice}
        found = nn.sample(logits, **settings, history=self.history, draw=position + last)
        return found.unsqueeze(-1).cast(tokens.dtype)

    def _next(self, tokens: Tensor, position: int, last: int) -> int:
        size = tokens.shape[1]
        unit = BLOCKS[-1] if size > 1 else 1  # (whole groups of keys, which a processor may add up at once)
        at, begin = bound(position, unit, self.length - size, self.model.config.window, str(size))
        until = Variable(f"last{size}", 0, size - 1).bind(last)
        with Tensor.no_grad():
            made = self.steps[size](tokens, at, until, begin, self.choice)
        token = int(made.item())
        self.made = token, made
        return token

    def _there(self, tokens: list[int]) -> Tensor:
        return Tensor(np.array([tokens])).to(self.device)

    def start(self, prompt: Sequence[int]) -> int:
        """Reads the prompt; the token that follows it."""
        if not prompt:
            raise ValueError("the prompt is empty: a model goes on from at least one token")
        if len(prompt) > self.length:
            raise ValueError(f"the prompt has {len(prompt)} tokens, there is room for {self.length}")
        if self.history is not None:
            self.history.assign(self.history.full_like(-1))
        for at, size in blocks(len(prompt)):
            part = list(prompt[at : at + size])
            # what fills up is overwritten before it is read
            token = self._next(self._there(part + [0] * (size - len(part))), at, len(part) - 1)
        self.position = len(prompt)
        return token

    def write(self, token: int) -> int:
        """The token after `token`."""
        if self.position == self.length:
            raise ValueError(f"the KV cache of {self.length} tokens is full")
        made, there = self.made  # mostly it is the token that is asked for: then its tensor need not be made again
        token = self._next(there if token == made else self._there([token]), self.position, 0)
        self.position += 1
        return token
