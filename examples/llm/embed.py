"""Texts to vectors whose products are cosines.

    python examples/llm/embed.py "A cat sits." "A kitten is sitting." "Shares fell."    # their cosines
    python examples/llm/embed.py --vectors - < lines.txt > vectors.jsonl

Texts are sorted by length and computed in batches of a few lengths, each compiled once; a batch of long texts has fewer
rows, so that what is between two layers stays in the caches. Rows are cut over all devices
(`launcher examples/llm/embed.py --nodes 2 -- ...`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from encoder import Encoder, load_encoder
from tokenizer import Tokenizer

from manygrad import Tensor, TinyJit, nn, world

# of batches: texts are filled up to the next one
LENGTHS = (*range(4, 64, 4), *range(64, 128, 8), *range(128, 256, 16), *range(256, 513, 32))
Text: TypeAlias = str | tuple[int, ...]  # or its tokens, the model's marks of begin and end with them
FULL = 32  # tokens of a text, up to which a batch has all its rows


def height(length: int, size: int, devices: int = 1) -> int:
    """Rows of a batch of this length, on each device as many: `size`, or those that make as many tokens as `size` rows
    of `FULL` do."""
    return max(min(size, size * FULL // length) // devices, 1) * devices


def batches(lengths: Sequence[int], size: int, devices: int = 1) -> Iterator[tuple[list[int], int]]:
    """Numbers of texts, `height` of them at most, with the tokens that their batch has: from the longest to the
    shortest."""
    order, begin = sorted(range(len(lengths)), key=lambda i: -lengths[i]), 0
    while begin < len(order):
        longest = lengths[order[begin]]
        length = next((n for n in LENGTHS if n >= longest), longest)
        rows = order[begin : begin + height(length, size, devices)]
        yield rows, length
        begin += len(rows)


class Embedder:
    """Texts, or their tokens, with an encoder, `batch` at once, of long ones fewer."""

    def __init__(self, model: Encoder, tokenizer: Tokenizer, batch: int = 32):
        self.model, self.tokenizer, self.batch = model, tokenizer, batch
        self.steps: dict[int, TinyJit[Tensor]] = {}  # by the tokens of a batch

    def ids(self, text: Text) -> list[int]:
        return self.all_ids([text])[0]

    def all_ids(self, texts: Sequence[Text]) -> list[list[int]]:
        """Of each at most as many as the model takes; the last one is the mark of the end."""
        most = self.model.config.context
        encoded = iter(self.tokenizer.encode_all([t for t in texts if isinstance(t, str)]))
        found = [next(encoded) if isinstance(t, str) else [*t] for t in texts]
        return [ids if len(ids) <= most else [*ids[: most - 1], ids[-1]] for ids in found]

    def __call__(self, texts: Sequence[Text]) -> np.ndarray:
        """(texts, dim) float32."""
        ids = self.all_ids(texts)
        out = np.zeros((len(texts), self.model.config.dim), np.float32)
        devices = len(world.devices)
        for rows, length in batches([len(row) for row in ids], self.batch, devices):
            count = height(length, self.batch, devices)
            tokens, lengths = np.zeros((count, length), np.int64), np.ones(count, np.int64)
            for at, row in enumerate(rows):
                tokens[at, : len(ids[row])], lengths[at] = ids[row], len(ids[row])
            step = self.steps.setdefault(length, TinyJit(self.model, warmup=0))
            with Tensor.no_grad():
                found = step(*(Tensor(a).shard(world.devices, axis=0) for a in (tokens, lengths)))
            out[rows] = found.numpy()[: len(rows)]
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Texts to vectors; prints their cosines, or the vectors.")
    parser.add_argument("texts", nargs="+", help="texts, or - for one a line from stdin")
    parser.add_argument("--model", default="minilm", help="a folder with config.json, or minilm")
    parser.add_argument("--vectors", action="store_true", help="print a JSON list a text instead of cosines")
    parser.add_argument("--batch", type=int, default=32, help=f"texts at once; beyond {FULL} tokens fewer")
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
    found = Embedder(model, tokenizer, args.batch)(texts)
    if world.rank != 0:
        return
    for text, row in zip(texts, found.tolist() if args.vectors else found @ found.T):
        print(json.dumps(row) if args.vectors else " ".join(f"{x:6.3f}" for x in row) + f"  {text}")


if __name__ == "__main__":
    main()
