"""GGUF files of every kind of model, written by the package `gguf` as llama.cpp's converter does; their tokenizers."""

from __future__ import annotations

import json
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from manygrad import Tensor
from manygrad.llm import tokenizer
from manygrad.llm.config import from_gguf, from_json
from manygrad.llm.model import Decoder
from manygrad.llm.rope import Rope, rotate
from manygrad.llm.stream import TextStream
from manygrad.llm.weights import read_gguf
from tests.end_to_end.llm.variants import TOKENS, config, weight

FOLDER = Path(__file__).parent / "golden"
GOLDEN = json.loads((FOLDER / "variants.json").read_text())
ARCHITECTURES = {"llama_tied_biases": "llama", "mistral": "llama"}
ARCHITECTURES |= {name: name for name in ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")}
UNSAID: dict[str, dict[str, Any]] = {  # the scale of scores, and the base of layers with a window
    "gemma2": {"scale": 12**-0.5},
    "gemma3": {"scale": 12**-0.5, "local_rope": Rope(8, 100.0)},
}


def interleaved(t: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as the converter stores them for llama."""
    return t.reshape(heads, 2, t.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(t.shape)


def write(path: Path, variant: str) -> None:
    told, arch = config(variant), ARCHITECTURES[variant]
    c, writer = from_json(told), gguf.GGUFWriter(path, arch)
    writer.add_block_count(c.layers)
    writer.add_embedding_length(c.dim)
    writer.add_feed_forward_length(c.hidden)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_context_length(c.context)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_freq_base(c.rope.base)
    if c.rope.kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(c.rope.kind))
        writer.add_rope_scaling_factor(c.rope.factor)
        writer.add_rope_scaling_orig_ctx_len(c.rope.original)
    if c.rope.kind == "llama3":
        plain = Rope(c.head_dim, c.rope.base).frequencies()
        writer.add_tensor("rope_freqs.weight", (plain / c.rope.frequencies()).astype(np.float32))
    if c.window:
        writer.add_sliding_window(c.window)
        writer.add_array(f"{arch}.attention.sliding_window_pattern", list(c.windowed))
    if c.score_cap and c.logit_cap:
        writer.add_attn_logit_softcapping(c.score_cap)
        writer.add_final_logit_softcapping(c.logit_cap)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], c.layers)
    for name, shape in GOLDEN[variant]["shapes"].items():
        t = weight(name, tuple(shape))
        if arch == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            t = interleaved(t, c.heads if "q_proj" in name else c.kv_heads)
        if c.norm_offset and name.endswith("norm.weight"):
            t = t + np.float32(c.norm_offset)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), t)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("variant", ARCHITECTURES)
def test_logits_of_a_gguf_file_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", variant)
    c, weights, _ = read_gguf(tmp_path / "model.gguf", "float32")
    c = replace(c, **UNSAID.get(variant, {}))
    model = Decoder(c, weights)
    weights.check()
    model.reserve(1, 64)
    with Tensor.no_grad():
        found = model(Tensor([TOKENS]), 0, len(TOKENS) - 1).numpy()[0]
    np.testing.assert_allclose(found[::7], GOLDEN[variant]["logits"][-1], atol=2e-4)


def test_neighbours_are_turned_as_halves() -> None:
    """GGUF has the rows of Llama's queries and keys so that dims 2i and 2i + 1 of a head belong together."""
    x = np.random.default_rng(0).standard_normal((24, 5)).astype(np.float32)
    for heads in (1, 3):
        size, table = 24 // heads, Rope(24 // heads).table(5)
        halves, pairs = (Tensor(t).unflatten(0, (heads, size)).transpose(1, 2) for t in (x, interleaved(x, heads)))
        np.testing.assert_array_equal(rotate(pairs, table, True).numpy(), rotate(halves, table).numpy())


def test_what_a_file_does_not_say_is_told() -> None:
    for metadata, message in [
        ({}, "a model of the kind 'nothing known'; known are llama"),
        (
            {"general.architecture": "qwen2", "qwen2.embedding_length": 8, "qwen2.block_count": 1,
             "qwen2.attention.head_count": 2, "qwen2.context_length": 8, "qwen2.rope.dimension_count": 2},
            "turns 2 of 4 dims of a head",
        ),
        ({"general.architecture": "llama"}, "does not say llama.embedding_length"),
        (
            {"general.architecture": "llama", "llama.embedding_length": 8, "llama.block_count": 1,
             "llama.attention.head_count": 2, "llama.context_length": 8, "llama.rope.scaling.type": "longrope"},
            "rope.scaling.type 'longrope' of the GGUF file is not known",
        ),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            from_gguf(metadata, 10)
    for words, message in [
        ({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]}, "a tokenizer of the kind 'bert'"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": "viking"},
            "text is split before 'viking'",
        ),
        (byte_pairs(["a", "b", "ab"], ["a", "b a b"]), "merges that are not two words"),
        (byte_pairs(["a", "b"], ["a c"]), "tokenizer cannot be made: .*out of vocabulary"),
    ]:
        with pytest.raises(ValueError, match=message):
            tokenizer.from_gguf(words)


def byte_pairs(words: list[str], merges: list[str]) -> dict[str, Any]:
    found = {"model": "gpt2", "pre": "gpt-2", "tokens": words, "merges": merges}
    return {f"tokenizer.ggml.{k}": v for k, v in found.items()}


def test_merges_of_a_tokenizer_are_not_all_made_at_once() -> None:
    """(Python's memory; the tokenizer's own is not in it.)"""
    letters = [chr(i) for i in range(0x100, 0x200)]
    pairs = [(a, b) for a in letters[:200] for b in letters]
    metadata = byte_pairs([*letters, *map("".join, pairs)], [" ".join(p) for p in pairs])
    tokenizer.from_gguf(metadata)
    tracemalloc.start()
    try:
        words = tokenizer.from_gguf(metadata)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    numbers = sys.getsizeof({w: i for i, w in enumerate(metadata["tokenizer.ggml.tokens"])}) + 32 * len(pairs)
    assert peak < numbers + 16 * len(pairs)
    assert words.encode(letters[7] + letters[9]) == words.inner.encode("".join((letters[7], letters[9]))).ids


def test_sentencepiece_tokens_are_those_of_sentencepiece() -> None:
    told = json.loads((FOLDER / "sentencepiece.json").read_text())
    metadata = {f"tokenizer.ggml.{k}": told[k] for k in ("tokens", "scores", "token_type")}
    metadata |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    words = tokenizer.from_gguf(metadata)
    assert words.ends == {2} and words.bos == 1
    for text in told["texts"]:
        assert words.encode(text["text"]) == [1, *text["ids"]], text["text"]
        assert words.decode(text["ids"]) == text["text"]


def test_text_goes_on_where_the_prompt_ends() -> None:
    """SentencePiece takes the space before a first word away; a word that follows a prompt keeps it."""
    told = json.loads((FOLDER / "sentencepiece.json").read_text())
    metadata = {f"tokenizer.ggml.{k}": told[k] for k in ("tokens", "scores", "token_type")}
    words = tokenizer.from_gguf({**metadata, "tokenizer.ggml.model": "llama"})
    ids = words.encode("a rank of the world and a shard of it, on every node of the mesh")
    for at in (1, 9, len(ids) - 2):
        stream = TextStream(words, prompt=ids[:at])
        assert words.decode(ids[:at]) + "".join(map(stream.add, ids[at:])) == words.decode(ids)
