"""A language model that writes.

    python examples/llm/generate.py --model smollm2 --chat --prompt "Why is the sky blue?" --tokens 64
    python examples/llm/generate.py --model model.gguf --prompt "Once upon a time" --temperature 0.8 --top-p 0.95
    launcher examples/llm/generate.py --nodes 2 -- --model smollm2 --prompt "Once upon a time"

Text goes to stdout as it is made, tokens a second to stderr, on several nodes with the share that waits for others.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import fields

import garbage  # noqa: F401  (the first one)
from load import load
from room import KINDS
from sharding import rules
from stream import TextStream
from writer import BLOCKS, Choice, Writer

from manygrad import GlobalCounters, Tensor, nn, world


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A language model goes on with a text, or answers with --chat.")
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
    parser.add_argument(
        "--dtype", choices=["quantized", "float32", "bfloat16", "float16"],
        help="of weights: as a .gguf file has them (quantized, its default), or decoded; a folder's: float32",
    )  # fmt: skip
    parser.add_argument(
        "--activations", default="float32", choices=["float32", "int8", "bfloat16"],
        help="what weights are multiplied by: int8 (quantised ones) rounds, 32 elements with a scale, and takes less "
        "time; bfloat16 (--dtype bfloat16) rounds to that, and takes less time for prompts",
    )  # fmt: skip
    parser.add_argument(
        "--cache-dtype", choices=KINDS,
        help="of the keys and values of tokens so far (default: bfloat16 with --activations bfloat16, else float32)",
    )  # fmt: skip
    args = parser.parse_args()
    if args.tokens < 1:
        parser.error(f"--tokens {args.tokens}: at least 1")
    if args.system and not args.chat:
        parser.error("--system needs --chat")
    return args


def main() -> None:
    args = options()
    began = time.perf_counter()
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    try:
        model, tokenizer = load(args.model, args.dtype, args.activations)
        system = [{"role": "system", "content": args.system}] if args.system else []
        ids = tokenizer.chat([*system, {"role": "user", "content": text}]) if args.chat else tokenizer.encode(text)
        context = model.config.context
        if not ids and args.prompt == "-" and world.size > 1:
            raise ValueError("standard input does not reach the workers of a launcher: give the text with --prompt")
        if not ids:
            raise ValueError("the prompt is empty, and this model needs a token to go on from")
        if len(ids) + args.tokens > context:
            raise ValueError(f"the prompt's {len(ids)} tokens and {args.tokens} more do not fit the model's context of "
                             f"{context}: a shorter prompt, or fewer --tokens")  # fmt: skip
        length = room(len(ids) + args.tokens)
        model.reserve(1, length, args.cache_dtype)
        if len(world.devices) > 1:
            nn.shard_rules(model, rules(model, world.devices), world.devices)
        choice = Choice(*(getattr(args, f.name) for f in fields(Choice)))
        writer, stream = Writer(model, length, choice), TextStream(tokenizer, args.stop, ids)
    except (ValueError, OSError) as error:
        raise SystemExit(f"generate.py: {error}") from None
    Tensor.realize(*model.parameters(), *model.buffers())

    def show(piece: str) -> None:
        if world.rank == 0 and piece:
            print(piece, end="", flush=True)

    loaded = time.perf_counter()
    token = writer.start(ids)
    first, made, waited = time.perf_counter(), 1, GlobalCounters.net_wait_s
    while args.ignore_end or token not in tokenizer.ends:
        show(stream.add(token))
        if stream.stopped or made == args.tokens:
            break
        token, made = writer.write(token), made + 1
    show(stream.end() + "\n")
    ended = time.perf_counter()
    share = f", {(GlobalCounters.net_wait_s - waited) / (ended - first):.0%} of it waiting for other nodes"
    share = share if world.size > 1 else ""
    if world.rank == 0:
        print(
            f"loaded in {loaded - began:.2f} s; prompt: {len(ids)} tokens in {first - loaded:.2f} s, "
            f"{len(ids) / (first - loaded):.0f} tokens/s; then {made - 1} tokens in {ended - first:.2f} s, "
            f"{(made - 1) / (ended - first):.1f} tokens/s{share}",
            file=sys.stderr,
        )


def room(tokens: int) -> int:
    """For so many tokens, with the block that the prompt's end fills up; few sizes, so that kernels are found again."""
    return max(256, 1 << (tokens + BLOCKS[-1] - 1).bit_length())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
