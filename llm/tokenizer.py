"""Text to token numbers and back, from GGUF's metadata or from tokenizer.json; chat templates.

GGUF tells the words and how they are joined, not how text is split before that: `tokenizer.ggml.pre` names a known way
(`SPLITS`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import itemgetter
from pathlib import Path
from typing import Any

try:
    import tokenizers
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
except ImportError:
    raise SystemExit('the tokenizer comes with the package tokenizers: pip install ".[text]"') from None

LETTERS, SLACK = 16, 16  # of a token: few have more; tokens that a word which is cut may have more than whole
CONTROL, DEFINED = 3, 4  # kinds of tokens in GGUF
ENDS = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "</s>")
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(digits: str) -> Any:
    words = pre_tokenizers.Split(Regex(WORDS.format(digits=digits)), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


SPLITS: Mapping[str, Any] = {  # by tokenizer.ggml.pre
    "gpt-2": _gpt2,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()]),
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
    "llama3": lambda: _split(r"\p{N}{1,3}"),
    "qwen2": lambda: _split(r"\p{N}"),
}


@dataclass(frozen=True)
class Tokenizer:
    inner: tokenizers.Tokenizer
    ends: frozenset[int]  # a text is over after one of these
    bos: int | None = None  # what every text begins with, where `inner` does not add it
    template: str | None = None
    names: tuple[str, str] = ("", "")  # the tokens for begin and end, for templates

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """The tokens of a text; of one that has more than `most`, more than `most` of them: whoever asks will refuse
        it, and need not wait for the others."""
        ids = self.inner.encode(self._begin(text, most)).ids
        return ids if self.bos is None else [self.bos, *ids]

    def encode_all(self, texts: Sequence[str], most: int | None = None) -> list[list[int]]:
        """As `encode`, of several texts on all cores."""
        begin = [] if self.bos is None else [self.bos]
        return [[*begin, *found.ids] for found in self.inner.encode_batch([self._begin(t, most) for t in texts])]

    def _begin(self, text: str, most: int | None) -> str:
        """`text`, or a beginning of it that has more than `most` tokens already."""
        if most is not None:
            size = LETTERS * (most + SLACK)
            while size < len(text):
                # (where it is cut, there may be a few more than the whole text has)
                if len(self.inner.encode(text[:size], add_special_tokens=False).ids) > most + SLACK:
                    return text[:size]
                size *= 4
        return text

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, str]], most: int | None = None) -> list[int]:
        """Messages {"role": ..., "content": ...} as the model was taught them, up to where it answers; `most` as for
        `encode`."""
        if self.template is None:
            raise ValueError("this model has no chat template; give it a text to go on with, without --chat")
        try:
            from manygrad.llm.chat_template import render
        except ImportError:
            raise SystemExit('chat templates need the package jinja2: pip install ".[text]"') from None
        text = render(self.template, messages, *self.names)
        return self.inner.encode(self._begin(text, most), add_special_tokens=False).ids


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata."""

    def value(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    kind, words = value("model"), value("tokens")
    if kind not in ("gpt2", "llama") or not words:
        raise ValueError(f"the GGUF file has a tokenizer of the kind {kind!r}; known are gpt2 and llama")
    numbers = dict(zip(words, range(len(words))))
    inner = _bytes(numbers, value("merges", []), value("pre", "")) if kind == "gpt2" else _sentences(words, value)
    added = [(w, k) for w, k in zip(words, value("token_type", [])) if k in (CONTROL, DEFINED)]
    for flag in (True, False):
        found = [w for w, k in added if k == (CONTROL if flag else DEFINED)]
        inner.add_tokens([AddedToken(w, special=flag, normalized=False) for w in found])
    bos, eos = value("bos_token_id"), value("eos_token_id")
    adds = value("add_bos_token", kind == "llama" or value("pre") == "llama-bpe")
    ends = {i for i in (eos, value("eot_token_id")) if i is not None} | {numbers[w] for w in ENDS if w in numbers}
    return Tokenizer(
        inner, frozenset(ends), bos if adds else None, metadata.get("tokenizer.chat_template"),
        ("" if bos is None else words[bos], "" if eos is None else words[eos]),
    )  # fmt: skip


@dataclass(frozen=True)
class _Pairs(Sequence[tuple[str, str]]):
    """Merges as pairs of words, each made when it is read: all at once they take more memory than what is made of
    them."""

    merges: Sequence[str]

    def __len__(self) -> int:
        return len(self.merges)

    def __getitem__(self, i: Any) -> Any:
        return tuple(self.merges[i].split(" "))

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return map(itemgetter(0, 2), map(str.partition, self.merges, repeat(" ")))  # (no bytecode for each)


def _bytes(numbers: dict[str, int], merges: Sequence[str], pre: str) -> tokenizers.Tokenizer:
    """GPT-2's: pairs of bytes, joined in the order of `merges`."""
    if pre not in SPLITS:
        raise ValueError(f"text is split before {pre!r} (tokenizer.ggml.pre); known are {', '.join(SPLITS)}")
    if not set(map(str.count, merges, repeat(" "))) <= {1}:
        raise ValueError("the GGUF file has merges that are not two words with a space between them")
    try:
        model = models.BPE(numbers, _Pairs(merges), ignore_merges=pre in ("llama-bpe", "llama3"))
    except Exception as error:  # (the package has no kind of its own)
        raise ValueError(f"the GGUF file's tokenizer cannot be made: {error}") from None
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer, inner.decoder = SPLITS[pre](), decoders.ByteLevel()
    return inner


def _sentences(words: Sequence[str], value: Any) -> tokenizers.Tokenizer:
    """SentencePiece's: of all neighbours that make a word, the one of the highest score is joined first."""
    scores, vocabulary = value("scores"), {w: i for i, w in enumerate(words)}
    pairs = [
        (scores[i], word[:at], word[at:])
        for i, word in enumerate(words)
        for at in range(1, len(word))
        if word[:at] in vocabulary and word[at:] in vocabulary
    ]
    pairs.sort(key=lambda p: (-p[0], vocabulary[p[1]], vocabulary[p[2]]))
    unknown = words[value("unknown_token_id", 0)]
    merges = [(a, b) for _, a, b in pairs]
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = value("add_space_prefix", True)
    inner.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return inner


def from_folder(path: Path) -> Tokenizer:
    """tokenizer.json with what stands beside it."""
    if not (path / "tokenizer.json").is_file():
        raise ValueError(f"{path} has no tokenizer.json")
    inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    inner.no_padding()
    inner.no_truncation()

    def told(name: str) -> dict[str, Any]:
        file = path / name
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    settings, ends = told("tokenizer_config.json"), set()
    for file in ("config.json", "generation_config.json"):
        found = told(file).get("eos_token_id")
        ends |= set(found if isinstance(found, list) else [] if found is None else [found])
    ends |= {i for i in map(inner.token_to_id, ENDS) if i is not None}
    template = settings.get("chat_template")
    if template is None and (path / "chat_template.jinja").is_file():
        template = (path / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, list):  # several, by name
        template = next((t["template"] for t in template if t["name"] == "default"), None)
    bos, eos = (t.get("content", "") if isinstance(t, dict) else t or ""
                for t in (settings.get("bos_token"), settings.get("eos_token")))  # fmt: skip
    return Tokenizer(inner, frozenset(ends), None, template, (bos, eos))
