"""The retrieval server's HTTP layer over a stub retriever, beside a plain FastAPI endpoint, on this machine.

Each server is one process on one core, the load generator runs on another. Rounds alternate between the servers; the
table shows medians. CPU time a request does not depend on what else the machine does; throughput does.

    python benchmarks/retriever.py
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import uvicorn
import uvloop
from fastapi import FastAPI
from pydantic import BaseModel

from retriever_server.app import ServerSettings, create_app
from retriever_server.retriever import ScoredPassage
from retriever_server.serving import bind, make_server, run

TOP_K = 3
TEXT = "word " * 120
LOADS = {"1 query x 64 connections": (1, 64), "256 queries x 8 connections": (256, 8)}
SERVERS: dict[str, Callable[[Connection], None]] = {}


def server(name: str) -> Callable[[Callable[[Connection], None]], Callable[[Connection], None]]:
    def register(serve: Callable[[Connection], None]) -> Callable[[Connection], None]:
        SERVERS[name] = serve
        return serve

    return register


class PlainRequest(BaseModel):
    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


class StubRetriever:
    """Costs nothing: the same three passages for every query."""

    def __init__(self) -> None:
        documents = [json.dumps({"id": str(rank), "contents": TEXT}).encode() for rank in range(TOP_K)]
        self._passages = [ScoredPassage(document, 9.5 - rank) for rank, document in enumerate(documents)]

    def search(self, queries: Any, top_k: int) -> list[list[ScoredPassage]]:
        return [self._passages] * len(queries)

    def describe(self) -> dict[str, Any]:
        return {"fingerprint": "stub"}


@server("plain FastAPI")
def serve_plain(ready: Connection) -> None:
    """What one writes first: pydantic in, dictionaries out, the default encoder."""
    documents = [{"id": str(rank), "contents": TEXT} for rank in range(TOP_K)]
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(request: PlainRequest):  # type: ignore[no-untyped-def]  # a return type would choose another encoder
        passages = [{"document": document, "score": 9.5 - rank} for rank, document in enumerate(documents)]
        return {"result": [list(passages) for _ in request.queries]}

    listener = bind("127.0.0.1", 0)
    ready.send(listener.getsockname()[1])
    uvicorn.Server(uvicorn.Config(app, access_log=False, log_level="warning")).run(sockets=[listener])


def serve_ours(ready: Connection, cache_bytes: int) -> None:
    listener = bind("127.0.0.1", 0)
    ready.send(listener.getsockname()[1])
    run(make_server(create_app(StubRetriever(), ServerSettings(cache_bytes=cache_bytes))), listener)


@server("retriever_server, cache off")
def serve_uncached(ready: Connection) -> None:
    serve_ours(ready, 0)


@server("retriever_server")
def serve_cached(ready: Connection) -> None:
    serve_ours(ready, 256 << 20)


@dataclass
class Load:
    """Requests sent round after round over every connection, and how long each took."""

    requests: list[bytes]
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


def requests_of(num_queries: int) -> list[bytes]:
    requests = []
    for number in range(20_000 // num_queries):
        queries = [f"what is the name of thing {number} in {place}" for place in range(num_queries)]
        body = json.dumps({"queries": queries, "topk": TOP_K, "return_scores": True}).encode()
        head = "POST /retrieve HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        requests.append(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return requests


async def measure(port: int, process: psutil.Process, requests: list[bytes], connections: int, seconds: float) -> Any:
    load = Load(requests)
    loop = asyncio.get_running_loop()
    for _ in range(connections):
        await loop.create_connection(lambda: Sender(load), "127.0.0.1", port)
    await asyncio.sleep(seconds / 4)
    load.seconds.clear()
    cpu, started = sum(process.cpu_times()[:2]), time.perf_counter()
    await asyncio.sleep(seconds)
    took, cpu = time.perf_counter() - started, sum(process.cpu_times()[:2]) - cpu
    done = sorted(load.seconds)
    load.running = False
    await asyncio.sleep(0.2)
    assert done, "no request was answered"
    return {
        "requests_per_s": len(done) / took,
        "cpu_us_per_request": cpu / len(done) * 1e6,
        "p50_ms": done[len(done) // 2] * 1e3,
        "p99_ms": done[int(len(done) * 0.99)] * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement (default: 3)")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/retriever.json"))
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    ports, processes = {}, {}
    for name, serve in SERVERS.items():
        ours, theirs = multiprocessing.Pipe()
        processes[name] = multiprocessing.Process(target=serve, args=(theirs,), daemon=True)
        processes[name].start()
        os.sched_setaffinity(processes[name].pid or 0, cores[:1])
        ports[name] = ours.recv()
    os.sched_setaffinity(0, cores[-1:])
    time.sleep(2)
    rows = []
    for load_name, (num_queries, connections) in LOADS.items():
        requests = requests_of(num_queries)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in SERVERS}
        for _ in range(options.rounds):
            for name in SERVERS:
                process = psutil.Process(processes[name].pid)
                found[name].append(uvloop.run(measure(ports[name], process, requests, connections, options.seconds)))
        for name, rounds in found.items():
            medians = {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
            rows.append({"load": load_name, "server": name, **medians})
    for process in processes.values():
        process.terminate()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(rows, indent=1))
    show(rows)


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'load':28} {'server':28} {'req/s':>8} {'ratio':>6} {'CPU us':>8} {'ratio':>6} {'p50 ms':>8} {'p99 ms':>8}")
    for row in rows:
        plain = next(other for other in rows if other["load"] == row["load"])
        faster = row["requests_per_s"] / plain["requests_per_s"]
        cheaper = plain["cpu_us_per_request"] / row["cpu_us_per_request"]
        print(
            f"{row['load']:28} {row['server']:28} {row['requests_per_s']:8.0f} {faster:5.1f}x "
            f"{row['cpu_us_per_request']:8.0f} {cheaper:5.1f}x {row['p50_ms']:8.2f} {row['p99_ms']:8.2f}"
        )


if __name__ == "__main__":
    main()
