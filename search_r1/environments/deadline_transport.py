"""Synchronous HTTP whose exchanges end at a deadline, however slowly their bytes arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from ssl import SSLContext
from typing import Any

import httpcore
import httpx


class DeadlineTransport(httpx.HTTPTransport):
    """Takes the read timeout of a request for the time of its whole exchange, from connecting to the last byte."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._exchange = threading.local()  # each takes place in one thread
        # httpx has no parameter for it.
        self._pool._network_backend = _Backend(self._left_s)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._exchange.timeout_s = request.extensions["timeout"]["read"]
        self._exchange.deadline = time.monotonic() + self._exchange.timeout_s
        return super().handle_request(request)

    def _left_s(self) -> float:
        left = float(self._exchange.deadline - time.monotonic())
        if left <= 0:
            raise httpcore.ReadTimeout(f"no complete answer within {self._exchange.timeout_s:g} s")
        return left


class _Backend(httpcore.SyncBackend):
    def __init__(self, left_s: Callable[[], float]) -> None:
        self._left_s = left_s

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        return _Stream(super().connect_tcp(host, port, timeout, local_address, socket_options), self._left_s)


class _Stream(httpcore.NetworkStream):
    """Grants each step only what is left of the exchange."""

    def __init__(self, stream: httpcore.NetworkStream, left_s: Callable[[], float]) -> None:
        self._stream = stream
        self._left_s = left_s

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._left_s())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._left_s())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, self._left_s()), self._left_s)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
