"""A model of 61 words, one a letter, as Hugging Face's files have it."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from manygrad import Tensor
from manygrad.nn.state import safe_save
from tests.end_to_end.llm.variants import config, weight

SHAPES = json.loads((Path(__file__).parent / "golden" / "variants.json").read_text())["llama"]["shapes"]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ012345"


def write_model(path: Path, context: int = 128) -> Path:
    (path / "config.json").write_text(json.dumps({**config("llama"), "max_position_embeddings": context}))
    safe_save({n: Tensor(weight(n, tuple(s))) for n, s in SHAPES.items()}, path / "model.safetensors")
    words = Tokenizer(models.BPE({w: i for i, w in enumerate(["<pad>", "<s>", "</s>", *LETTERS])}, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words.add_special_tokens(["<pad>", "<s>", "</s>"])
    words.save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "</s>"}))
    return path
