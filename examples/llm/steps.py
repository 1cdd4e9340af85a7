"""What many texts at once need of a model: a block of one text's prompt, a token for each of several, and what is drawn
from their logits, each a replay of what was captured once.

The room for keys and values (`Decoder.reserve`) is cut into slots, one a text. A step computes the first n slots, n a
power of two, so there are few captures, whatever texts come and go.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from model import Decoder
from places import Block, Ends
from writer import BLOCKS

from manygrad import Tensor, TinyJit, Variable, nn

NEUTRAL = {  # of a slot whose text has no such setting, beside others that have
    "temperature": 0.0, "top_k": 0, "top_p": math.inf, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0,
}  # fmt: skip
FILTERS = frozenset({"top_k", "top_p", "min_p"})
PENALTY = ("repetition_penalty",)
KINDS = ((), ("temperature", "seed"), ("temperature", "seed", *FILTERS))  # each with and without a penalty


class Steps:
    def __init__(self, model: Decoder, slots: int, length: int):
        """`model` has reserved `length` tokens for `slots` texts."""
        self.model, self.slots, self.length = model, slots, length
        self.device = model.norm.weight.device
        # what stands in the slots, for penalties
        self.history = self._put(np.zeros((slots, length), np.int64)).contiguous().realize()
        self.blocks: dict[int, TinyJit[Tensor]] = {}  # by size
        self.ends: dict[int, TinyJit[Tensor]] = {}  # by the number of texts
        self.draws: dict[tuple[int, tuple[str, ...]], TinyJit[Tensor]] = {}  # by the same, and by the settings
        self.moves = TinyJit(self._move)

    def _put(self, values: np.ndarray) -> Tensor:
        return Tensor(values).to(self.device)

    def block(self, slot: int, tokens: Sequence[int], position: int, last: int) -> Tensor:
        """Reads tokens into a slot; the logits (1, vocabulary) after number `last` of them."""
        size = len(tokens)
        at = Variable(f"position{size}", 0, self.length - size).bind(position)
        to = Variable(f"slot{size}", 0, self.slots - 1).bind(slot)
        until = Variable(f"last{size}", 0, size - 1).bind(last)
        step = self.blocks.setdefault(size, TinyJit(self._block))
        with Tensor.no_grad():
            return step(self._put(np.array([tokens])), at, to, until)

    def _block(self, tokens: Tensor, position: object, slot: object, last: object) -> Tensor:
        place = Block(tokens.shape[1], position, slot)
        self.history[place.texts, position : place.end] = tokens
        return self.model.at(tokens, place, last)

    def step(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        """A token each of the first n slots at its position -> logits (n, vocabulary)."""
        end = Variable("end", 1, self.length).bind(int(positions.max()) + 1)
        step = self.ends.setdefault(len(tokens), TinyJit(self._step))
        with Tensor.no_grad():
            return step(self._put(np.stack([tokens, positions])), end)

    def _step(self, given: Tensor, end: object) -> Tensor:
        tokens, positions = given[0], given[1].clip(0, self.length - 1)  # (nothing to check then)
        self.history[tokens.arange(tokens.shape[0]), positions] = tokens
        return self.model.at(tokens.unsqueeze(1), Ends(positions, end), 0)

    def settings(self, choices: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
        """Of a row each (those of `Choice`, without None), in as few combinations as serve all of them."""
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

    def draw(self, logits: Tensor, slot: int, settings: Mapping[str, Tensor], positions: np.ndarray) -> list[int]:
        """A token each of the slots from `slot` on, whose last tokens stand at `positions`."""
        n = len(positions)
        first = Variable(f"first{n}", 0, self.slots - n).bind(slot)
        step = self.draws.setdefault((n, tuple(settings)), TinyJit(self._draw))
        with Tensor.no_grad():
            return step(logits, first, dict(settings), self._put(positions)).tolist()

    def _draw(self, logits: Tensor, first: object, settings: dict[str, Tensor], positions: Tensor) -> Tensor:
        history = None
        if "repetition_penalty" in settings:
            so_far = positions.arange(self.length) <= positions.unsqueeze(1)
            history = so_far.where(self.history[first : first + positions.shape[0]], -1)
        return nn.sample(logits, **{"temperature": 0, "seed": 0, **settings}, history=history, draw=positions)

    def move(self, source: int, target: int, end: int) -> None:
        """The first `end` tokens of a slot to another one."""
        slots = (Variable(name, 0, self.slots - 1).bind(at) for name, at in (("source", source), ("target", target)))
        with Tensor.no_grad():
            self.moves(*slots, Variable("moved", 1, self.length).bind(end))

    def _move(self, source: object, target: object, end: object) -> Tensor:
        for layer in self.model.layers:
            layer.self_attn.cache.move(source, target, end)
        self.history[target : target + 1, :end] = self.history[source : source + 1, :end]
        return self.history

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Captures all that there is for these numbers of texts, so that no text waits for it."""
        for _ in range(2):
            for size in BLOCKS:
                if size <= self.length:
                    self.block(0, [0] * size, 0, 0)
            for n in sizes:
                positions = np.zeros(n, np.int64)
                logits = self.step(positions, positions)
                for names in (*KINDS, *((*kind, *PENALTY) for kind in KINDS)):
                    self.draw(logits, 0, self._settings([{}] * n, names), positions)
            if self.slots > 1:
                self.move(0, 1, 1)


def kind_of(name: str) -> type:
    return np.int64 if name in ("top_k", "seed") else np.float32
