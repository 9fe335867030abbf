"""Queries of many requests, searched together.

As soon as the retriever's first thread is free it takes what is queued, up to `max_batch`: no fixed window. A batch is
made of queries, a few of each waiting request in turn: a request of 10,000 queries does not hold up single ones.
A query asked by several requests at once is searched once, and what nobody waits for any more is not searched at all.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from retriever_server.cache import Key, ResultCache
from retriever_server.errors import RequestError
from retriever_server.metrics import Metrics
from retriever_server.retriever import Retriever, ScoredPassage
from retriever_server.stages import Outcome, Stages

_TURN = 16
"""Queries taken from one request before the next one has its turn."""


class Ticket:
    """One request on its way: `future` yields one list of passages a query, or raises `RequestError`."""

    __slots__ = ("future", "remaining", "results")

    def __init__(self, num_queries: int) -> None:
        self.results: list[list[ScoredPassage]] = [[]] * num_queries
        self.remaining = num_queries
        self.future: asyncio.Future[list[list[ScoredPassage]]] = asyncio.get_running_loop().create_future()

    def finish(self) -> None:
        if not self.future.done():
            self.future.set_result(self.results)

    def fail(self, error: RequestError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # marks it as seen: the handler may have left already


class _Flight:
    """One search under way, shared by everyone who asked the same."""

    __slots__ = ("key", "taken", "waiters")

    def __init__(self, key: Key, ticket: Ticket, position: int) -> None:
        self.key = key
        self.taken = False
        self.waiters = [(ticket, position)]


class Batcher:
    """All methods belong to the event loop's thread; only the retriever runs in worker threads."""

    def __init__(
        self,
        retriever: Retriever,
        cache: ResultCache,
        metrics: Metrics,
        *,
        max_batch: int = 256,
        max_queued: int = 20_000,
    ) -> None:
        self._stages = Stages(retriever, metrics)
        self._fingerprint = str(retriever.describe()["fingerprint"])
        self._cache = cache
        self._metrics = metrics
        self._max_batch = max_batch
        self._max_queued = max_queued
        self._flights: dict[Key, _Flight] = {}
        self._turns: deque[tuple[float, deque[_Flight]]] = deque()
        """The searches each waiting request is to start, with the time it came."""
        self._num_queued = 0
        self._queries_per_s = 100.0
        self._started: deque[float] = deque()
        """When each batch under way was begun, the oldest first."""
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._searching: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop_task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Finish what somebody waits for, then stop."""
        while any(not ticket.future.done() for flight in self._flights.values() for ticket, _ in flight.waiters):
            await asyncio.sleep(0.01)
        if self._loop_task is not None:
            self._loop_task.cancel()
        self._stages.close()

    @property
    def running_s(self) -> float:
        """How long the oldest batch under way has been there; 0 when there is none."""
        return time.monotonic() - self._started[0] if self._started else 0.0

    def submit(self, queries: Sequence[str], top_k: int) -> Ticket:
        """Take a request in. A blank query finds nothing and is not searched.

        Raises:
            RequestError: 503 when the queue is full, nothing of the request having been queued.
        """
        ticket = Ticket(len(queries))
        missing: list[tuple[int, Key]] = []
        for position, query in enumerate(queries):
            key = (self._fingerprint, query, top_k)
            passages = self._cache.get(key) if query and not query.isspace() else []
            if passages is None:
                missing.append((position, key))
            else:
                ticket.results[position] = passages
        self._admit(missing)
        ticket.remaining = len(missing)
        self._metrics.queries += len(queries)
        self._metrics.cache["hit"] += len(queries) - len(missing)
        if missing:
            self._enqueue(ticket, missing)
        else:
            ticket.finish()
        return ticket

    def _admit(self, missing: Sequence[tuple[int, Key]]) -> None:
        if self._num_queued == 0 or self._num_queued + len(missing) <= self._max_queued:
            return
        num_new = len({key for _, key in missing if key not in self._flights})
        if num_new and self._num_queued + num_new > self._max_queued:
            wait_s = max(1, math.ceil(self._num_queued / self._queries_per_s))
            raise RequestError(
                503,
                f"{self._num_queued:,} queries wait already; try again in {wait_s} s",
                reason="busy",
                retry_after_s=min(wait_s, 30),
            )

    def _enqueue(self, ticket: Ticket, missing: Sequence[tuple[int, Key]]) -> None:
        """Wait for the search of each key, starting one where there is none. A search still queued behind a long
        request is queued with this one too, so that it runs at whichever turn comes first."""
        turn: deque[_Flight] = deque()
        num_new = 0
        for position, key in missing:
            flight = self._flights.get(key)
            if flight is None:
                flight = self._flights[key] = _Flight(key, ticket, position)
                turn.append(flight)
                num_new += 1
                continue
            if not flight.taken and flight.waiters[-1][0] is not ticket:
                turn.append(flight)
            flight.waiters.append((ticket, position))
        self._num_queued += num_new
        self._metrics.cache["miss"] += num_new
        self._metrics.cache["shared"] += len(missing) - num_new
        self._metrics.queue_depth = self._num_queued
        if turn:
            self._turns.append((time.monotonic(), turn))
            self._wake.set()

    def _take(self) -> list[_Flight]:
        batch: list[_Flight] = []
        now = time.monotonic()
        while self._turns and len(batch) < self._max_batch:
            queued_at, turn = self._turns.popleft()
            for _ in range(min(len(turn), _TURN, self._max_batch - len(batch))):
                flight = turn.popleft()
                if flight.taken:
                    continue
                flight.taken = True
                self._num_queued -= 1
                for ticket, _ in flight.waiters:
                    if not ticket.future.done():
                        batch.append(flight)
                        break
                else:
                    del self._flights[flight.key]
                    self._metrics.dropped += 1
            if turn:
                self._turns.append((queued_at, turn))
            else:
                self._metrics.queue_seconds.observe(now - queued_at)
        self._metrics.queue_depth = self._num_queued
        return batch

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            batch = self._take()
            if not batch and not self._turns:
                self._wake.clear()
            by_top_k: dict[int, list[_Flight]] = {}
            for flight in batch:
                by_top_k.setdefault(flight.key[2], []).append(flight)
            for top_k, flights in by_top_k.items():
                await self._search(flights, top_k)

    async def _search(self, flights: list[_Flight], top_k: int) -> None:
        """Where the retriever has two stages, returns when this batch is in the second one: the first is free then."""
        self._started.append(time.monotonic())
        queries = [flight.key[1] for flight in flights]
        if not self._stages.overlap:
            self._finish(flights, await self._stages.search(queries, None, top_k))
            return
        prepared = await self._stages.prepare(queries, top_k)
        if self._searching is not None:
            await self._searching
        self._searching = asyncio.create_task(self._search_prepared(flights, queries, prepared, top_k))

    async def _search_prepared(self, flights: list[_Flight], queries: list[str], prepared: Any, top_k: int) -> None:
        self._finish(flights, await self._stages.search(queries, prepared, top_k))

    def _finish(self, flights: list[_Flight], outcomes: list[Outcome]) -> None:
        seconds = time.monotonic() - self._started.popleft()
        self._queries_per_s += 0.2 * (len(flights) / max(seconds, 1e-6) - self._queries_per_s)
        self._metrics.batch_size.observe(len(flights))
        for flight, outcome in zip(flights, outcomes, strict=True):
            del self._flights[flight.key]
            if isinstance(outcome, Exception):
                self._fail(flight, outcome)
                continue
            self._cache.put(flight.key, outcome)
            for ticket, position in flight.waiters:
                ticket.results[position] = outcome
                ticket.remaining -= 1
                if not ticket.remaining:
                    ticket.finish()

    def _fail(self, flight: _Flight, cause: Exception) -> None:
        self._metrics.failed += 1
        error = cause
        if not isinstance(error, RequestError):
            what = f"the retriever failed on a query: {type(cause).__name__}: {cause}"
            error = RequestError(500, what, reason="failed")
        for ticket, _ in flight.waiters:
            ticket.fail(error)
