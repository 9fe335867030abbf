"""An HTTP service over real sockets that answers as a recorded one did, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import orjson

from tests.threaded_server import serving


@dataclass
class Asked:
    method: str
    path: str
    params: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


@dataclass
class Answer:
    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class RecordedServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, respond: Callable[[Asked], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.respond = respond
        self.asked: list[Asked] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def _answer(self) -> None:
        server = self.server
        assert isinstance(server, RecordedServer)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        parts = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.command, parts.path, dict(parse_qsl(parts.query)), headers, body)
        server.asked.append(asked)
        answer = server.respond(asked)
        payload = answer.body if isinstance(answer.body, bytes) else orjson.dumps(answer.body)
        self.send_response(answer.status)
        for name, value in {"content-length": str(len(payload)), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)

    do_GET = do_POST = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@contextmanager
def recorded_server(respond: Callable[[Asked], Answer]) -> Iterator[RecordedServer]:
    with serving(RecordedServer(respond)) as server:
        yield server
