"""Tokens one by one to text as it becomes certain."""

from __future__ import annotations

from collections.abc import Sequence

from manygrad.llm.tokenizer import Tokenizer


class TextStream:
    """Pieces of text: whole characters, and nothing that may be the beginning of a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), prompt: Sequence[int] = ()):
        """`prompt`: what the text goes on from."""
        self.tokenizer, self.stops = tokenizer, [s for s in stops if s]
        self.ids = list(prompt[-8:])  # of the last words: their text tells where spaces stand
        self.shown, self.held = tokenizer.decode(self.ids), ""
        self.stopped = False

    def add(self, token: int) -> str:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        if text.endswith("�"):  # a part of a character
            return ""
        self.held += _beyond(self.shown, text)
        self.shown = text
        if len(self.ids) > 16:
            self.ids = self.ids[-8:]
            self.shown = self.tokenizer.decode(self.ids)
        return self._certain()

    def _certain(self) -> str:
        found = [at for at in map(self.held.find, self.stops) if at >= 0]
        if found:
            self.stopped = True
            text, self.held = self.held[: min(found)], ""
            return text
        wait = max((n for s in self.stops for n in range(1, len(s)) if self.held.endswith(s[:n])), default=0)
        text, self.held = self.held[: len(self.held) - wait], self.held[len(self.held) - wait :]
        return text

    def end(self) -> str:
        """The part that was held back, a part of a character as the mark that stands for it."""
        rest = self.tokenizer.decode(self.ids)
        text, self.held = self.held + _beyond(self.shown, rest), ""
        self.shown = rest
        return text


def _beyond(shown: str, text: str) -> str:
    """The new part of `text`. What was shown, of a prompt, may end inside a character, which is a mark until the last
    of its tokens is there."""
    if text.startswith(shown):
        return text[len(shown) :]
    return text[next((i for i, (a, b) in enumerate(zip(shown, text)) if a != b), min(len(shown), len(text))) :]
