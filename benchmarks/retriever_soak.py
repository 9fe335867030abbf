"""A minute of everything at once: overload, huge batches, clients that leave or dawdle, bodies that are no requests.

Every answer is checked: 200 with exactly what was asked for, or the refusal that belongs to the request.
"""

import asyncio
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import retriever_load
import uvloop

from retriever_server.app import ServerSettings, create_app
from retriever_server.retriever import ScoredPassage
from retriever_server.serving import bind, make_server, run

SECONDS = 60.0
BUSY = {503, 504}
BAD_BODIES: list[tuple[bytes, set[int]]] = [
    (b"", {400}),
    (b"{", {400}),
    (b'{"queries": ["\xff\xfe"]}', {400}),
    (b"[" * 5_000, {400}),
    (b'{"queries": "one"}', {422}),
    (b'{"queries": [1]}', {422}),
    (b'{"queries": ["a"], "topk": 0}', {422}),
    (b'{"queries": ["a"], "topk": 100000}', {422}),
    (json.dumps({"queries": ["a" * 1_000_000]}).encode(), {422}),
    (json.dumps({"queries": ["a"] * 10_001}).encode(), {422}),
    (b'{"queries": ["' + b"a" * (9 << 20) + b'"]}', {413}),
]


class EchoRetriever:
    """Answers with passages that name the query, at the speed of a real engine; one query in a thousand fails."""

    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        time.sleep(0.002 + 1e-5 * len(queries))
        for query in queries:
            if query.endswith("7777"):
                raise LookupError("no luck")
        return [
            [
                ScoredPassage(json.dumps({"id": f"{query}/{rank}", "contents": "x" * 300}).encode(), 1.0)
                for rank in range(top_k)
            ]
            for query in queries
        ]

    def describe(self) -> dict[str, Any]:
        return {"fingerprint": "echo"}


def serve(ready: Connection) -> None:
    logging.getLogger("retriever_server").setLevel(logging.CRITICAL)  # the failures are meant
    listener = bind("127.0.0.1", 0)
    ready.send(listener.getsockname()[1])
    settings = ServerSettings(max_queued=500, timeout_s=2.0, cache_bytes=1 << 20)
    run(make_server(create_app(EchoRetriever(), settings)), listener)


class Soak:
    def __init__(self, port: int, end: float) -> None:
        self.port = port
        self.end = end
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def client(self, kind: str, number: int) -> None:
        draw = random.Random(f"{kind} {number}")
        while time.monotonic() < self.end:
            try:
                await getattr(self, kind)(draw)
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                self.wrong.append(f"{kind}: the connection broke: {error!r}")
                await asyncio.sleep(0.1)

    async def single(self, draw: random.Random) -> None:
        await self._search("single", [f"q{draw.randrange(20_000)}"])

    async def batch(self, draw: random.Random) -> None:
        size = draw.choice((40, 300, 2_000))
        await self._search("batch", [f"q{draw.randrange(1_000_000)}" for _ in range(size)])
        await asyncio.sleep(draw.random())

    async def bad_body(self, draw: random.Random) -> None:
        body, expected = draw.choice(BAD_BODIES)
        status, answer = await self._ask(body)
        self._note("bad body", status)
        if status not in expected or not json.loads(answer).get("detail"):
            self.wrong.append(f"bad body {body[:40]!r}: {status} {answer[:200]!r}")
        await asyncio.sleep(0.05)

    async def leaver(self, draw: random.Random) -> None:
        """Goes away in the middle of its request, or before the answer."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        request = retriever_load.request([f"left {draw.randrange(1_000_000)}"])
        writer.write(request[: draw.randrange(1, len(request))] if draw.random() < 0.5 else request)
        await writer.drain()
        await asyncio.sleep(draw.random() * 0.02)
        writer.transport.abort()
        self.answers["left"] += 1

    async def dawdler(self, draw: random.Random) -> None:
        """Sends its request in small pieces, slower than the server waits, or reads its answer late."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        request = retriever_load.request([f"slow {draw.randrange(1_000_000)}"])
        for start in range(0, len(request), 40):
            writer.write(request[start : start + 40])
            await asyncio.sleep(draw.choice((0.01, 0.5)))
        status, _ = await _answer(reader)
        self._note("dawdler", status)
        if status not in {200, 408} | BUSY:
            self.wrong.append(f"dawdler: {status}")
        writer.close()

    async def _search(self, kind: str, queries: list[str]) -> None:
        status, answer = await self._ask(json.dumps({"queries": queries, "topk": 2, "return_scores": True}).encode())
        self._note(kind, status)
        doomed = any(query.endswith("7777") for query in queries)
        if status == 200:
            ids = [[item["document"]["id"] for item in items] for items in json.loads(answer)["result"]]
            if doomed or ids != [[f"{query}/0", f"{query}/1"] for query in queries]:
                self.wrong.append(f"{kind}: wrong answer for {queries[:3]}")
        elif status not in BUSY | ({500} if doomed else set()):
            self.wrong.append(f"{kind}: {status} {answer[:200]!r}")

    async def _ask(self, body: bytes) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        try:
            return await _answer(reader)
        finally:
            writer.close()

    def _note(self, kind: str, status: int) -> None:
        self.answers[f"{kind} {status}"] += 1


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(size)


CLIENTS = {"single": 96, "batch": 6, "bad_body": 6, "leaver": 8, "dawdler": 12}


async def soak(port: int, pid: int, seconds: float) -> dict[str, Any]:
    work = Soak(port, time.monotonic() + seconds)
    tasks = [work.client(kind, number) for kind, count in CLIENTS.items() for number in range(count)]
    memory: list[float] = []

    async def watch() -> None:
        while time.monotonic() < work.end:
            await asyncio.sleep(seconds / 12)
            memory.append(_anonymous_mb(pid))

    await asyncio.gather(watch(), *tasks)
    work.answers["final check"] += 1
    work.end = 0
    await work._search("after", ["still there"])
    half = len(memory) // 2
    return {
        "seconds": seconds,
        "answers": dict(sorted(work.answers.items())),
        "wrong": work.wrong[:20],
        "num_wrong": len(work.wrong),
        "memory_mb_middle": max(memory[:half]),
        "memory_mb_end": max(memory[half:]),
    }


def _anonymous_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def run_section(rounds: int, seconds: float) -> list[dict[str, Any]]:
    with retriever_load.server(serve) as (port, process):
        found = uvloop.run(soak(port, process.pid, SECONDS))
        return [{**found, "alive": process.is_running()}]


def summary(rows: list[dict[str, Any]]) -> str:
    (row,) = rows
    requests = sum(row["answers"].values())
    return (
        f"{row['seconds']:.0f} s: {requests:,} requests, {row['num_wrong']} wrong; alive: {row['alive']}; "
        f"memory {row['memory_mb_middle']:.0f} then {row['memory_mb_end']:.0f} MB"
    )


def table(rows: list[dict[str, Any]]) -> list[str]:
    (row,) = rows
    answers = ", ".join(f"{kind} {count:,}" for kind, count in row["answers"].items())
    return [
        f"soak of {row['seconds']:.0f} s: {answers}",
        f"soak: {row['num_wrong']} wrong answers, server alive: {row['alive']}, its memory "
        f"{row['memory_mb_middle']:.0f} MB at most in the first half, {row['memory_mb_end']:.0f} MB in the second",
        *row["wrong"],
    ]
