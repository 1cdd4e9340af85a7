"""A request's body, field by field: what is there has to be what it should be, and nothing else may be there."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from manygrad.llm.serve.errors import ApiError

DEPTH = 64  # of brackets in brackets


def parse(body: bytes) -> dict[str, Any]:
    """A JSON object in UTF-8."""
    try:
        found = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ApiError(400, f"the body is {kind(found)}; a JSON object is expected")
    return found


def kind(x: Any) -> str:
    names = {
        bool: "a truth value",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return "null" if x is None else names[type(x)]


class Fields:
    """Each is asked for once, by what it should be; `done` refuses those that nobody has asked for."""

    def __init__(self, given: Mapping[str, Any], where: str = ""):
        self.given, self.where, self.asked = given, where, set[str]()

    def wrong(self, name: str, message: str) -> ApiError:
        return ApiError(400, f"{self.where}{name}: {message}", param=self.where + name)

    def take(self, name: str) -> Any:
        """As it is; None where it is not there."""
        self.asked.add(name)
        return self.given.get(name)

    def number(self, name: str, least: float, most: float, default: Any = None, above: bool = False) -> Any:
        """A number in least..most; `above`: and not `least` itself."""
        x = self.take(name)
        if x is None:
            return default
        # (a whole number may be larger than any float)
        if isinstance(x, bool) or not isinstance(x, (int, float)) or (isinstance(x, float) and not math.isfinite(x)):
            raise self.wrong(name, f"a number is expected, not {x if isinstance(x, float) else kind(x)}")
        if not least <= x <= most or (above and x == least):
            told = f"{str(x)[:32]} lies outside {least}..{most}"
            raise self.wrong(name, told + (f", without {least}" if above else ""))
        return float(x)

    def integer(self, name: str, least: int, most: int, default: Any = None) -> Any:
        x = self.take(name)
        if x is None:
            return default
        if isinstance(x, bool) or not isinstance(x, int):
            raise self.wrong(name, f"a whole number is expected, not {kind(x)}" if not isinstance(x, float)
                             else f"a whole number is expected, not {x}")  # fmt: skip
        if not least <= x <= most:
            raise self.wrong(name, f"it lies outside {least}..{most}")
        return x

    def flag(self, name: str) -> bool:
        x = self.take(name)
        if x is not None and not isinstance(x, bool):
            raise self.wrong(name, f"true or false is expected, not {kind(x)}")
        return bool(x)

    def text(self, name: str, default: str | None = None) -> str:
        x = self.take(name)
        x = default if x is None else x
        if not isinstance(x, str):
            raise self.wrong(name, f"a text is expected, not {kind(x)}")
        return self.unicode(name, x)

    def unicode(self, name: str, x: str) -> str:
        """JSON may name halves of characters, which are no text."""
        try:
            x.encode("utf-8")
        except UnicodeEncodeError:
            raise self.wrong(name, "a half of a surrogate pair stands alone") from None
        return x

    def inner(self, name: str) -> Fields:
        x = self.take(name)
        if x is not None and not isinstance(x, dict):
            raise self.wrong(name, f"an object is expected, not {kind(x)}")
        return Fields(x or {}, f"{self.where}{name}.")

    def only(self, name: str, *allowed: Any) -> None:
        """A field of OpenAI's that is served for these values alone."""
        x = self.take(name)
        if x is not None and not any(type(x) is type(a) and x == a for a in allowed):
            raise self.wrong(
                name, "this server does not do that" + (f"; only {json.dumps(allowed[0])}" if allowed else "")
            )

    def done(self) -> None:
        left = sorted(k for k in self.given.keys() - self.asked if self.given[k] is not None)  # (null: not given)
        if left:
            raise self.wrong(left[0][:64], "this server knows no such field")
