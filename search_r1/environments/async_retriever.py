"""The retriever for many concurrent callers: their queries are gathered into few requests."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from tenacity import AsyncRetrying

from search_r1.environments.retriever_client import RetrieverClient, Turns, encode_request, timeout
from search_r1.errors import RetrieverError
from search_r1.types import Passage

_Key = tuple[str, int]
"""Query and top-k."""


@dataclass(eq=False, slots=True)
class _Wanted:
    """A query that is gathered or on its way, and how many wait for it."""

    key: _Key
    passages: asyncio.Future[list[Passage]]
    num_waiting: int = 0


@dataclass(slots=True)
class _LoopState:
    """What belongs to the event loop that `asearch` is called on."""

    loop: asyncio.AbstractEventLoop
    http: httpx.AsyncClient
    requests: asyncio.Semaphore
    wanted: dict[_Key, _Wanted] = field(default_factory=dict)
    gathered: list[_Wanted] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    tasks: dict[asyncio.Task[None], list[_Wanted]] = field(default_factory=dict)


class GatheringRetrieverClient(RetrieverClient):
    """A `RetrieverClient` that is an `AsyncRetriever` too, with the same retries, deadlines and errors.

    Queries that are asked within `gather_s` of one another make one request; a query that is already under way is not
    sent a second time. A request that nobody waits for any more is cancelled.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        gather_s: float = 0.005,
        max_connections: int = 16,
        asleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        **settings: Any,
    ) -> None:
        """`asleep` waits between attempts; for the other settings see `RetrieverClient`."""
        super().__init__(urls, max_connections=max_connections, **settings)
        self._gather_s = gather_s
        self._asleep = asleep
        self._max_connections = max_connections
        self._state: _LoopState | None = None

    async def asearch(self, query: str, top_k: int) -> list[Passage]:
        """Best passages first, at most `top_k`. To be called on one event loop at a time.

        Raises:
            RetrieverError: see `RetrieverClient.search`; all queries of a request that failed get the same one.
        """
        state = self._loop_state()
        wanted = state.wanted.get((query, top_k)) or self._gather(state, (query, top_k))
        wanted.num_waiting += 1
        try:
            return list(await asyncio.shield(wanted.passages))
        finally:
            wanted.num_waiting -= 1
            if not wanted.num_waiting:
                self._forget(state, wanted)

    async def aclose(self) -> None:
        """Cancel what is under way, with a `RetrieverError` where it was asked for, and close the event loop's
        connections."""
        state, self._state = self._state, None
        if state is None:
            return
        if state.timer is not None:
            state.timer.cancel()
        for task in state.tasks:
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)
        for wanted in state.wanted.values():
            if not wanted.passages.done():
                wanted.passages.set_exception(RetrieverError("the retriever client was closed before an answer came"))
        await state.http.aclose()

    def _loop_state(self) -> _LoopState:
        loop = asyncio.get_running_loop()
        if self._state is None or self._state.loop is not loop:
            http = httpx.AsyncClient(**self._http_settings)
            self._state = _LoopState(loop, http, asyncio.Semaphore(self._max_connections))
        return self._state

    def _gather(self, state: _LoopState, key: _Key) -> _Wanted:
        """Put a query among those that go with the next request."""
        wanted = state.wanted[key] = _Wanted(key, state.loop.create_future())
        state.gathered.append(wanted)
        if len(state.gathered) >= self._max_queries_per_request:
            self._send_gathered(state)
        elif state.timer is None:
            state.timer = state.loop.call_later(self._gather_s, self._send_gathered, state)
        return wanted

    def _forget(self, state: _LoopState, wanted: _Wanted) -> None:
        """Nobody waits for it: the next one who asks asks anew."""
        if state.wanted.get(wanted.key) is wanted:
            del state.wanted[wanted.key]
        wanted.passages.cancel()
        for task, batch in state.tasks.items():
            if all(one.passages.done() for one in batch):
                task.cancel()

    def _send_gathered(self, state: _LoopState) -> None:
        if state.timer is not None:
            state.timer.cancel()
        gathered, state.gathered, state.timer = state.gathered, [], None
        by_top_k: defaultdict[int, list[_Wanted]] = defaultdict(list)
        for wanted in gathered:
            if not wanted.passages.done():
                by_top_k[wanted.key[1]].append(wanted)
        for top_k, batch in by_top_k.items():
            task = state.loop.create_task(self._fetch(state, batch, top_k))
            state.tasks[task] = batch
            task.add_done_callback(state.tasks.pop)

    async def _fetch(self, state: _LoopState, batch: Sequence[_Wanted], top_k: int) -> None:
        """One request with all its retries; its outcome goes to whoever still waits."""
        try:
            found = await self._request(state, [wanted.key[0] for wanted in batch], top_k)
        except Exception as error:  # noqa: BLE001  raised where the query was asked
            for wanted in batch:
                if not wanted.passages.done():
                    wanted.passages.set_exception(error)
            return
        for wanted, passages in zip(batch, found, strict=True):
            if not wanted.passages.done():
                wanted.passages.set_result(passages)

    async def _request(self, state: _LoopState, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        body = encode_request(queries, top_k)
        urls = self._order()
        async with state.requests:
            with self._counting(urls, len(queries)):
                turns = Turns(urls)
                async for attempt in AsyncRetrying(sleep=self._asleep, **self._retry_policy(turns)):
                    with attempt:
                        lists = await self._exchange(state.http, turns.url, body, len(queries))
        return [passages[:top_k] for passages in lists]

    async def _exchange(self, http: httpx.AsyncClient, url: str, body: bytes, num_queries: int) -> list[list[Passage]]:
        """One attempt, with one deadline for the whole exchange."""
        with self._attempting(url):
            try:
                async with asyncio.timeout(self._timeout_s):
                    response = await http.post(url, content=body, timeout=timeout(self._timeout_s))
            except TimeoutError:
                raise httpx.ReadTimeout(f"no complete answer within {self._timeout_s:g} s") from None
        return self._read(url, response, num_queries)
