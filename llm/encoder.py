"""Encoders of BERT's kind (Devlin et al., arXiv 1810.04805) for embeddings of sentences, such as MiniLM: the mean over
a text's tokens, of length 1. Parameters have Hugging Face's names and shapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from manygrad import Tensor, nn
from manygrad.llm import tokenizer, weights
from manygrad.llm.load import find
from manygrad.llm.model import Give, linear
from manygrad.llm.tokenizer import Tokenizer
from manygrad.nn import functional as F

ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}  # to F.gelu's approximation


@dataclass(frozen=True)
class EncoderConfig:
    vocabulary: int
    dim: int
    layers: int
    heads: int
    hidden: int
    context: int  # tokens of a text, at most
    norm_eps: float
    gelu: str


def from_json(told: Mapping[str, Any], most: int | None = None) -> EncoderConfig:
    """Configuration of a config.json; `most`: tokens that the model is to be given, where a file beside it says so."""
    if told.get("model_type") != "bert" or told.get("hidden_act", "gelu") not in ACTIVATIONS:
        raise ValueError(
            f"config.json is of a model of the kind {told.get('model_type')!r} with {told.get('hidden_act')!r}; "
            f"encoders are known of the kind 'bert' with {', '.join(ACTIVATIONS)}"
        )
    if told.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError(f"position_embedding_type {told['position_embedding_type']!r} is not known, absolute is")
    missing = [k for k in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads") if k not in told]
    if missing:
        raise ValueError(f"config.json does not say {', '.join(missing)}")
    context = told.get("max_position_embeddings", 512)
    return EncoderConfig(
        told["vocab_size"], told["hidden_size"], told["num_hidden_layers"], told["num_attention_heads"],
        told.get("intermediate_size", 4 * told["hidden_size"]), min(context, most or context),
        told.get("layer_norm_eps", 1e-12), ACTIVATIONS[told.get("hidden_act", "gelu")],
    )  # fmt: skip


class EncoderNorm(nn.Module):
    def __init__(self, give: Give, name: str, c: EncoderConfig):
        self.weight, self.bias = (
            nn.Parameter(give(f"{name}.{part}", (c.dim,)).float(), requires_grad=False) for part in ("weight", "bias")
        )
        self.eps = c.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


class Texts(NamedTuple):
    """Where texts are in rows of tokens (`packing.py`)."""

    seen: Tensor  # (rows, texts, width): which tokens are there
    at: Tensor  # (rows, texts * width): each one's number in its row
    back: Tensor  # (rows, tokens): the other way round

    def apart(self, x: Tensor) -> Tensor:
        """(rows, tokens, dim) -> (rows, texts * width, dim)."""
        return _taken(x, self.at)

    def together(self, x: Tensor) -> Tensor:
        return _taken(x, self.back)


def _taken(x: Tensor, at: Tensor) -> Tensor:
    return x.gather(1, at.unsqueeze(-1).expand(*at.shape, x.shape[-1])).contiguous()


class EncoderLayer(nn.Module):
    def __init__(self, c: EncoderConfig, give: Give, name: str):
        self.heads, self.gelu = c.heads, c.gelu
        inner = f"{name}.attention.self"
        self.query, self.key, self.value = (
            linear(give, f"{inner}.{n}", c.dim, c.dim) for n in ("query", "key", "value")
        )
        self.attended = linear(give, f"{name}.attention.output.dense", c.dim, c.dim)
        self.attended_norm = EncoderNorm(give, f"{name}.attention.output.LayerNorm", c)
        self.up = linear(give, f"{name}.intermediate.dense", c.dim, c.hidden)
        self.down = linear(give, f"{name}.output.dense", c.hidden, c.dim)
        self.norm = EncoderNorm(give, f"{name}.output.LayerNorm", c)

    def forward(self, x: Tensor, texts: Texts) -> Tensor:
        """(rows, tokens, dim) -> the same."""
        rows, _, dim = x.shape
        q, k, v = (
            texts.apart(f(x)).reshape(rows, *texts.seen.shape[1:], self.heads, dim // self.heads).transpose(2, 3)
            for f in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, texts.seen.unsqueeze(2).unsqueeze(2))
        y = texts.together(y.transpose(2, 3).reshape(rows, -1, dim))
        x = self.attended_norm(x + self.attended(y))
        return self.norm(x + self.down(F.gelu(self.up(x), approximate=self.gelu)))


class Encoder(nn.Module):
    def __init__(self, config: EncoderConfig, give: Give, positions: int, kinds: int):
        """`positions` and `kinds`: heights of the tables of positions and of kinds of tokens."""
        c, top = config, "embeddings"
        self.config = config
        self.words = nn.Parameter(give(f"{top}.word_embeddings.weight", (c.vocabulary, c.dim)), requires_grad=False)
        places = give(f"{top}.position_embeddings.weight", (positions, c.dim)).float()
        kind = give(f"{top}.token_type_embeddings.weight", (kinds, c.dim)).float()
        self.places = nn.Parameter((places + kind[0]).contiguous(), requires_grad=False)  # all tokens are of kind 0
        self.norm = EncoderNorm(give, f"{top}.LayerNorm", c)
        self.layers = [EncoderLayer(c, give, f"encoder.layer.{i}") for i in range(c.layers)]

    def forward(
        self, tokens: Tensor, places: Tensor, back: Tensor, begins: Tensor, lengths: Tensor, width: int
    ) -> Tensor:
        """Packed texts (`packing.py`) of at most `width` tokens -> (rows, texts, dim), each of length 1."""
        count = tokens.arange(width)
        seen = count < lengths.unsqueeze(-1)
        at = (begins.unsqueeze(-1) + count).clamp(0, tokens.shape[1] - 1).flatten(1)
        texts = Texts(seen, at.contiguous(), back.clamp(0, at.shape[1] - 1).contiguous())
        x = self.norm(F.embedding(tokens, self.words).float() + F.embedding(places, self.places))
        for layer in self.layers:
            x = layer(x, texts)
        each = texts.apart(x).reshape(*seen.shape, x.shape[-1])
        mean = seen.unsqueeze(-1).where(each, 0.0).sum(2) / lengths.unsqueeze(-1)
        return F.normalize(mean, dim=-1, eps=1e-12)


def load_encoder(name: str, dtype: str = "float32") -> tuple[Encoder, Tokenizer]:
    """An encoder by its folder or name, with parameters that are not computed yet."""
    path = find(name)
    told = read(path / "config.json")
    if not told:
        raise ValueError(f"{path} has no config.json; an encoder is a folder with it, *.safetensors and tokenizer.json")
    pooling = read(path / "1_Pooling" / "config.json")
    if pooling and not pooling.get("pooling_mode_mean_tokens"):
        raise ValueError(f"{path} pools in another way than by the mean over tokens")
    config = from_json(told, read(path / "sentence_bert_config.json").get("max_seq_length"))
    given = weights.Weights(weights.read_tensors(path, "bert."), dtype)
    model = Encoder(config, given, told.get("max_position_embeddings", 512), told.get("type_vocab_size", 2))
    given.check()
    return model, tokenizer.from_folder(path)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
