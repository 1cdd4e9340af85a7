"""Chat templates: Jinja's language with what Hugging Face's `apply_chat_template` adds to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks what the model says, for training: here it is that text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(x: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
            sort_keys: bool = False) -> str:  # fmt: skip
    """As it is: Jinja's own writes `<` and `'` as a page needs them."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: str) -> None:
    raise ValueError(f"the chat template refuses these messages: {message}")


def render(template: str, messages: Sequence[Mapping[str, Any]], bos: str, eos: str) -> str:
    """The messages as text, up to where the model answers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    # (tools and documents are there for all templates, as None)
    return environment.from_string(template).render(
        messages=messages, tools=None, documents=None, add_generation_prompt=True, bos_token=bos, eos_token=eos
    )
