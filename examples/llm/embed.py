"""Vectors of texts, by the API of `manygrad.llm`: which of the texts is nearest to the first one.

    launcher examples/llm/embed.py -- "A cat sits." "A kitten is sitting." "Shares fell."
    launcher examples/llm/embed.py --nodes 2 -- "A cat sits." "A kitten is sitting." "Shares fell."

`python -m manygrad.llm.embed` reads texts from stdin, and prints cosines or vectors.
"""

import argparse

from manygrad import world
from manygrad.llm import Embedder

parser = argparse.ArgumentParser()
parser.add_argument("texts", nargs="+")
parser.add_argument("--model", default="minilm", help="a folder with config.json, or minilm")
args = parser.parse_args()

vectors = Embedder.load(args.model)(args.texts)  # (texts, dim) float32, each of length 1; every node makes a part
if world.rank == 0:
    for text, cosine in zip(args.texts, vectors @ vectors[0]):
        print(f"{cosine:6.3f}  {text}")
