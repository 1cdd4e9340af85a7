"""A language model that writes, by the API of `manygrad.llm`.

    launcher examples/llm/generate.py -- --prompt "The sky is"
    launcher examples/llm/generate.py --nodes 2 -- --model model.gguf --prompt "Once upon a time"

`python -m manygrad.llm.generate` has all options: chat templates, sampling, types of weights and of the cache.
"""

import argparse

from manygrad import world
from manygrad.llm import SamplingParams, TextModel

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="smollm2", help="a .gguf file, a folder with config.json, or smollm2")
parser.add_argument("--prompt", default="The sky is")
parser.add_argument("--tokens", type=int, default=32)
parser.add_argument("--temperature", type=float, default=0.0)
args = parser.parse_args()

model = TextModel(args.model)  # its weights are cut over all devices of all nodes
for piece in model.generate(args.prompt, args.tokens, SamplingParams(temperature=args.temperature)):
    if world.rank == 0:
        print(piece, end="", flush=True)
if world.rank == 0:
    print()
