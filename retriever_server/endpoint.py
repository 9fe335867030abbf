"""One route as a bare ASGI application.

Requests are many and small: a framework's request, response and middleware objects cost more than a search does.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import orjson
from starlette.types import Receive, Scope, Send

from retriever_server.errors import RequestError
from retriever_server.metrics import Metrics

_CLOSED_BY_CLIENT = 499
_JSON = b"application/json"


class Request:
    """What a handler reads of one request."""

    __slots__ = ("_receive", "_scope")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive

    def header(self, name: bytes) -> bytes | None:
        """The value of a header; `name` in lower case."""
        for key, value in self._scope["headers"]:
            if key == name:
                found: bytes = value
                return found
        return None

    async def body(self, limit: int, timeout_s: float) -> bytes:
        """The whole body, bounded in bytes and time."""
        announced = self.header(b"content-length")
        if announced is not None and int(announced) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(timeout_s):
                body, more = b"", True
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise gone()
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise _too_large(limit)
                    more = message.get("more_body", False)
        except TimeoutError:
            raise RequestError(408, "the body did not arrive in time", reason="deadline") from None
        return body

    async def disconnected(self) -> None:
        """Returns when the client has gone away. The body must have been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


class Answer(NamedTuple):
    body: bytes
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()
    content_type: bytes = _JSON


Handler = Callable[[Request], Awaitable[Answer]]


class Endpoint:
    """Runs a handler. Its refusals become JSON with a `detail`, and every answer is counted by status.

    Args:
        token: bearer token that the client must send; None asks for none.
    """

    def __init__(self, path: str, handler: Handler, metrics: Metrics, token: str | None = None) -> None:
        self.path = path
        self._handler = handler
        self._metrics = metrics
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            if self._expected is not None:
                self._authorize(request, self._expected)
            answer = await self._handler(request)
        except RequestError as error:
            self._metrics.rejected[error.reason] += 1
            answer = _refusal(error)
        body, status, headers, content_type = answer
        self._metrics.requests[self.path, status] += 1
        length = str(len(body)).encode()
        headers = ((b"content-length", length), (b"content-type", content_type), *headers)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _authorize(self, request: Request, expected: bytes) -> None:
        if not hmac.compare_digest(request.header(b"authorization") or b"", expected):
            raise RequestError(401, "a bearer token is needed", reason="unauthorized")


def gone() -> RequestError:
    return RequestError(_CLOSED_BY_CLIENT, "the client went away", reason="disconnected")


def _too_large(limit: int) -> RequestError:
    return RequestError(413, f"the body is above {limit:,} bytes", reason="too_large")


def _refusal(error: RequestError) -> Answer:
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if error.retry_after_s is not None:
        headers = ((b"retry-after", str(error.retry_after_s).encode()),)
    elif error.status == 401:
        headers = ((b"www-authenticate", b"Bearer"),)
    return Answer(orjson.dumps({"detail": str(error)}), error.status, headers)
