"""A language model that writes.

    python -m manygrad.llm.generate --model smollm2 --chat --prompt "Why is the sky blue?" --tokens 64
    python -m manygrad.llm.generate --model model.gguf --prompt "Once upon a time" --temperature 0.8 --top-p 0.95
    launcher --nodes 2 -m manygrad.llm.generate -- --model smollm2 --prompt "Once upon a time"

Text goes to stdout as it is made, tokens a second to stderr, on several nodes with the share that waits for others.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import fields

from manygrad import GlobalCounters, world
from manygrad.llm.collect_rarely import collect_rarely
from manygrad.llm.engine.writer import SamplingParams
from manygrad.llm.options import add_type_options
from manygrad.llm.text_model import TextModel


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="manygrad.llm.generate", description="A language model goes on with a text, or answers with --chat."
    )
    parser.add_argument("--model", default="smollm2", help="a .gguf file, a folder with config.json, or smollm2")
    parser.add_argument(
        "--prompt", required=True, help="what to go on with, or to answer; - reads it from stdin (not under launcher)"
    )
    parser.add_argument("--chat", action="store_true", help="the prompt is a message, in the model's chat template")
    parser.add_argument("--system", help="with --chat: a message before it that tells the model what it is")
    parser.add_argument("--tokens", type=int, default=64, help="at most so many")
    parser.add_argument("--stop", action="append", default=[], help="end before this text; may stand several times")
    parser.add_argument("--ignore-end", action="store_true", help="go on where the model would end")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest token")
    parser.add_argument("--top-k", type=int, help="of the k likeliest")
    parser.add_argument("--top-p", type=float, help="of the fewest likeliest with the share p of the probability")
    parser.add_argument("--min-p", type=float, help="of those with p times the probability of the likeliest")
    parser.add_argument("--repetition-penalty", type=float, help="divides the logits of tokens that were there")
    parser.add_argument("--seed", type=int, default=0, help="another one, another text")
    add_type_options(
        parser,
        "of weights: as a .gguf file has them (quantized, its default), or decoded; a folder's: float32",
    )
    args = parser.parse_args()
    if args.tokens < 1:
        parser.error(f"--tokens {args.tokens}: at least 1")
    if args.system and not args.chat:
        parser.error("--system needs --chat")
    return args


def main() -> None:
    collect_rarely()
    args = options()
    began = time.perf_counter()
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    try:
        model = TextModel(args.model, args.dtype, args.activations, args.cache_dtype)
        ids = model.encode(text, args.chat, args.system or "")
        context = model.decoder.config.context
        if not ids and args.prompt == "-" and world.size > 1:
            raise ValueError("standard input does not reach the workers of a launcher: give the text with --prompt")
        if not ids:
            raise ValueError("the prompt is empty, and this model needs a token to go on from")
        if len(ids) + args.tokens > context:
            raise ValueError(f"the prompt's {len(ids)} tokens and {args.tokens} more do not fit the model's context of "
                             f"{context}: a shorter prompt, or fewer --tokens")  # fmt: skip
        sampling = SamplingParams(*(getattr(args, f.name) for f in fields(SamplingParams)))
        sampling.check()
        model.reserve(len(ids) + args.tokens)
    except (ValueError, OSError) as error:
        raise SystemExit(f"generate.py: {error}") from None
    loaded, first, waited = time.perf_counter(), 0.0, 0.0
    for piece in model.generate(ids, args.tokens, sampling, args.stop, args.ignore_end):
        if not first:
            first, waited = time.perf_counter(), GlobalCounters.net_wait_s
        if world.rank == 0 and piece:
            print(piece, end="", flush=True)
    ended = time.perf_counter()
    if world.rank == 0:
        share = f", {(GlobalCounters.net_wait_s - waited) / (ended - first):.0%} of it waiting for other nodes"
        print(flush=True)
        print(
            f"loaded in {loaded - began:.2f} s; prompt: {len(ids)} tokens in {first - loaded:.2f} s, "
            f"{len(ids) / (first - loaded):.0f} tokens/s; then {model.made - 1} tokens in {ended - first:.2f} s, "
            f"{(model.made - 1) / (ended - first):.1f} tokens/s{share if world.size > 1 else ''}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
