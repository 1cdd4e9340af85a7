"""The steps of many texts at once: a block of one text's prompt, a token for each of several, and what is drawn
from their logits, each a replay of what was captured once.

Keys and values stand in pages (`pages.py`), and which ones are whose is an input of a step, a row of numbers a text. A
step computes n texts, n a power of two, so there are few captures, whatever texts come and go.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from manygrad import Tensor, TinyJit, Variable, nn
from manygrad.llm.engine.writer import BLOCKS
from manygrad.llm.model import Decoder
from manygrad.llm.pages import NOBODY, PAGE, pages_of
from manygrad.llm.positions import Ends, PromptPart, bound

NEUTRAL = {  # of a slot whose text has no such setting, beside others that have
    "temperature": 0.0, "top_k": 0, "top_p": math.inf, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0,
}  # fmt: skip
FILTERS = frozenset({"top_k", "top_p", "min_p"})
PENALTY = ("repetition_penalty",)
KINDS = ((), ("temperature", "seed"), ("temperature", "seed", *FILTERS))  # each with and without a penalty


class Steps:
    def __init__(self, model: Decoder, slots: int, length: int):
        """`model` has reserved pages for up to `slots` texts at once of `length` tokens at most."""
        self.model, self.slots, self.length, self.most = model, slots, length, pages_of(length)
        window = model.config.window
        self.near = self.most if window is None else 1 + pages_of(window - 1)  # pages that it may show a token
        self.window = window if self.near < self.most else None  # where it hides any
        self.pages = model.layers[0].self_attn.cache.values.shape[1] - 1  # (without NOBODY's)
        self.device = model.norm.weight.device
        # what stands in the pages, for penalties
        self.history = self._put(np.zeros((1 + self.pages, PAGE), np.int64)).contiguous().realize()
        self.blocks: dict[int, TinyJit[Tensor]] = {}  # by size
        self.ends: dict[int, TinyJit[Tensor]] = {}  # by the number of texts
        self.draws: dict[tuple[int, tuple[str, ...]], TinyJit[Tensor]] = {}  # by the same, and by the settings

    def _put(self, values: np.ndarray) -> Tensor:
        return Tensor(values).to(self.device)

    def block(self, pages: np.ndarray, tokens: Sequence[int], position: int, last: int) -> Tensor:
        """Reads tokens of the text with these `pages` (most,) from `position` on, where one begins; the logits
        (1, vocabulary) after number `last` of them."""
        size = len(tokens)
        at, begin = bound(position, PAGE, self.length - size, self.window, str(size))
        until = Variable(f"last{size}", 0, size - 1).bind(last)
        step = self.blocks.setdefault(size, TinyJit(self._block, warmup=0))
        with Tensor.no_grad():
            return step(self._put(np.array([tokens])), self._put(pages.copy()), at, begin, until)

    def _block(self, tokens: Tensor, pages: Tensor, position: Any, begin: Any, last: Any) -> Tensor:
        part = PromptPart(tokens.shape[1], position, begin, PAGE, self._there(pages))
        self.history[part.here] = tokens.reshape(-1, PAGE)
        return self.model.at(tokens, part, last)

    def _there(self, pages: Tensor) -> Tensor:
        """(Nothing to check then; made once, not by every kernel that looks there.)"""
        return pages.clip(0, self.pages).contiguous()

    def step(self, tokens: np.ndarray, positions: np.ndarray, pages: np.ndarray) -> Tensor:
        """A token each of n texts at its position, with the `pages` (n, most) -> logits (n, vocabulary)."""
        count = Variable("pages", 1, self.most).bind(int(positions.max()) // PAGE + 1)
        step = self.ends.setdefault(len(tokens), TinyJit(self._step, warmup=0))
        row = np.arange(len(tokens))
        given = [tokens, positions, pages[row, positions // PAGE], pages]
        near = None
        if self.window is not None:
            first = np.maximum(positions - self.window + 1, 0) // PAGE
            near = Variable("near", 1, self.near).bind(int((positions // PAGE - first).max()) + 1)
            shown = np.minimum(first[:, None] + np.arange(self.near), self.most - 1)  # (what is beyond is hidden)
            given += [pages[row[:, None], shown], first]
        with Tensor.no_grad():
            return step(self._put(np.column_stack(given).astype(np.int32)), count, near)

    def _step(self, given: Tensor, count: Any, near: Any) -> Tensor:
        tokens, positions, pages = given[:, 0], given[:, 1].clip(0, self.length - 1), self._there(given[:, 2:])
        table, rest = pages[:, 1 : 1 + self.most], pages[:, 1 + self.most :]
        shown = (rest[:, :near], given[:, -1:], self.near) if self.window is not None else None
        ends = Ends(positions, pages[:, 0], table[:, :count], self.most, shown)
        self.history[ends.here, positions % PAGE] = tokens
        return self.model.at(tokens.unsqueeze(1), ends, 0)

    def settings(self, choices: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
        """Settings of a row each (those of `Choice`, without None), in as few combinations as serve all of them."""
        used: set[str] = set()
        for c in choices:
            drawn = c.get("temperature", 0) > 0  # (what filters leave, the likeliest is among it)
            names = KINDS[2] if drawn and FILTERS & c.keys() else KINDS[1] if drawn else ()
            used |= {*names, *(PENALTY if c.get("repetition_penalty", 1) != 1 else ())}
        return self._settings(choices, used)

    def _settings(self, choices: Sequence[Mapping[str, float]], names: Collection[str]) -> dict[str, Tensor]:
        return {
            name: self._put(np.array([c.get(name, NEUTRAL[name]) for c in choices], kind_of(name)))
            for name in sorted(names)
        }

    def draw(
        self, logits: Tensor, pages: np.ndarray, settings: Mapping[str, Tensor], positions: np.ndarray
    ) -> list[int]:
        """A token each of n texts with the `pages` (n, most), whose last tokens stand at `positions`."""
        step = self.draws.setdefault((len(positions), tuple(settings)), TinyJit(self._draw, warmup=0))
        with_pages = [self._put(pages)] if PENALTY[0] in settings else []
        with Tensor.no_grad():
            return step(logits, dict(settings), self._put(positions), *with_pages).tolist()

    def _draw(
        self, logits: Tensor, settings: dict[str, Tensor], positions: Tensor, pages: Tensor | None = None
    ) -> Tensor:
        history = None
        if pages is not None:
            so_far = positions.arange(self.most * PAGE) <= positions.unsqueeze(1)
            history = so_far.where(self.history[self._there(pages)].flatten(1), -1)
        given: dict[str, Any] = {"temperature": 0, "seed": 0, **settings}
        return nn.sample(logits, **given, history=history, draw=positions)

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Captures all that there is for these numbers of texts, so that no text waits for it."""
        pages = np.full((self.slots, self.most), NOBODY, np.int32)
        for size in BLOCKS:
            if size <= self.length:
                self.block(pages[0], [0] * size, 0, 0)
        for n in sizes:
            positions = np.zeros(n, np.int64)
            logits = self.step(positions, positions, pages[:n])
            for names in (*KINDS, *((*kind, *PENALTY) for kind in KINDS)):
                self.draw(logits, pages[:n], self._settings([{}] * n, names), positions)


def kind_of(name: str) -> type:
    return np.int64 if name in ("top_k", "seed") else np.float32
