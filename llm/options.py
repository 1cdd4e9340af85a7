"""Options that the programs of language models have in common."""

from __future__ import annotations

import argparse

from manygrad.llm.kv_cache import KINDS


def add_type_options(parser: argparse.ArgumentParser, dtype_help: str) -> None:
    """`--dtype`, `--activations` and `--cache-dtype`: in which types a model is held and computes."""
    parser.add_argument("--dtype", choices=["quantized", "float32", "bfloat16", "float16"], help=dtype_help)
    parser.add_argument(
        "--activations", default="float32", choices=["float32", "int8", "bfloat16"],
        help="what weights are multiplied by: int8 (quantised ones) rounds, 32 elements with a scale, and takes less "
        "time; bfloat16 (--dtype bfloat16) rounds to that, and takes less time for prompts",
    )  # fmt: skip
    parser.add_argument(
        "--cache-dtype", choices=KINDS,
        help="of the keys and values of texts so far (default: bfloat16 with --activations bfloat16, else float32)",
    )  # fmt: skip
