"""What a request's fields are told when they are not what they should be."""

from __future__ import annotations

import math

import pytest

from manygrad.llm.serve.errors import ApiError
from manygrad.llm.serve.fields import Fields


@pytest.mark.parametrize(
    "given, told", [(math.nan, "nan"), (math.inf, "inf"), (True, "a truth value"), ("1", "a text"), ([], "a list")]
)
def test_a_number_that_is_none_is_named(given: object, told: str) -> None:
    with pytest.raises(ApiError, match=f"^temperature: a number is expected, not {told}$"):
        Fields({"temperature": given}).number("temperature", 0, 2)
