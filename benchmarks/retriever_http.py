"""The HTTP layer over a retriever that costs nothing, beside a plain FastAPI endpoint."""

import json
import statistics
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import retriever_load
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from retriever_load import TOP_K

from retriever_server.app import ServerSettings, create_app
from retriever_server.retriever import ScoredPassage
from retriever_server.serving import bind, make_server, run

TEXT = "word " * 120
LOADS = {"1 query x 64 connections": (1, 64), "256 queries x 8 connections": (256, 8)}
PLAIN = "plain FastAPI"


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


def serve_plain(ready: Connection) -> None:
    """What one writes first: pydantic in, dictionaries out, the default encoder."""
    documents = [{"id": str(rank), "contents": TEXT} for rank in range(TOP_K)]
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(request: PlainRequest):  # type: ignore[no-untyped-def]  # a return type would choose another encoder
        passages = [{"document": document, "score": 9.5 - rank} for rank, document in enumerate(documents)]
        return {"result": [list(passages) for _ in request.queries]}

    serve_plainly(app, ready)


def serve_plainly(app: FastAPI, ready: Connection) -> None:
    listener = bind("127.0.0.1", 0)
    ready.send(listener.getsockname()[1])
    uvicorn.Server(uvicorn.Config(app, access_log=False, log_level="warning")).run(sockets=[listener])


def serve_ours(ready: Connection, cache_bytes: int) -> None:
    listener = bind("127.0.0.1", 0)
    ready.send(listener.getsockname()[1])
    run(make_server(create_app(StubRetriever(), ServerSettings(cache_bytes=cache_bytes))), listener)


SERVERS: dict[str, tuple[Any, ...]] = {
    PLAIN: (serve_plain,),
    "retriever_server, cache off": (serve_ours, 0),
    "retriever_server": (serve_ours, 256 << 20),
}


def requests_of(num_queries: int) -> list[bytes]:
    return [
        retriever_load.request([f"what is the name of thing {number} in {place}" for place in range(num_queries)])
        for number in range(20_000 // num_queries)
    ]


def run_section(rounds: int, seconds: float) -> list[dict[str, Any]]:
    rows = []
    with ExitStack() as stack:
        servers = {name: stack.enter_context(retriever_load.server(*serve)) for name, serve in SERVERS.items()}
        for load, (num_queries, connections) in LOADS.items():
            requests = requests_of(num_queries)
            found: dict[str, list[dict[str, float]]] = {name: [] for name in SERVERS}
            for _ in range(rounds):
                for name, (port, process) in servers.items():
                    found[name].append(retriever_load.measure(port, process, requests, connections, seconds))
            for name, measured in found.items():
                medians = {key: statistics.median(row[key] for row in measured) for key in measured[0]}
                rows.append({"load": load, "server": name, **medians})
    return rows


def summary(rows: list[dict[str, Any]]) -> str:
    parts = []
    for load in LOADS:
        plain, ours, _ = [row for row in rows if row["load"] == load]
        faster = ours["requests_per_s"] / plain["requests_per_s"]
        cheaper = plain["cpu_us_per_request"] / ours["cpu_us_per_request"]
        parts.append(
            f"{load}: {ours['requests_per_s']:,.0f} requests/s, {faster:.1f} x the plain endpoint's, "
            f"at {1 / cheaper:.2f} of its CPU time a request"
        )
    return "; ".join(parts)


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"{'load':28} {'server':28} {'req/s':>8} {'ratio':>6} {'CPU us':>8} {'ratio':>6} {'p50 ms':>8} {'p99 ms':>8}"
    ]
    for row in rows:
        plain = next(other for other in rows if other["load"] == row["load"])
        faster = row["requests_per_s"] / plain["requests_per_s"]
        cheaper = plain["cpu_us_per_request"] / row["cpu_us_per_request"]
        lines.append(
            f"{row['load']:28} {row['server']:28} {row['requests_per_s']:8.0f} {faster:5.1f}x "
            f"{row['cpu_us_per_request']:8.0f} {cheaper:5.1f}x {row['p50_ms']:8.2f} {row['p99_ms']:8.2f}"
        )
    return lines
