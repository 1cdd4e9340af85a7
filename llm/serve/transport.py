"""Bodies in, events out, and what is done for a client that is not there any more: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from manygrad.llm.serve.errors import ApiError

T = TypeVar("T")


class Gone(Exception):
    """The client has closed its connection."""


async def body_of(request: Request, most: int, within_s: float) -> bytes:
    """At most `most` bytes of JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # (which pages of other sites cannot send)
        raise ApiError(415, f"the body's content-type is {kind[:64]!r}; application/json is expected")
    told = request.headers.get("content-length", "0")
    too_long = ApiError(413, f"the body is longer than {most} bytes", code="body_too_large")
    if told.isdecimal() and int(told) > most:
        raise too_long
    found = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for part in request.stream():
                found += part
                if len(found) > most:
                    raise too_long
    except ClientDisconnect:
        raise Gone from None
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive in {within_s:g} s", code="timeout") from None
    return bytes(found)


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(receive: Any, work: Awaitable[T]) -> T:
    """The result of `work`; it is cancelled, and this raises `Gone`, when the client goes away."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        for left in (task, gone):
            left.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


class Events(Response):
    """A stream of server-sent events, made as they are sent."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], finish: Any):
        """`finish()` is called at the end, whichever that is."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.events, self.finish = events, finish

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def pump() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self.events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            with suppress(Gone):
                await while_there(receive, pump())
        finally:
            self.finish()
