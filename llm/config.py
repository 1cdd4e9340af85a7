"""The make of a decoder: its sizes and variants, read from GGUF's metadata or from Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manygrad.llm.rope import Rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")


@dataclass(frozen=True)
class Config:
    """The sizes and variants of one model. Large: files name that many."""

    family: str
    vocabulary: int
    dim: int
    layers: int
    heads: int
    kv_heads: int  # each serves heads / kv_heads heads of queries
    head_dim: int
    hidden: int  # of the feed-forward part
    context: int  # tokens that the model was made for
    norm_eps: float
    rope: Rope
    local_rope: Rope  # of the layers with a window
    scale: float  # of the products of queries and keys
    window: int | None = None  # tokens that a layer with a window sees, itself included
    windowed: tuple[bool, ...] = ()  # by layer
    gelu: bool = False  # the gate's activation: gelu (tanh), else silu
    embedding_scale: float = 1.0
    qk_norm: bool = False  # queries and keys are normalised, head by head
    post_norms: bool = False  # what attention and feed-forward add is normalised, too
    norm_offset: float = 0.0  # what a norm's weight in the file lacks
    score_cap: float | None = None  # c · tanh(x / c) of the scores
    logit_cap: float | None = None
    neighbours: bool = False  # dims 2i and 2i + 1 of a head are turned together, not i of both halves

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads of queries are no multiple of {self.kv_heads} heads of keys")
        if len(self.windowed) != self.layers:
            raise ValueError(f"{len(self.windowed)} kinds of layers for {self.layers} layers")

    def window_of(self, layer: int) -> int | None:
        return self.window if self.windowed[layer] else None


def _known(family: str, where: str) -> str:
    family = {"gemma3_text": "gemma3"}.get(family, family)
    if family not in FAMILIES:
        hint = " (embed.py takes it)" if family == "bert" else ""
        raise ValueError(f"{where} is of a model of the kind {family!r}{hint}; known are {', '.join(FAMILIES)}")
    return family


def _windows(family: str, layers: int, every: int | None = None) -> tuple[bool, ...]:
    """Which layers have a window, where the file does not say: all but each `every`-th one, or all."""
    every = every or {"gemma2": 2, "gemma3": 6}.get(family)
    return tuple(not every or bool((i + 1) % every) for i in range(layers))


def _variants(family: str, dim: int) -> dict[str, Any]:
    gemma = family.startswith("gemma")
    return {
        "gelu": gemma,
        "embedding_scale": dim**0.5 if gemma else 1.0,
        "qk_norm": family in ("qwen3", "gemma3"),
        "post_norms": family in ("gemma2", "gemma3"),
    }


def from_gguf(metadata: Mapping[str, Any], vocabulary: int, divisors: tuple[float, ...] | None = None) -> Config:
    """Configuration of a GGUF file; `vocabulary` is the height of its embedding table, `divisors` its tensor
    rope_freqs."""
    arch = str(metadata.get("general.architecture", "nothing known"))
    family = _known(arch, "the GGUF file")

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{arch}.{key}", default)
        if found is None:
            raise ValueError(f"the GGUF file does not say {arch}.{key}")
        return found

    dim, layers, heads = value("embedding_length"), value("block_count"), value("attention.head_count")
    head_dim = value("attention.key_length", dim // heads)
    if value("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(
            f"the GGUF file turns {value('rope.dimension_count')} of {head_dim} dims of a head; all are known"
        )
    base, context = value("rope.freq_base", 10000.0), value("context_length")
    kind = value("rope.scaling.type", "none")
    factor, original = value("rope.scaling.factor", 1.0), value("rope.scaling.original_context_length", context)
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"rope.scaling.type {kind!r} of the GGUF file is not known; known are none, linear, yarn")
    rope = Rope(head_dim, base, kind, factor, original, divisors=divisors)
    window = value("attention.sliding_window", 0) or None
    pattern = value("attention.sliding_window_pattern", 0)
    windowed = tuple(map(bool, pattern)) if isinstance(pattern, list) else _windows(family, layers, pattern)
    # of the Gemma 2 with 27 billion parameters, dim / heads instead
    scale = (dim // heads if family == "gemma2" and layers == 46 else head_dim) ** -0.5
    return Config(
        family=family, vocabulary=vocabulary, dim=dim, layers=layers, heads=heads,
        kv_heads=value("attention.head_count_kv", heads), head_dim=head_dim, hidden=value("feed_forward_length"),
        context=context, norm_eps=value("attention.layer_norm_rms_epsilon"), rope=rope,
        local_rope=Rope(head_dim, value("rope.freq_base_swa", 10000.0)) if family == "gemma3" else rope,
        scale=scale, window=window, windowed=windowed if window else (False,) * layers,
        score_cap=metadata.get(f"{arch}.attn_logit_softcapping"),
        logit_cap=metadata.get(f"{arch}.final_logit_softcapping"),
        neighbours=family == "llama",
        **_variants(family, dim),
    )  # fmt: skip


def from_json(told: Mapping[str, Any]) -> Config:
    """Configuration of a config.json."""
    told = told.get("text_config", told)  # (of a model that sees, too)
    family = _known(str(told.get("model_type", "nothing known")), "config.json")

    def value(key: str, default: Any = None) -> Any:
        found = told.get(key)
        found = default if found is None else found
        if found is None:
            raise ValueError(f"config.json does not say {key!r}")
        return found

    dim, layers, heads = value("hidden_size"), value("num_hidden_layers"), value("num_attention_heads")
    head_dim, context = value("head_dim", dim // heads), value("max_position_embeddings")
    window = told.get("sliding_window") if told.get("use_sliding_window", True) else None
    kinds = told.get("layer_types")
    if kinds is not None:
        windowed = tuple(kind == "sliding_attention" for kind in kinds)
    elif family.startswith("qwen"):
        windowed = tuple(i >= told.get("max_window_layers", 0) for i in range(layers))
    else:
        windowed = _windows(family, layers, told.get("sliding_window_pattern"))
    activation = told.get("hidden_activation") or told.get("hidden_act", "silu")
    if activation not in ("silu", "gelu", "gelu_pytorch_tanh"):
        raise ValueError(
            f"the activation {activation!r} of config.json is not known; known are silu, gelu_pytorch_tanh"
        )
    parameters = told.get("rope_parameters") or {"rope_theta": value("rope_theta", 10000.0), **_scaling(told)}
    both = "full_attention" in parameters
    rope = _rope(parameters["full_attention"] if both else parameters, head_dim, context)
    local = Rope(head_dim, told.get("rope_local_base_freq", 10000.0)) if family == "gemma3" else rope
    local = _rope(parameters["sliding_attention"], head_dim, context) if both else local
    variants = _variants(family, dim)
    return Config(
        family=family, vocabulary=value("vocab_size"), dim=dim, layers=layers, heads=heads,
        kv_heads=value("num_key_value_heads", heads), head_dim=head_dim, hidden=value("intermediate_size"),
        context=context, norm_eps=value("rms_norm_eps", 1e-6), rope=rope, local_rope=local,
        scale=told.get("query_pre_attn_scalar", head_dim) ** -0.5,
        window=window, windowed=windowed if window else (False,) * layers,
        norm_offset=1.0 if variants["gelu"] else 0.0,
        score_cap=told.get("attn_logit_softcapping"), logit_cap=told.get("final_logit_softcapping"),
        **variants,
    )  # fmt: skip


def _scaling(told: Mapping[str, Any]) -> dict[str, Any]:
    found = told.get("rope_scaling") or {}
    return {**found, "rope_type": found.get("rope_type", found.get("type", "default"))}


def _rope(told: Mapping[str, Any], head_dim: int, context: int) -> Rope:
    kind = told.get("rope_type", "default")
    if told.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("config.json turns a part of a head's dims (partial_rotary_factor); all are known")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(f"rope_type {kind!r} of config.json is not known; known are default, linear, llama3, yarn")
    return Rope(
        head_dim, told.get("rope_theta", 10000.0), "none" if kind == "default" else kind, told.get("factor", 1.0),
        told.get("original_max_position_embeddings") or context,
        low=told.get("low_freq_factor", 1.0), high=told.get("high_freq_factor", 4.0),
        fast=told.get("beta_fast") or 32.0, slow=told.get("beta_slow") or 1.0,
        attention=told.get("attention_factor"),
    )  # fmt: skip
