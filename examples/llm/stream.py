"""Tokens one by one to text as it becomes certain."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizer import Tokenizer


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
        self.held += text[len(self.shown) :]
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
        """What was held back."""
        text, self.held = self.held, ""
        return text
