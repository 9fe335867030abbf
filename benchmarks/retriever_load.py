"""Load for the retriever's benchmarks: servers in processes of their own, requests over many connections."""

import asyncio
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import uvloop

TOP_K = 3
CORES = sorted(os.sched_getaffinity(0))
Serve = Callable[..., None]
"""Called in the server's process with a connection, through which it sends its port, and its own arguments."""


@contextmanager
def server(serve: Serve, *arguments: Any) -> Iterator[tuple[int, psutil.Process]]:
    """A server on the first core of this machine: its port, its process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_pinned, args=(serve, theirs, *arguments), daemon=True)
    process.start()
    try:
        port = ours.recv()
        _wait_until_it_listens(port)
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.join(10)
        process.kill()


def _wait_until_it_listens(port: int) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < end, "the server never listened"
            time.sleep(0.05)


def _pinned(serve: Serve, ready: Any, *arguments: Any) -> None:
    os.sched_setaffinity(0, CORES[:1])
    serve(ready, *arguments)


@dataclass
class Load:
    """Requests sent round after round over every connection, and how long each took."""

    requests: Sequence[bytes]
    sent: int = 0
    running: bool = True
    seconds: list[float] = field(default_factory=list)


class Sender(asyncio.Protocol):
    def __init__(self, load: Load) -> None:
        self._load = load
        self._received = bytearray()
        self._whole = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._whole and (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._received[:end]).lower()
            assert head.startswith(b"http/1.1 200"), bytes(self._received[:300])
            self._whole = end + 4 + int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        if self._whole and len(self._received) >= self._whole:
            self._load.seconds.append(time.perf_counter() - self._started)
            self._send()

    def _send(self) -> None:
        self._received.clear()
        self._whole = 0
        if not self._load.running:
            self._transport.close()
            return
        self._started = time.perf_counter()
        self._transport.write(self._load.requests[self._load.sent % len(self._load.requests)])
        self._load.sent += 1


def request(queries: Sequence[str]) -> bytes:
    body = json.dumps({"queries": queries, "topk": TOP_K, "return_scores": True}).encode()
    head = "POST /retrieve HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def measure(
    port: int, process: psutil.Process, requests: Sequence[bytes], connections: int, seconds: float
) -> dict[str, float]:
    """Requests/s, the server's CPU time a request, and latencies; after a warm-up of a quarter of the time."""
    return uvloop.run(_measure(port, process, requests, connections, seconds))


async def _measure(
    port: int, process: psutil.Process, requests: Sequence[bytes], connections: int, seconds: float
) -> dict[str, float]:
    load = Load(requests)
    loop = asyncio.get_running_loop()
    for _ in range(connections):
        await loop.create_connection(lambda: Sender(load), "127.0.0.1", port)
    await asyncio.sleep(seconds / 4)
    load.seconds.clear()
    cpu, started = sum(process.cpu_times()[:2]), time.perf_counter()
    while time.perf_counter() - started < (seconds if load.seconds else 60):  # a busy machine may answer none in time
        await asyncio.sleep(0.1)
    took, cpu = time.perf_counter() - started, sum(process.cpu_times()[:2]) - cpu
    done = sorted(load.seconds)
    load.running = False
    await asyncio.sleep(0.2)
    assert done, "no request was answered"
    return {
        "requests_per_s": len(done) / took,
        "cpu_us_per_request": cpu / len(done) * 1e6,
        "server_core_share": cpu / took,
        "p50_ms": done[len(done) // 2] * 1e3,
        "p99_ms": done[int(len(done) * 0.99)] * 1e3,
    }
