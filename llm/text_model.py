"""A language model that writes one text at a time: a decoder, its tokenizer and a KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from manygrad import Tensor, nn, world
from manygrad.llm.engine.writer import BLOCKS, SamplingParams, Writer
from manygrad.llm.load import load
from manygrad.llm.sharding import rules
from manygrad.llm.stream import TextStream

LENGTH = 1024  # tokens of a text and its prompt that there is room for, unless more are asked for


class TextModel:
    """`model` by its name or path, cut over the devices of this world.

    `dtype`, of weights: as the file has them, unless one is named; `activations`: float32, int8 or bfloat16;
    `cache_dtype`, of keys and values. Raises ValueError where there is no such model.
    """

    def __init__(
        self, model: str = "smollm2", dtype: str | None = None, activations: str = "float32",
        cache_dtype: str | None = None,
    ) -> None:  # fmt: skip
        self.decoder, self.tokenizer = load(model, dtype, activations)
        self.cache_dtype = cache_dtype
        self.length = 0  # tokens of a text that there is room for
        self.made = 0  # tokens of the last text

    def encode(self, text: str, chat: bool = False, system: str = "") -> list[int]:
        """Tokens of a text to go on with, or, with `chat`, of a message to answer, after the message `system`."""
        if not chat:
            return self.tokenizer.encode(text)
        before = [{"role": "system", "content": system}] if system else []
        return self.tokenizer.chat([*before, {"role": "user", "content": text}])

    def reserve(self, tokens: int) -> None:
        """Makes room for texts of so many tokens, prompts with them, and loads the weights. Once for a model: later
        texts have at most as many."""
        context = self.decoder.config.context
        if tokens > context:
            raise ValueError(f"{tokens} tokens do not fit the model's context of {context}")
        if self.length:
            if tokens > self.length:
                raise ValueError(f"{tokens} tokens do not fit the {self.length} that reserve() made room for")
            return
        # few sizes, so that kernels are found again, with the block that the prompt's end fills up
        self.length = max(256, 1 << (tokens + BLOCKS[-1] - 1).bit_length())
        self.decoder.reserve(1, self.length, self.cache_dtype)
        if len(world.devices) > 1:
            nn.shard_rules(self.decoder, rules(self.decoder, world.devices), world.devices)
        Tensor.realize(*self.decoder.parameters(), *self.decoder.buffers())

    def generate(
        self, prompt: str | Sequence[int], max_tokens: int = 64, sampling: SamplingParams | None = None,
        stop: Sequence[str] = (), ignore_end: bool = False,
    ) -> Iterator[str]:  # fmt: skip
        """The text that follows `prompt`, or its tokens, a piece for each token that is made: empty where a token ends
        inside of a character, or may begin a text of `stop`. All ranks have to take all of them. ValueError where it
        does not fit. The first call makes room for texts of `LENGTH` tokens, or longer ones if it needs them, unless
        `reserve` has made it."""
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise ValueError("the prompt is empty, and this model needs a token to go on from")
        usual = 0 if self.length else min(LENGTH, self.decoder.config.context)
        self.reserve(max(len(ids) + max_tokens, usual))
        writer = Writer(self.decoder, self.length, sampling or SamplingParams())
        return self._pieces(writer, TextStream(self.tokenizer, stop, ids), ids, max_tokens, ignore_end)

    def _pieces(
        self, writer: Writer, stream: TextStream, ids: Sequence[int], max_tokens: int, ignore_end: bool
    ) -> Iterator[str]:
        token, self.made = writer.start(ids), 1
        while ignore_end or token not in self.tokenizer.ends:
            yield stream.add(token)
            if stream.stopped or self.made == max_tokens:
                break
            token, self.made = writer.write(token), self.made + 1
        yield stream.end()
