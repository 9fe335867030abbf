"""The HTTP application: routes, admission, deadlines. Resources live in the app, none in module globals."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from retriever_server import schemas
from retriever_server.batching import Batcher, Ticket
from retriever_server.cache import ResultCache
from retriever_server.errors import RequestError
from retriever_server.metrics import Metrics
from retriever_server.reranking import rerank
from retriever_server.retriever import Reranker, Retriever, ScoredPassage
from retriever_server.schemas import Limits, SearchRequest

logger = logging.getLogger(__name__)

_DISCONNECT_CHECK_S = 0.05
"""A request that takes longer than this is watched for a client that went away."""
_CLOSED_BY_CLIENT = 499

Parse = Callable[[bytes, Limits], SearchRequest]
Render = Callable[[Sequence[Sequence[ScoredPassage]], bool], bytes]
Handler = Callable[[Request], Awaitable[Response]]


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
    routes = [
        service.route("/retrieve", service.search(schemas.parse_retrieve, schemas.render_retrieve), "POST"),
        service.route("/search", service.search(schemas.parse_search, schemas.render_search), "POST"),
        service.route("/batch_search", service.search(schemas.parse_batch_search, schemas.render_batch_search), "POST"),
        service.route("/health", service.health, "GET", public=True),
        service.route("/healthz", service.health, "GET", public=True),
        service.route("/ready", service.ready, "GET", public=True),
        service.route("/info", service.info, "GET"),
        service.route("/metrics", service.metrics_page, "GET"),
    ]
    if reranker is not None:
        routes.append(service.route("/rerank", service.rerank, "POST"))
    return Starlette(routes=routes, lifespan=service.lifespan, exception_handlers={HTTPException: _not_found})


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
        warm_up = asyncio.create_task(self._warm_up())
        yield
        self._not_ready = "the server is shutting down"
        await warm_up
        await self._batcher.close()

    async def _warm_up(self) -> None:
        try:
            await self._batcher.submit([self._settings.warm_up_query], self._settings.limits.default_top_k).future
            self._not_ready = None
        except RequestError as error:
            self._not_ready = f"the warm-up query failed: {error}"
        if self._on_ready is not None:
            self._on_ready(self._not_ready)

    def route(self, path: str, handler: Handler, method: str, *, public: bool = False) -> Route:
        """A route whose refusals are JSON with a `detail`, counted by status."""
        requests = self._metrics.requests

        async def endpoint(request: Request) -> Response:
            try:
                if not public:
                    self._authorize(request)
                response = await handler(request)
            except RequestError as error:
                self._metrics.rejected.labels(error.reason).inc()
                response = _refusal(error)
            requests.labels(path, str(response.status_code)).inc()
            return response

        return Route(path, endpoint, methods=[method])

    def search(self, parse: Parse, render: Render) -> Handler:
        """A handler that reads one request form and writes the matching answer form."""

        async def handler(request: Request) -> Response:
            started = time.monotonic()
            asked = parse(await self._body(request), self._settings.limits)
            deadline = started + self._timeout_s(request, asked.timeout_s)
            ticket = self._batcher.submit(asked.queries, asked.top_k)
            if not ticket.future.done():
                await self._wait(ticket, deadline, request)
            body = render(ticket.future.result(), asked.return_scores)
            self._metrics.request_seconds.observe(time.monotonic() - started)
            return _json(body)

        return handler

    async def rerank(self, request: Request) -> Response:
        assert self._reranker is not None
        asked = schemas.parse_rerank(await self._body(request), self._settings.limits)
        results = await asyncio.to_thread(rerank, self._reranker, asked)
        return _json(schemas.render_retrieve(results, asked.return_scores))

    async def health(self, request: Request) -> Response:
        return _json(b'{"status":"ok"}')

    async def ready(self, request: Request) -> Response:
        reason = self._not_ready
        if reason is None and self._batcher.running_s > 2 * self._settings.timeout_s:
            reason = f"one search has been running for {self._batcher.running_s:.0f} s"
        if reason is not None:
            return _json(orjson.dumps({"status": "not ready", "detail": reason}), 503)
        return _json(b'{"status":"ready"}')

    async def info(self, request: Request) -> Response:
        names = ("bm25s", "faiss-cpu", "orjson", "starlette", "uvicorn")
        limits = self._settings.limits
        return _json(
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

    async def metrics_page(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")

    def _authorize(self, request: Request) -> None:
        token = self._settings.token
        if token is not None:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                raise RequestError(401, "a bearer token is needed", reason="unauthorized")

    def _timeout_s(self, request: Request, asked_s: float | None) -> float:
        header = request.headers.get("x-request-timeout-ms")
        if asked_s is None and header is not None:
            if not header.isdecimal() or int(header) == 0:
                raise RequestError(422, "X-Request-Timeout-Ms must be a whole number above 0", reason="invalid")
            asked_s = int(header) / 1000
        timeout_s = self._settings.timeout_s if asked_s is None else min(asked_s, self._settings.timeout_s)
        return timeout_s - min(0.5, 0.05 * timeout_s)

    async def _body(self, request: Request) -> bytes:
        """The whole body, bounded in size and time."""
        limit = self._settings.limits.max_body_bytes
        announced = int(request.headers.get("content-length", 0))
        size = 0
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                async for chunk in request.stream():
                    chunks.append(chunk)
                    size += len(chunk)
                    if max(size, announced) > limit:
                        raise RequestError(413, f"the body is above {limit:,} bytes", reason="too_large")
        except TimeoutError:
            raise RequestError(408, "the body did not arrive in time", reason="deadline") from None
        except ClientDisconnect:
            raise RequestError(_CLOSED_BY_CLIENT, "the client went away", reason="disconnected") from None
        return b"".join(chunks)

    async def _wait(self, ticket: Ticket, deadline: float, request: Request) -> None:
        """Wait for the ticket, its deadline, or the client going away, whichever comes first."""
        loop = asyncio.get_running_loop()
        late = RequestError(504, "the deadline passed before the queries were searched", reason="deadline")
        timer = loop.call_later(max(0.0, deadline - time.monotonic()), ticket.fail, late)
        watchers: list[asyncio.Task[None]] = []
        watch = loop.call_later(
            _DISCONNECT_CHECK_S, lambda: watchers.append(asyncio.create_task(_fail_on_disconnect(ticket, request)))
        )
        try:
            await ticket.future
        finally:
            timer.cancel()
            watch.cancel()
            for watcher in watchers:
                watcher.cancel()


async def _fail_on_disconnect(ticket: Ticket, request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    ticket.fail(RequestError(_CLOSED_BY_CLIENT, "the client went away", reason="disconnected"))


def _refusal(error: RequestError) -> Response:
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return _json(orjson.dumps({"detail": str(error)}), error.status, headers)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = f"{request.method} {request.url.path}: {error.detail}"
    return _json(orjson.dumps({"detail": detail}), error.status_code, dict(error.headers or {}))


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
