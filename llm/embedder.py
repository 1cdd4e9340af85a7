"""Embedder: texts to vectors whose products are cosines.

Texts of like lengths stand one after another in rows of a few hundred tokens (`packing.py`), of which each device has
one; a step is compiled once for each length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from manygrad import Tensor, TinyJit, nn, world
from manygrad.llm.encoder import Encoder, load_encoder
from manygrad.llm.packing import batches
from manygrad.llm.tokenizer import Tokenizer

Text: TypeAlias = str | tuple[int, ...]  # or its tokens, the model's marks of begin and end with them
USUAL = 32  # tokens of a text


class Embedder:
    """Texts, or their tokens, with an encoder: as many at once as `batch` usual ones have tokens."""

    def __init__(self, model: Encoder, tokenizer: Tokenizer, batch: int = 32, cut: bool = False):
        """`cut`: of texts longer than the model takes the end is left out; without it they are a ValueError."""
        self.model, self.tokenizer, self.batch, self.cut = model, tokenizer, batch, cut
        self.steps: dict[tuple[int, int], TinyJit[Tensor]] = {}  # by the tokens of a row, and of its longest text

    @classmethod
    def load(cls, model: str = "minilm", dtype: str = "float32", batch: int = 32, cut: bool = False) -> Embedder:
        """With an encoder by its name or path, a copy of which lies on each device of this world."""
        encoder, tokenizer = load_encoder(model, dtype)
        nn.shard_rules(encoder, {}, world.devices)
        Tensor.realize(*encoder.parameters())
        return cls(encoder, tokenizer, batch, cut)

    def ids(self, text: Text) -> list[int]:
        return self.all_ids([text])[0]

    def all_ids(self, texts: Sequence[Text]) -> list[list[int]]:
        """Tokens of each text, at most as many as the model takes; the last one is the mark of the end. ValueError of
        longer ones, unless they are to be cut."""
        most = self.model.config.context
        encoded = iter(self.tokenizer.encode_all([t for t in texts if isinstance(t, str)]))
        found = [next(encoded) if isinstance(t, str) else [*t] for t in texts]
        longer = [i for i, ids in enumerate(found) if len(ids) > most]
        if longer and not self.cut:
            raise ValueError(
                f"{len(longer)} of {len(found)} texts are longer than the model's {most} tokens: number "
                f"{longer[0] + 1} has {len(found[longer[0]])}; cut them, or make vectors of their parts"
            )
        return [ids if len(ids) <= most else [*ids[: most - 1], ids[-1]] for ids in found]

    def __call__(self, texts: Sequence[Text]) -> np.ndarray:
        """(texts, dim) float32."""
        ids = self.all_ids(texts)
        out = np.zeros((len(texts), self.model.config.dim), np.float32)
        for batch in batches([len(row) for row in ids], self.batch * USUAL, len(world.devices)):
            step = self.steps.setdefault(
                (batch.capacity, batch.width), TinyJit(partial(self.model, width=batch.width), warmup=0)
            )
            with Tensor.no_grad():
                found = step(*(Tensor(a).shard(world.devices, axis=0) for a in batch.packed(ids))).numpy()
            for row, numbers in zip(found, batch.rows):
                out[numbers] = row[: len(numbers)]
        return out
