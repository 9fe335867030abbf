"""Retrievers of two stages: a batch is prepared while the one before it is searched."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from retriever_server.batching import Batcher
from retriever_server.errors import QueriesFailed, RequestError
from retriever_server.retriever import ScoredPassage, StagedRetriever
from tests.batcher_run import run
from tests.fake_retrievers import StubRetriever, passage


class TwoStages(StubRetriever):
    """Prepares by writing queries in capitals. The gate holds the second stage."""

    stages = ("encode", "search")

    def __init__(self, *, fails_to_prepare: Sequence[str] = (), fails_on: Sequence[str] = ()) -> None:
        super().__init__(fails_on=fails_on)
        self.fails_to_prepare = fails_to_prepare
        self.prepared: list[list[str]] = []
        self.threads: dict[str, set[str]] = {"encode": set(), "search": set()}
        self.preparing = threading.Lock()

    def prepare(self, queries: Sequence[str], top_k: int) -> list[str]:
        assert self.preparing.acquire(blocking=False), "two threads in the first stage"
        try:
            self.threads["encode"].add(threading.current_thread().name)
            self.prepared.append(list(queries))
            if "unpaid" in queries:
                refusal = RequestError(503, "no quota", reason="quota")
                raise QueriesFailed({place: refusal for place, query in enumerate(queries) if query == "unpaid"})
            if "down" in queries:
                raise RequestError(503, "the engine is down", reason="upstream")
            if set(queries) & set(self.fails_to_prepare):
                raise LookupError("cannot prepare")
            return [query.upper() for query in queries]
        finally:
            self.preparing.release()

    def complete(self, queries: Sequence[str], prepared: list[str], top_k: int) -> list[list[ScoredPassage]]:
        self.threads["search"].add(threading.current_thread().name)
        assert prepared == [query.upper() for query in queries]
        return super().search(queries, top_k)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        return self.complete(queries, self.prepare(queries, top_k), top_k)


async def until(true: Callable[[], Any]) -> None:
    while not true():
        await asyncio.sleep(0.002)


def test_a_batch_is_prepared_while_the_one_before_it_is_searched() -> None:
    retriever = TwoStages()
    assert isinstance(retriever, StagedRetriever)

    async def scenario(batcher: Batcher) -> None:
        retriever.gate.clear()
        first = batcher.submit(["one"], 1)
        await until(retriever.entered.is_set)
        second = batcher.submit(["two"], 1)
        await until(lambda: retriever.prepared == [["one"], ["two"]])
        third, fourth = batcher.submit(["three"], 1), batcher.submit(["four"], 1)
        await asyncio.sleep(0.02)
        assert len(retriever.prepared) == 2, "only one batch waits between the stages"
        assert batcher.running_s > 0.02
        retriever.gate.set()
        for ticket, query in ((first, "one"), (second, "two"), (third, "three"), (fourth, "four")):
            assert await ticket.future == [[passage(query, 0)]]
        assert batcher.running_s == 0

    metrics = run(retriever, scenario, cache_bytes=0)
    assert retriever.prepared == [["one"], ["two"], ["three", "four"]]
    assert [len(names) for names in retriever.threads.values()] == [1, 1]
    assert retriever.threads["encode"] != retriever.threads["search"]
    for stage in ("encode", "search"):
        assert metrics.registry.get_sample_value("retriever_seconds_count", {"stage": stage}) == 3


@pytest.mark.parametrize("stage", ["fails_to_prepare", "fails_on"])
def test_a_query_that_fails_in_either_stage_fails_alone(stage: str) -> None:
    retriever = TwoStages(**{stage: ["bad"]})  # type: ignore[arg-type]

    async def scenario(batcher: Batcher) -> None:
        queries = ["a", "b", "bad", "c", "d"]
        tickets = [batcher.submit([query], 1) for query in queries]
        for query, ticket in zip(queries, tickets, strict=True):
            if query == "bad":
                with pytest.raises(RequestError, match="LookupError"):
                    await ticket.future
            else:
                assert await ticket.future == [[passage(query, 0)]]

    run(retriever, scenario, cache_bytes=0)


def test_an_engine_that_is_down_is_not_asked_again_for_each_query() -> None:
    retriever = TwoStages()

    async def scenario(batcher: Batcher) -> None:
        with pytest.raises(RequestError, match="the engine is down"):
            await batcher.submit(["a", "down", "b"], 1).future

    run(retriever, scenario, cache_bytes=0)
    assert retriever.prepared == [["a", "down", "b"]]


def test_queries_that_the_first_stage_names_fail_alone_and_are_not_asked_again() -> None:
    retriever = TwoStages()

    async def scenario(batcher: Batcher) -> None:
        tickets = [batcher.submit([query], 1) for query in ("a", "unpaid", "b")]
        with pytest.raises(RequestError, match="no quota"):
            await tickets[1].future
        assert [await tickets[place].future for place in (0, 2)] == [[[passage("a", 0)]], [[passage("b", 0)]]]

    run(retriever, scenario, cache_bytes=0)
    assert retriever.prepared == [["a", "unpaid", "b"], ["a", "b"]]


def test_a_failed_batch_is_tried_again_without_a_second_thread_in_the_first_stage() -> None:
    retriever = TwoStages(fails_on=["bad"])

    async def scenario(batcher: Batcher) -> None:
        tickets = [batcher.submit([f"q{number}", "bad"] if number % 7 == 0 else [f"q{number}"], 1) for number in (0, 1)]
        for number in range(2, 120):
            tickets.append(batcher.submit(["bad" if number % 7 == 0 else f"q{number}"], 1))
            await asyncio.sleep(0)
        await asyncio.gather(*(ticket.future for ticket in tickets), return_exceptions=True)
        failed = [number for number, ticket in enumerate(tickets) if ticket.future.exception()]
        assert failed == list(range(0, 120, 7))

    run(retriever, scenario, cache_bytes=0)
