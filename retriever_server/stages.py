"""The worker threads that run a retriever: one, or one a stage where its search falls into stages."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from retriever_server.errors import QueriesFailed, RequestError
from retriever_server.metrics import Metrics
from retriever_server.retriever import Retriever, ScoredPassage, StagedRetriever
from retriever_server.threads import Threads

logger = logging.getLogger(__name__)

_MAX_ISOLATION_CALLS = 64
"""Searches spent on finding the guilty queries of a failed batch; the rest then fails with them."""

Outcome = list[ScoredPassage] | Exception
T = TypeVar("T")


class Stages:
    """To be used from one event loop; every thread runs one batch at a time."""

    def __init__(self, retriever: Retriever, metrics: Metrics) -> None:
        self._retriever = retriever
        self._staged = retriever if isinstance(retriever, StagedRetriever) else None
        names = self._staged.stages if self._staged else ("search",)
        self._threads = [Threads(name) for name in names]
        self._seconds = [metrics.stage(name) for name in names]
        self._first_stage = threading.Lock()

    @property
    def overlap(self) -> bool:
        """Whether a batch can be prepared while another one is searched."""
        return self._staged is not None

    async def prepare(self, queries: Sequence[str], top_k: int) -> Any:
        """The first of two stages. What it returns, also where it failed, is for `search` alone."""
        return await self._run(0, self._prepare, queries, top_k)

    async def search(self, queries: Sequence[str], prepared: Any, top_k: int) -> list[Outcome]:
        """One outcome a query, in order: its passages, or the error it caused."""
        return await self._run(-1, self._search, queries, prepared, top_k)

    def close(self) -> None:
        for thread in self._threads:
            thread.close()

    async def _run(self, stage: int, work: Callable[..., T], *arguments: Any) -> T:
        started = time.monotonic()
        found = await asyncio.get_running_loop().run_in_executor(self._threads[stage], work, *arguments)
        self._seconds[stage].observe(time.monotonic() - started)
        return found

    def _prepare(self, queries: Sequence[str], top_k: int) -> Any:
        assert self._staged is not None
        try:
            with self._first_stage:
                return self._staged.prepare(queries, top_k)
        except RequestError as error:  # an engine behind the retriever is down
            return error
        except Exception as error:  # noqa: BLE001  # comes up again where each query is tried alone
            logger.warning("stage 1 failed for %d queries: %s", len(queries), error)
            return None

    def _search(self, queries: Sequence[str], prepared: Any, top_k: int) -> list[Outcome]:
        if self._staged is None:
            return search_isolating(self._retriever, queries, top_k)
        if isinstance(prepared, QueriesFailed):
            with self._first_stage:
                return _search_the_others(self._retriever, queries, top_k, prepared)
        if isinstance(prepared, RequestError):
            return [prepared] * len(queries)
        try:
            if prepared is not None:
                return list(_one_each(self._staged.complete(queries, prepared, top_k), queries))
        except Exception as error:  # noqa: BLE001  # likewise
            logger.warning("stage 2 failed for %d queries: %s", len(queries), error)
        with self._first_stage:
            return search_isolating(self._retriever, queries, top_k)


def search_isolating(retriever: Retriever, queries: Sequence[str], top_k: int) -> list[Outcome]:
    """Search all queries at once; where that fails, halve until the guilty ones stand alone.

    Returns:
        One outcome a query, in order: its passages, or the error it caused.
    """
    outcomes: list[Outcome] = [[] for _ in queries]
    spans = [(0, len(queries))]
    calls = 0
    while spans:
        start, stop = spans.pop()
        part = queries[start:stop]
        try:
            outcomes[start:stop] = _one_each(retriever.search(part, top_k), part)
        except QueriesFailed as error:
            outcomes[start:stop] = _search_the_others(retriever, part, top_k, error)
        except RequestError as error:  # not one query's fault: an engine behind the retriever is down
            logger.warning("search of %d queries refused: %s", stop - start, error)
            outcomes[start:stop] = [error] * (stop - start)
        except Exception as error:
            calls += 1
            if stop - start == 1 or calls > _MAX_ISOLATION_CALLS:
                logger.exception("search failed for %d queries, the first %.100r", stop - start, queries[start])
                outcomes[start:stop] = [error] * (stop - start)
            else:
                middle = (start + stop) // 2
                spans += [(start, middle), (middle, stop)]
    return outcomes


def _search_the_others(
    retriever: Retriever, queries: Sequence[str], top_k: int, failed: QueriesFailed
) -> list[Outcome]:
    others = [place for place in range(len(queries)) if place not in failed.causes]
    found = search_isolating(retriever, [queries[place] for place in others], top_k)
    outcomes: dict[int, Outcome] = {**failed.causes, **dict(zip(others, found, strict=True))}
    return [outcomes[place] for place in range(len(queries))]


def _one_each(found: list[list[ScoredPassage]], queries: Sequence[str]) -> list[list[ScoredPassage]]:
    if len(found) != len(queries):
        raise ValueError(f"{len(found)} lists of passages for {len(queries)} queries")
    return found
