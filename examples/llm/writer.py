"""Text after text: the prompt in blocks, then a token a step, each a replay of what was captured once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from model import Decoder

from manygrad import Tensor, TinyJit, Variable

BLOCKS = (256, 32)  # tokens of the prompt at once: the first size that fits, the last one filled up


def blocks(count: int) -> Iterator[tuple[int, int]]:
    """`count` tokens as (begin, size of the block)."""
    at = 0
    while at < count:
        size = next((b for b in BLOCKS if b <= count - at), BLOCKS[-1])
        yield at, size
        at += size


class Writer:
    """One text with a model whose room (`Decoder.reserve`) is `length` tokens, a multiple of the last of `BLOCKS`."""

    def __init__(self, model: Decoder, length: int):
        self.model, self.length = model, length
        self.steps = {size: TinyJit(self._step) for size in (*BLOCKS, 1)}

    def _step(self, tokens: Tensor, position: object, last: object) -> Tensor:
        """(1, t) tokens at `position` -> (1, 1), the token that follows number `last` of them."""
        return self.model(tokens, position, last).argmax(-1, keepdim=True)

    def _next(self, tokens: Tensor, position: int, last: int) -> Tensor:
        size = tokens.shape[1]
        at = Variable(f"position{size}", 0, self.length - size).bind(position)
        with Tensor.no_grad():
            return self.steps[size](tokens, at, Variable(f"last{size}", 0, size - 1).bind(last))

    def start(self, prompt: Sequence[int]) -> int:
        """Reads the prompt; the token that follows it."""
        if not prompt:
            raise ValueError("the prompt is empty: a model goes on from at least one token")
        if len(prompt) > self.length:
            raise ValueError(f"the prompt has {len(prompt)} tokens, there is room for {self.length}")
        device = self.model.norm.weight.device
        for at, size in blocks(len(prompt)):
            part = list(prompt[at : at + size])
            block = Tensor([part + [0] * (size - len(part))]).to(
                device
            )  # what fills up is overwritten before it is read
            token = self._next(block, at, len(part) - 1)
        self.position = len(prompt)
        return int(token.item())

    def write(self, token: int) -> int:
        """The token after `token`."""
        device = self.model.norm.weight.device
        token = int(self._next(Tensor([[token]]).to(device), self.position, 0).item())
        self.position += 1
        return token
