"""The HTTP application: routes, admission, deadlines. Resources live in the app, none in module globals."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from retriever_server import schemas
from retriever_server.batching import Batcher, Ticket
from retriever_server.cache import ResultCache
from retriever_server.endpoint import Answer, Endpoint, Handler, Request, gone
from retriever_server.errors import RequestError
from retriever_server.metrics import Metrics
from retriever_server.reranking import rerank
from retriever_server.retriever import Reranker, Retriever, ScoredPassage
from retriever_server.schemas import Limits, SearchRequest
from retriever_server.threads import Threads

logger = logging.getLogger(__name__)

_SLOW_S = 0.05
"""A request that takes longer than this is watched for its deadline and for a client that goes away."""

_MAX_DIGITS = 12
"""Of a deadline in milliseconds."""

Parse = Callable[[bytes, Limits], SearchRequest]
Render = Callable[[Sequence[Sequence[ScoredPassage]], bool], bytes]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    limits: Limits = field(default_factory=Limits)
    timeout_s: float = 30.0
    """Longest a request may take; the answer is 504 a little earlier. A request may ask for less."""
    max_batch: int = 256
    max_queued: int = 20_000
    """Queries waiting; beyond it requests are refused with 503 and Retry-After."""
    cache_bytes: int = 256 << 20
    token: str | None = None
    """Bearer token that every route but /health and /ready asks for."""
    warm_up_query: str = "what is the capital of france"


def create_app(
    retriever: Retriever,
    settings: ServerSettings | None = None,
    *,
    reranker: Reranker | None = None,
    on_ready: Callable[[str | None], None] | None = None,
) -> Starlette:
    """The service over one retriever.

    Args:
        on_ready: called once after the warm-up query, with None, or with the cause when it failed.
    """
    service = RetrievalService(retriever, settings or ServerSettings(), reranker, on_ready)
    search, public = service.search, True
    routes = [
        service.route("POST", "/retrieve", search(schemas.parse_retrieve, schemas.render_retrieve)),
        service.route("POST", "/search", search(schemas.parse_search, schemas.render_search)),
        service.route("POST", "/batch_search", search(schemas.parse_batch_search, schemas.render_batch_search)),
        service.route("GET", "/health", service.health, public),
        service.route("GET", "/healthz", service.health, public),
        service.route("GET", "/ready", service.ready, public),
        service.route("GET", "/info", service.info),
        service.route("GET", "/metrics", service.metrics_page),
    ]
    if reranker is not None:
        routes.append(service.route("POST", "/rerank", service.rerank))
    return _App(routes, service)


class _App(Starlette):
    """Starlette, but a known route is run at once, without middleware or a search for it."""

    def __init__(self, routes: list[Route], service: RetrievalService) -> None:
        super().__init__(routes=routes, lifespan=service.lifespan, exception_handlers={HTTPException: _not_found})
        self._endpoints = {(method, route.path): route.endpoint for route in routes for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            endpoint = self._endpoints.get((scope["method"], scope["path"]))
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


class RetrievalService:
    def __init__(
        self,
        retriever: Retriever,
        settings: ServerSettings,
        reranker: Reranker | None,
        on_ready: Callable[[str | None], None] | None,
    ) -> None:
        self._retriever = retriever
        self._settings = settings
        self._reranker = reranker
        self._on_ready = on_ready
        self._metrics = Metrics()
        self._not_ready: str | None = "the warm-up query has not been answered yet"
        self._batcher: Batcher
        self._rerank_thread: Threads
        self._num_reranked = 0

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        settings = self._settings
        self._batcher = Batcher(
            self._retriever,
            ResultCache(settings.cache_bytes),
            self._metrics,
            max_batch=settings.max_batch,
            max_queued=settings.max_queued,
        )
        self._batcher.start()
        self._rerank_thread = Threads("rerank")
        warm_up = asyncio.create_task(self._warm_up())
        yield
        self._not_ready = "the server is shutting down"
        warm_up.cancel()
        await self._batcher.close()
        self._rerank_thread.close()

    async def _warm_up(self) -> None:
        try:
            await self._batcher.submit([self._settings.warm_up_query], self._settings.limits.default_top_k).future
            self._not_ready = None
        except RequestError as error:
            self._not_ready = f"the warm-up query failed: {error}"
        if self._on_ready is not None:
            self._on_ready(self._not_ready)

    def route(self, method: str, path: str, handler: Handler, public: bool = False) -> Route:
        token = None if public else self._settings.token
        return Route(path, Endpoint(path, handler, self._metrics, token), methods=[method])

    def search(self, parse: Parse, render: Render) -> Handler:
        """A handler that reads one request form and writes the matching answer form."""
        limits = replace(self._settings.limits, corpus_size=self._retriever.describe().get("rows"))
        observe = self._metrics.request_seconds.observe

        async def handler(request: Request) -> Answer:
            started = time.monotonic()
            asked = parse(await request.body(limits.max_body_bytes, self._settings.timeout_s), limits)
            timeout_s = self._timeout_s(request, asked.timeout_s)
            ticket = self._batcher.submit(asked.queries, asked.top_k)
            if not ticket.future.done():
                await self._wait(ticket, request, timeout_s)
            body = render(ticket.future.result(), asked.return_scores)
            observe(time.monotonic() - started)
            return Answer(body)

        return handler

    async def rerank(self, request: Request) -> Answer:
        assert self._reranker is not None
        body = await request.body(self._settings.limits.max_body_bytes, self._settings.timeout_s)
        asked = schemas.parse_rerank(body, self._settings.limits)
        if self._num_reranked and self._num_reranked + len(asked.queries) > self._settings.max_queued:
            raise RequestError(503, f"{self._num_reranked:,} queries wait", reason="busy", retry_after_s=1)
        self._num_reranked += len(asked.queries)
        given_up = threading.Event()
        work = asyncio.wrap_future(self._rerank_thread.submit(rerank, self._reranker, asked, given_up))
        try:
            results = await asyncio.wait_for(work, self._timeout_s(request, asked.timeout_s))
        except TimeoutError:
            raise _late() from None
        finally:
            given_up.set()
            self._num_reranked -= len(asked.queries)
        return Answer(schemas.render_retrieve(results, asked.return_scores))

    async def health(self, request: Request) -> Answer:
        return Answer(b'{"status":"ok"}')

    async def ready(self, request: Request) -> Answer:
        reason = self._not_ready
        if reason is None and self._batcher.running_s > 2 * self._settings.timeout_s:
            reason = f"one search has been running for {self._batcher.running_s:.0f} s"
        if reason is not None:
            return Answer(orjson.dumps({"status": "not ready", "detail": reason}), 503)
        return Answer(b'{"status":"ready"}')

    async def info(self, request: Request) -> Answer:
        names = ("bm25s", "faiss-cpu", "torch", "transformers", "qdrant-client", "orjson", "starlette", "uvicorn")
        limits = self._settings.limits
        return Answer(
            orjson.dumps(
                {
                    **self._retriever.describe(),
                    "topk": limits.default_top_k,
                    "max_topk": limits.max_top_k,
                    "max_queries": limits.max_queries,
                    "versions": {name: found for name in names if (found := _version(name))},
                }
            )
        )

    async def metrics_page(self, request: Request) -> Answer:
        return Answer(self._metrics.render(), content_type=b"text/plain; version=0.0.4; charset=utf-8")

    def _timeout_s(self, request: Request, asked_s: float | None) -> float:
        header = request.header(b"x-request-timeout-ms")
        if asked_s is None and header is not None:
            if not header.isdigit() or len(header) > _MAX_DIGITS or int(header) == 0:
                raise RequestError(422, "X-Request-Timeout-Ms must be a whole number above 0", reason="invalid")
            asked_s = int(header) / 1000
        timeout_s = self._settings.timeout_s if asked_s is None else min(asked_s, self._settings.timeout_s)
        return timeout_s - min(0.5, 0.05 * timeout_s)

    async def _wait(self, ticket: Ticket, request: Request, timeout_s: float) -> None:
        """Wait for the ticket. Most are answered before anything else must be set up."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        watchers: list[asyncio.Task[None]] = []
        slow = loop.call_later(
            min(_SLOW_S, timeout_s), lambda: watchers.append(loop.create_task(_watch(ticket, request, end)))
        )
        try:
            await ticket.future
        finally:
            slow.cancel()
            for watcher in watchers:
                watcher.cancel()


async def _watch(ticket: Ticket, request: Request, end: float) -> None:
    """Fail the ticket when its deadline passes or its client goes away, whichever comes first."""
    try:
        async with asyncio.timeout_at(end):
            await request.disconnected()
        ticket.fail(gone())
    except TimeoutError:
        ticket.fail(_late())


def _late() -> RequestError:
    return RequestError(504, "the deadline passed before the queries were searched", reason="deadline")


async def _not_found(request: StarletteRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = orjson.dumps({"detail": f"{request.method} {request.url.path}: {error.detail}"})
    return Response(detail, error.status_code, error.headers, media_type="application/json")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
