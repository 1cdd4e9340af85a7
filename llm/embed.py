"""Texts to vectors whose products are cosines.

python -m manygrad.llm.embed "A cat sits." "A kitten is sitting." "Shares fell."    # their cosines
python -m manygrad.llm.embed --vectors - < lines.txt > vectors.jsonl
launcher --nodes 2 -m manygrad.llm.embed -- --vectors "A cat sits." "Shares fell."
"""

from __future__ import annotations

import argparse
import json
import sys

from manygrad import world
from manygrad.llm.embedder import USUAL, Embedder


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="manygrad.llm.embed", description="Texts to vectors; prints their cosines, or the vectors."
    )
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
        embedder = Embedder.load(args.model, args.dtype, args.batch, args.cut)
    except (ValueError, OSError) as error:
        raise SystemExit(f"embed.py: {error}") from None
    try:
        found = embedder(texts)
    except ValueError as error:
        raise SystemExit(f"embed.py: {error} (--cut leaves out their ends)") from None
    if world.rank != 0:
        return
    for text, row in zip(texts, found.tolist() if args.vectors else found @ found.T):
        print(json.dumps(row) if args.vectors else " ".join(f"{x:6.3f}" for x in row) + f"  {text}")


if __name__ == "__main__":
    main()
