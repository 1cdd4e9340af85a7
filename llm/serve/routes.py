"""The paths of the server: OpenAI's, /health, /metrics, and a page to chat with."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from manygrad.llm.serve import answers, api
from manygrad.llm.serve.completions import Completion, CompletionPiece
from manygrad.llm.serve.errors import ApiError
from manygrad.llm.serve.fields import parse
from manygrad.llm.serve.metrics import Metrics
from manygrad.llm.serve.scheduler import EmbedRequest, Scheduler
from manygrad.llm.serve.transport import Events, Gone, body_of, while_there
from manygrad.llm.tokenizer import Tokenizer

PAGE = Path(__file__).with_name("page.html")
CHUNK = 16  # texts for vectors at once; others are written in between


@dataclass(frozen=True)
class Limits:
    body: int = 1 << 20  # bytes
    body_s: float = 10.0  # until it has arrived
    request_s: float = 600.0  # until the answer is complete


@dataclass
class Service:
    scheduler: Scheduler
    tokenizer: Tokenizer
    model: str  # its name
    max_model_len: int  # tokens of a prompt and its text together
    slots: int  # of a replica
    pages: int  # likewise
    embedder: str = ""  # the name of the model for vectors; "": there is none
    embed_tokenizer: Tokenizer | None = None  # that model's
    embed_room: int = 0  # tokens of a text that it takes
    limits: Limits = Limits()
    metrics: Metrics = field(default_factory=Metrics)
    origins: Sequence[str] = ()  # of pages elsewhere that may ask
    created: int = field(default_factory=lambda: int(time.time()))

    def application(self) -> Starlette:
        async def starting(app: Starlette) -> AsyncIterator[None]:
            self.scheduler.loop = asyncio.get_running_loop()
            yield

        def post(path: str, answer: Any) -> Route:
            return Route(path, answer, methods=["POST"])

        found = Starlette(
            routes=[
                Route("/", self.page), Route("/health", self.health), Route("/metrics", self.show_metrics),
                Route("/v1/models", self.models), Route("/v1/models/{name:path}", self.one_model),
                post("/v1/completions", self.completions), post("/v1/chat/completions", self.chat),
                post("/v1/embeddings", self.embeddings),
            ],
            middleware=[
                Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
                for origins in [list(self.origins)] if origins
            ],
            lifespan=asynccontextmanager(starting),
            exception_handlers={
                ApiError: self.refuse, HTTPException: self.refuse_path, Gone: self.nobody, Exception: self.broken,
            },
        )  # fmt: skip
        found.router.redirect_slashes = False  # (a client would send the body again, or not: 404 tells it the mistake)
        return found

    def _answer(self, request: Request, content: Any, status: int = 200, headers: Any = None) -> Response:
        self.metrics.requests[_path(request), status] += 1
        return JSONResponse(content, status, headers)

    async def refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return self._answer(request, error.body(), error.status, error.headers)

    async def refuse_path(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = ApiError(error.status_code, f"{request.method} {request.url.path[:64]}: {error.detail}")
        return self._answer(request, told.body(), told.status, error.headers)

    async def broken(self, request: Request, error: Exception) -> Response:
        """Our own mistake; its traceback is in the log."""
        return await self.refuse(request, ApiError(500, f"the server has made a mistake: {type(error).__name__}"))

    async def nobody(self, request: Request, error: Exception) -> Response:
        return self._answer(request, {}, 499)  # (which nobody reads)

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    async def health(self, request: Request) -> Response:
        state = self.scheduler.state
        return JSONResponse({"status": "ok" if state == "open" else state}, 200 if state == "open" else 503)

    async def show_metrics(self, request: Request) -> Response:
        scheduler = self.scheduler
        text = self.metrics.text(scheduler.reports, scheduler.placed, len(scheduler.waiting), self.slots, self.pages)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @property
    def names(self) -> list[str]:
        return [self.model, *([self.embedder] if self.embedder else [])]

    async def models(self, request: Request) -> Response:
        return self._answer(request, answers.models(self.names, self.created))

    async def one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.names:
            raise ApiError(404, f"there is no model {name[:64]!r} here", "model", "model_not_found")
        return self._answer(request, answers.model(name, self.created))

    async def completions(self, request: Request) -> Response:
        return await self._write(request, chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._write(request, chat=True)

    async def _write(self, request: Request, chat: bool) -> Response:
        given = parse(await body_of(request, self.limits.body, self.limits.body_s))
        # (long texts take their time to become tokens)
        asked = await asyncio.to_thread(api.writing, given, chat, self.model, self.tokenizer, self.max_model_len)
        answer = answers.Answer(secrets.token_hex(12), self.model, chat)
        writing = Completion(asked, self.scheduler, self.tokenizer, self.metrics, self.limits.request_s)
        try:
            if asked.stream:
                return await self._stream(request, writing, answer)
            texts, reasons = [""] * len(asked.requests), [""] * len(asked.requests)

            async def collect() -> None:
                async for piece in writing:
                    texts[piece.index] += piece.text
                    reasons[piece.index] = piece.reason

            await while_there(request.receive, collect())
        except BaseException:
            writing.leave()
            raise
        return self._answer(request, answer.whole(texts, reasons, answers.usage(asked.prompts, writing.written)))

    async def _stream(self, request: Request, writing: Completion, answer: answers.Answer) -> Response:
        """An error before the first piece has a status of its own."""
        pieces = aiter(writing)
        first: CompletionPiece = await while_there(request.receive, anext(pieces))
        self.metrics.requests[_path(request), 200] += 1

        async def events() -> AsyncIterator[bytes]:
            if answer.chat:
                for i in range(len(writing.asked.requests)):
                    yield answers.event(answer.first(i))
            yield answer.event(first.index, first.text, first.reason)
            try:
                async for piece in pieces:
                    yield answer.event(piece.index, piece.text, piece.reason)
            except ApiError as error:
                yield answers.event(error.body())
                return
            if writing.asked.usage:
                yield answers.event(answer.last(answers.usage(writing.asked.prompts, writing.written)))
            yield answers.event("[DONE]")

        return Events(events(), writing.leave)

    async def embeddings(self, request: Request) -> Response:
        given = parse(await body_of(request, self.limits.body, self.limits.body_s))
        if self.embed_tokenizer is None:
            raise ApiError(501, "this server has no model for vectors; start it with --embed-model minilm")
        texts, coded = await asyncio.to_thread(
            api.embedding, given, self.embedder, self.embed_tokenizer, self.embed_room
        )
        keys, out = self.scheduler.submit([tuple(texts[i : i + CHUNK]) for i in range(0, len(texts), CHUNK)])

        async def collect() -> dict[int, EmbedRequest]:
            found: dict[int, EmbedRequest] = {}
            while len(found) < len(keys):
                key, vectors = await out.get()
                if isinstance(vectors, ApiError):
                    raise vectors
                assert isinstance(vectors, EmbedRequest)
                found[key] = vectors
            return found

        try:
            async with asyncio.timeout(self.limits.request_s):
                found = await while_there(request.receive, collect())
        except TimeoutError:
            raise ApiError(408, f"the vectors took longer than {self.limits.request_s:g} s", code="timeout") from None
        finally:
            self.scheduler.leave(keys)
        rows = [row for key in keys for row in found[key].rows]
        self.metrics.prompt_tokens += (tokens := sum(v.tokens for v in found.values()))
        return self._answer(request, answers.vectors(rows, self.embedder, tokens, coded))


def _path(request: Request) -> str:
    """For the metrics: one name for all that is no path of ours."""
    path = request.url.path
    return path if path in ("/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/embeddings") else "other"
