"""Many texts at once (continuous batching, Yu et al., Orca, OSDI 2022): texts come and go while others are written.

    batch = Batch(Steps(model, slots=16, length=1024), ends=tokenizer.ends)
    batch.admit(0, Request(prompt, tokens=64, choice=Choice(0.8, seed=7)))
    while batch.busy:
        for made in batch.step():
            print(made.key, made.token, made.reason)

A step reads one block of one prompt and then writes a token of each text whose prompt is read. What a text becomes does
not depend on the texts beside it. All that happens follows from the calls, so that workers that make the same calls
agree without a word.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from manygrad.llm.engine.steps import Steps
from manygrad.llm.engine.writer import SamplingParams, blocks
from manygrad.llm.pages import PAGE, Pages, pages_of

Key = Hashable
LIKELIEST = SamplingParams()


@dataclass(frozen=True)
class Request:
    ids: tuple[int, ...]  # the prompt
    tokens: int  # at most so many more
    choice: SamplingParams = LIKELIEST
    ignore_end: bool = False

    @property
    def pages(self) -> int:
        """That it needs at most: of all its tokens but the last one, which nothing reads."""
        return pages_of(len(self.ids) + self.tokens - 1)


@dataclass(frozen=True)
class SampledToken:
    """A token of the text `key`, and why the text ends with it: "" (it goes on), "stop" (the token is a mark of the
    end) or "length"."""

    key: Key
    token: int
    reason: str = ""


@dataclass
class Text:
    """The text in a slot."""

    key: Key
    request: Request
    number: int  # in the order of admission
    settings: dict[str, Any]
    position: int = 0  # tokens that stand in the slot
    made: int = 0
    token: int = 0  # the last one, not in the slot yet
    left: list[tuple[int, int]] = field(default_factory=list)  # blocks of the prompt, the next one last


class Batch:
    def __init__(self, steps: Steps, ends: Collection[int] = ()):
        self.steps, self.ends = steps, ends
        self.texts: list[Text | None] = [None] * steps.slots
        self.pages = Pages(steps.pages, steps.slots, steps.most)
        self.admitted = 0
        self.rows: tuple[Any, ...] = ()  # the numbers of the texts that `settings` are of
        self.settings: dict[str, Any] = {}

    def warm_up(self) -> None:
        """Compiles all there is to compile."""
        most = len(self.texts)
        self.steps.warm_up(sorted({rounded(n, most) for n in range(1, most + 1)}))

    @property
    def busy(self) -> int:
        """How many texts there are."""
        return sum(t is not None for t in self.texts)

    @property
    def free(self) -> int:
        return len(self.texts) - self.busy

    @property
    def most(self) -> int:
        """Tokens that a prompt and its text may have together."""
        return min(self.steps.length, self.steps.pages * PAGE)

    def check(self, request: Request) -> None:
        """ValueError if it does not fit, however long it waits."""
        if not request.ids:
            raise ValueError("the prompt is empty: a model goes on from at least one token")
        if request.tokens < 1:
            raise ValueError(f"{request.tokens} tokens were asked for: at least 1")
        if len(request.ids) + request.tokens > self.most:
            raise ValueError(
                f"the prompt's {len(request.ids)} tokens and {request.tokens} more do not fit the context of "
                f"{self.most}: a shorter prompt, or fewer tokens"
            )

    def admit(self, key: Key, request: Request) -> None:
        """Into the first slot that is free."""
        self.check(request)
        if not self.free:
            raise ValueError(f"all {len(self.texts)} slots are taken; wait for one, or make more")
        if request.pages > self.pages.unpromised:
            raise ValueError(f"it may need {request.pages} pages, and {self.pages.unpromised} are left; wait for them")
        given = {k: v for k, v in vars(request.choice).items() if v is not None}
        left = list(blocks(len(request.ids)))[::-1]
        slot = self.texts.index(None)
        self.texts[slot] = Text(key, request, self.admitted, given, left=left)
        self.pages.promise(slot, request.pages)
        self.admitted += 1

    def cancel(self, key: Key) -> None:
        """Frees the slot and the pages of a text; one that has ended already has none."""
        for slot, text in enumerate(self.texts):
            if text is not None and text.key == key:
                self.texts[slot] = None
                self.pages.give_back(slot)

    def step(self) -> list[SampledToken]:
        """The tokens that were written; the slots of texts that ended are free."""
        self._close_up()
        made = self._read()
        made += self._write()
        for end in made:
            if end.reason:
                self.cancel(end.key)
        return made

    def _read(self) -> list[SampledToken]:
        """A block of the prompt that came first."""
        waiting = [(t.number, slot, t) for slot, t in enumerate(self.texts) if t is not None and t.left]
        if not waiting:
            return []
        _, slot, text = min(waiting, key=lambda found: found[0])
        begin, size = text.left.pop()
        part = text.request.ids[begin : begin + size]
        text.position = begin + len(part)
        self.pages.grow(slot, text.position)
        row = self.pages.rows[slot]
        logits = self.steps.block(row, [*part, *[0] * (size - len(part))], begin, len(part) - 1)
        if text.left:
            return []
        positions = np.array([text.position - 1])
        (token,) = self.steps.draw(logits, row[None], self.steps.settings([text.settings]), positions)
        return [self._made(text, token)]

    def _write(self) -> list[SampledToken]:
        active = [slot for slot, t in enumerate(self.texts) if t is not None and t.made and not self._ended(t)]
        if not active:
            return []
        n = rounded(active[-1] + 1, len(self.texts))
        rows = self.texts[:n]
        for slot in active:
            text = self.texts[slot]
            assert text is not None
            self.pages.grow(slot, text.position + 1)
        # a slot that has nothing to write writes at its next place, which is written again before it is read, or
        # in nobody's page
        tokens = np.array([t.token if t is not None else 0 for t in rows])
        positions = np.array([t.position if t is not None else 0 for t in rows])
        writing = [t if slot in active else None for slot, t in enumerate(rows)]
        pages = self.pages.rows[:n]
        found = self.steps.draw(self.steps.step(tokens, positions, pages), pages, self._settings(writing), positions)
        made = []
        for slot in active:
            text = self.texts[slot]
            assert text is not None
            text.position += 1
            made.append(self._made(text, found[slot]))
        return made

    def _made(self, text: Text, token: int) -> SampledToken:
        text.token, text.made = token, text.made + 1
        return SampledToken(text.key, token, self._ended(text))

    def _ended(self, text: Text) -> str:
        if text.token in self.ends and not text.request.ignore_end:
            return "stop"
        return "length" if text.made == text.request.tokens else ""

    def _settings(self, texts: list[Text | None]) -> dict[str, Any]:
        """Settings of all rows; made anew only when other texts stand there."""
        rows = tuple(t and t.number for t in texts)
        if rows != self.rows:
            self.rows, self.settings = rows, self.steps.settings([t.settings if t else {} for t in texts])
        return self.settings

    def _close_up(self) -> None:
        """The last text moves to the first free slot, if fewer slots are to be computed then."""
        taken = [slot for slot, t in enumerate(self.texts) if t is not None]
        most = len(self.texts)
        if taken and rounded(len(taken), most) < rounded(taken[-1] + 1, most):
            source, target = taken[-1], self.texts.index(None)
            self.texts[source], self.texts[target] = None, self.texts[source]
            self.pages.move(source, target)


def rounded(n: int, most: int) -> int:
    """The next power of two, `most` at most; not 2, as products of two rows take longer than those of four."""
    return min(1 if n == 1 else max(4, 1 << (n - 1).bit_length()), most)
