"""Chat templates render as Hugging Face's `apply_chat_template` renders them."""

from __future__ import annotations

from datetime import datetime

import pytest

from manygrad.llm.chat_template import render

MESSAGES = [{"role": "user", "content": "a<b & 'c' > \u00e9"}, {"role": "assistant", "content": "d"}]


@pytest.mark.parametrize(
    "template, want",
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "a<b & \'c\' > \u00e9"}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": [\n    2\n  ]\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{% for m in messages %}{% if m.role == 'assistant' %}[{% generation %}{{ m.content }}{% endgeneration %}]"
         "{% endif %}{% endfor %}", "[d]"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
         "assistant"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        ("{% if tools is not none or documents is not none %}1{% endif %}{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
    ],
)  # fmt: skip
def test_what_templates_use(template: str, want: str) -> None:
    assert render(template, MESSAGES, "<s>", "</s>") == want


def test_what_templates_may_not() -> None:
    with pytest.raises(ValueError, match="the chat template refuses these messages: roles alternate"):
        render("{{ raise_exception('roles alternate') }}", MESSAGES, "", "")
    with pytest.raises(Exception, match="unsafe"):
        render("{{ messages.__class__.__mro__ }}", MESSAGES, "", "")
