"""A retrieval server over real sockets that follows a script, for all that can go wrong on the way."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.threaded_server import serving

Respond = Callable[["FakeServer", BaseHTTPRequestHandler, dict[str, Any]], None]


class FakeServer(ThreadingHTTPServer):
    """Answers each request with the next response of its script; the last one repeats."""

    daemon_threads = True

    def __init__(self, *script: Respond) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = list(script)
        self.received: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/retrieve"

    def next_response(self, body: dict[str, Any], headers: dict[str, str]) -> Respond:
        with self.lock:
            self.received.append(body)
            self.headers.append(headers)
            return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that closed the connection is part of these tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet an answer

    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, FakeServer)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server.next_response(body, dict(self.headers))(server, self, body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def reply(status: int, body: object, **headers: str) -> Respond:
    def respond(server: FakeServer, handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("content-length", str(len(payload)))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(payload)
        handler.wfile.flush()

    return respond


def item(query: str) -> dict[str, Any]:
    return {"document": {"id": query, "contents": f'"About {query}"\ntext of {query}'}, "score": 1.5}


def echo(server: FakeServer, handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
    """One passage a query, naming it."""
    reply(200, {"result": [[item(query)] for query in request["queries"]]})(server, handler, request)


def hang_up(server: FakeServer, handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def cut_short(server: FakeServer, handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"result": [[')
    handler.wfile.flush()
    hang_up(server, handler, request)


def say_nothing(server: FakeServer, handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
    handler.rfile.read(1)


def drip(server: FakeServer, handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.02)


def drip_headers(server: FakeServer, handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
    """An empty answer that takes two seconds."""
    handler.send_response(200)
    for number in range(100):
        handler.send_header(f"x-{number}", "")
        handler.flush_headers()
        handler.wfile.flush()
        time.sleep(0.02)
    handler.send_header("content-length", "0")
    handler.end_headers()


@contextmanager
def fake_server(*script: Respond) -> Iterator[FakeServer]:
    with serving(FakeServer(*script)) as server:
        yield server


def unused_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/retrieve"
