"""Texts to vectors whose products are cosines.

    python examples/llm/embed.py "A cat sits." "A kitten is sitting." "Shares fell."    # their cosines
    python examples/llm/embed.py --vectors - < lines.txt > vectors.jsonl

Texts of like lengths stand one after another in rows of a few hundred tokens (`packing.py`), of which each device has
one (`launcher examples/llm/embed.py --nodes 2 -- ...`); a step is compiled once for each length.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
from encoder import Encoder, load_encoder
from packing import batches
from tokenizer import Tokenizer

from manygrad import Tensor, TinyJit, nn, world

Text: TypeAlias = str | tuple[int, ...]  # or its tokens, the model's marks of begin and end with them
USUAL = 32  # tokens of a text


class Embedder:
    """Texts, or their tokens, with an encoder: as many at once as `batch` usual ones have tokens."""

    def __init__(self, model: Encoder, tokenizer: Tokenizer, batch: int = 32, cut: bool = False):
        """`cut`: of texts longer than the model takes the end is left out; without it they are a ValueError."""
        self.model, self.tokenizer, self.batch, self.cut = model, tokenizer, batch, cut
        self.steps: dict[tuple[int, int], TinyJit[Tensor]] = {}  # by the tokens of a row, and of its longest text

    def ids(self, text: Text) -> list[int]:
        return self.all_ids([text])[0]

    def all_ids(self, texts: Sequence[Text]) -> list[list[int]]:
        """Of each at most as many as the model takes; the last one is the mark of the end. ValueError of longer ones,
        unless they are to be cut."""
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
                (batch.room, batch.width), TinyJit(partial(self.model, width=batch.width), warmup=0)
            )
            with Tensor.no_grad():
                found = step(*(Tensor(a).shard(world.devices, axis=0) for a in batch.packed(ids))).numpy()
            for row, texts in zip(found, batch.rows):
                out[texts] = row[: len(texts)]
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Texts to vectors; prints their cosines, or the vectors.")
    parser.add_argument("texts", nargs="+", help="texts, or - for one a line from stdin")
    parser.add_argument("--model", default="minilm", help="a folder with config.json, or minilm")
    parser.add_argument("--vectors", action="store_true", help="print a JSON list a text instead of cosines")
    parser.add_argument("--batch", type=int, default=32, help=f"texts of {USUAL} tokens at once")
    parser.add_argument("--cut", action="store_true", help="leave out what longer texts have beyond the model's tokens")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="of weights")
    args = parser.parse_args()
    if args.batch < 1:
        parser.error(f"--batch {args.batch}: at least 1")
    texts = [line.rstrip("\n") for line in sys.stdin] if args.texts == ["-"] else args.texts
    if not texts:
        raise SystemExit("embed.py: stdin has no line")
    try:
        model, tokenizer = load_encoder(args.model, args.dtype)
    except (ValueError, OSError) as error:
        raise SystemExit(f"embed.py: {error}") from None
    nn.shard_rules(model, {}, world.devices)  # a copy on each device
    Tensor.realize(*model.parameters())
    try:
        found = Embedder(model, tokenizer, args.batch, args.cut)(texts)
    except ValueError as error:
        raise SystemExit(f"embed.py: {error} (--cut leaves out their ends)") from None
    if world.rank != 0:
        return
    for text, row in zip(texts, found.tolist() if args.vectors else found @ found.T):
        print(json.dumps(row) if args.vectors else " ".join(f"{x:6.3f}" for x in row) + f"  {text}")


if __name__ == "__main__":
    main()
