"""Errors of requests, as OpenAI's clients expect it: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def readable(text: str) -> str:
    """Halves of characters, which a request's field names may have, as `\\ud800`: an answer is UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


class ApiError(Exception):
    """An answer other than 200. `param`: the field of the request that is at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code = status, readable(message), code
        self.param = param and readable(param)

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Requests that are too many, or too early, may come again."""
        return {"retry-after": "1"} if self.status in (429, 503) else {}
