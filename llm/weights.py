"""The parameters in a model's files by the names that `model.py` asks for, lazily: what is cut over devices afterwards
is read from the mapped file, and decoded, only where it lies. Of `quantized` weights the blocks are parameters; on one
device they stay in the file's pages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manygrad import Tensor, nn
from manygrad.llm.config import Config, from_gguf, from_json
from manygrad.nn.state import gguf_load, safe_load
from manygrad.tensor.engine import default_device

ENDS = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
NOT_NEEDED = (
    "rope_freqs.weight",
    "rotary_emb.inv_freq",
    "pooler.dense.weight",
    "pooler.dense.bias",
    "embeddings.position_ids",
)  # follow from the configuration, or are not used


QUANTIZED = "quantized"  # in place of a dtype: as the file has them

Weight = Tensor | nn.QuantizedWeight


@dataclass(frozen=True)
class Weights:
    """`weights(name, shape)` gives a parameter in `dtype` (float32 for `QUANTIZED`, but for matrices in blocks) and
    notes that it was asked for."""

    tensors: Mapping[str, Weight]
    dtype: str
    asked: set[str] = field(default_factory=set)

    def __call__(self, name: str, shape: tuple[int, ...], optional: bool = False) -> Any:
        if name not in self.tensors:
            if optional:
                return None
            raise ValueError(f"the file has no tensor for {name}; it has {', '.join(sorted(self.tensors)[:8])}, ...")
        t = self.tensors[name]
        if t.shape != shape:
            raise ValueError(f"{name} has shape {t.shape} in the file, {shape} by its configuration")
        self.asked.add(name)
        if isinstance(t, nn.QuantizedWeight):
            return t
        return t.to(default_device()).cast("float32" if self.dtype == QUANTIZED else self.dtype)

    def check(self) -> None:
        """ValueError if the file holds what nobody asked for: the model would compute something else."""
        left = sorted(n for n in self.tensors if n not in self.asked)
        if left:
            raise ValueError(f"this decoder has no place for {len(left)} tensors of the file: {', '.join(left[:5])}")


def read_gguf(
    path: Path, dtype: str, activations: str = "float32", is_cut: bool = False
) -> tuple[Config, Weights, dict[str, Any]]:
    """(configuration, weights, metadata) of a GGUF file. `is_cut`: the model is going to be on several devices."""
    metadata, tensors = gguf_load(path, quantized=dtype == QUANTIZED)
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{path} has no token_embd.weight; it is no language model")
    divisors = tuple(tensors["rope_freqs.weight"].tolist()) if "rope_freqs.weight" in tensors else None
    c = from_gguf(metadata, tensors["token_embd.weight"].shape[0], divisors)
    named = {}
    for name, t in tensors.items():
        if name in NOT_NEEDED:
            continue
        if isinstance(t, nn.QuantizedWeight):
            t = nn.QuantizedWeight(_placed(t.blocks, is_cut), t.kind, activations)
        named[_from_gguf(name, c)] = t
    return c, Weights(named, dtype), metadata


def _placed(blocks: Tensor, is_cut: bool) -> Tensor:
    """Blocks of a mapped file where they are computed with: on one device that reads host memory, in the file's own
    pages."""
    return blocks.to(default_device()) if is_cut else Tensor.from_dlpack(blocks)


def _from_gguf(name: str, c: Config) -> str:
    """`blk.3.attn_q.weight` -> `layers.3.self_attn.q_proj.weight`; a name that is not known stays."""
    part, _, kind = name.rpartition(".")
    if not part.startswith("blk."):
        return f"{ENDS.get(part, part)}.{kind}"
    _, layer, part = part.split(".", 2)
    if part == "ffn_norm" and c.post_norms:
        return f"layers.{layer}.pre_feedforward_layernorm.{kind}"
    return f"layers.{layer}.{PARTS.get(part, part)}.{kind}"


def read_folder(path: Path, dtype: str) -> tuple[Config, Weights]:
    """(configuration, weights) of a folder with config.json and safetensors files."""
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json; a model is a .gguf file, or a folder with config.json beside "
                         "*.safetensors and tokenizer.json")  # fmt: skip
    told = json.loads((path / "config.json").read_text(encoding="utf-8"))
    c = from_json(told)
    tensors = read_tensors(path, "language_model.", "model.", "language_model.")
    if told.get("tie_word_embeddings", c.gelu):
        tensors.pop("lm_head.weight", None)
    return c, Weights(tensors, dtype)


def read_tensors(path: Path, *prefixes: str) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, lazily, by their names less the prefixes, in this order."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} has no *.safetensors file")
    found = {}
    for file in files:
        for name, t in safe_load(file).items():
            for prefix in prefixes:
                name = name.removeprefix(prefix)
            if not name.endswith(NOT_NEEDED):
                found[name] = t
    return found
