"""Small decoders of every kind, with weights that follow from their names alone."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

SIZES = {
    "hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 8, "vocab_size": 61, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1000.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA = {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
BOTH = {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0}}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": PLAIN},
    "llama_tied_biases": {"model_type": "llama", "rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True,
                          "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "rope_parameters": PLAIN, "sliding_window": 5},
    "qwen2": {"model_type": "qwen2", "rope_parameters": YARN},
    "qwen3": {"model_type": "qwen3", "rope_parameters": PLAIN, "use_sliding_window": True, "sliding_window": 7,
              "layer_types": KINDS},
    "gemma": {"model_type": "gemma", "rope_parameters": PLAIN, **GEMMA},
    "gemma2": {"model_type": "gemma2", "rope_parameters": PLAIN, "query_pre_attn_scalar": 12, "sliding_window": 4,
               "layer_types": KINDS, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, **GEMMA},
    "gemma3": {"model_type": "gemma3_text", "rope_parameters": BOTH, "query_pre_attn_scalar": 12, "sliding_window": 4,
               "layer_types": KINDS, **GEMMA},
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(3, 61, 40).tolist()


def config(variant: str) -> dict[str, Any]:
    return {**SIZES, **VARIANTS[variant]}


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """By Hugging Face's name; large enough for every part to show in the logits."""
    found = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    scale = 0.3 if len(shape) == 2 and "embed" not in name else 0.5
    return (found * scale + (name.endswith("norm.weight") and 0.5)).astype(np.float32)
