"""Synchronous HTTP whose exchanges end at a deadline, however slowly the answer arrives."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpcore
import httpx


class DeadlineTransport(httpx.HTTPTransport):
    """Takes the read timeout of a request for the time from its beginning to the last byte of its answer."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._exchange = threading.local()  # each takes place in one thread
        # httpx has no parameter for it.
        self._pool._network_backend = _Timed(httpcore.SyncBackend(), self._exchange)  # type: ignore[assignment]

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._exchange.deadline = time.monotonic() + request.extensions["timeout"]["read"]
        return super().handle_request(request)


class _Timed:
    """A network backend, or a stream that it opened: each read is granted only what is left of the exchange."""

    def __init__(self, inner: Any, exchange: threading.local) -> None:
        self._inner = inner
        self._exchange = exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def connect_tcp(self, *args: Any, **options: Any) -> _Timed:
        return _Timed(self._inner.connect_tcp(*args, **options), self._exchange)

    def start_tls(self, *args: Any, **options: Any) -> _Timed:
        return _Timed(self._inner.start_tls(*args, **options), self._exchange)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        left_s = self._exchange.deadline - time.monotonic()
        if left_s <= 0:
            raise httpcore.ReadTimeout("no complete answer in time")
        data: bytes = self._inner.read(max_bytes, left_s)
        return data
