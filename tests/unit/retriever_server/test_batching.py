from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from retriever_server.batching import Batcher, Ticket
from retriever_server.cache import ResultCache
from retriever_server.errors import RequestError
from retriever_server.metrics import Metrics
from retriever_server.retriever import ScoredPassage
from retriever_server.stages import search_isolating
from tests.batcher_run import run
from tests.fake_retrievers import StubRetriever, passage


async def occupy(retriever: StubRetriever, batcher: Batcher) -> Ticket:
    """Keep the worker busy with one query until the gate opens."""
    retriever.gate.clear()
    retriever.entered.clear()
    ticket = batcher.submit(["busy"], 1)
    await asyncio.to_thread(retriever.entered.wait, 10)
    return ticket


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(name, labels)
    assert found is not None, name
    return found


def test_what_is_queued_while_the_worker_is_busy_is_searched_together() -> None:
    retriever = StubRetriever()

    async def scenario(batcher: Batcher) -> None:
        await occupy(retriever, batcher)
        tickets = [batcher.submit([f"q{number}"], 2) for number in range(30)]
        retriever.gate.set()
        for number, ticket in enumerate(tickets):
            assert await ticket.future == [[passage(f"q{number}", 0), passage(f"q{number}", 1)]]

    run(retriever, scenario)
    assert [len(queries) for queries, _ in retriever.calls] == [1, 30]


def test_a_lone_query_waits_for_no_batch() -> None:
    retriever = StubRetriever()

    async def scenario(batcher: Batcher) -> None:
        for number in range(3):
            await batcher.submit([str(number)], 1).future

    run(retriever, scenario)
    assert [queries for queries, _ in retriever.calls] == [["0"], ["1"], ["2"]]


def test_single_queries_do_not_wait_for_a_request_of_ten_thousand() -> None:
    retriever = StubRetriever()

    async def scenario(batcher: Batcher) -> None:
        await occupy(retriever, batcher)
        large = batcher.submit([f"large {number}" for number in range(10_000)], 1)
        singles = [batcher.submit([f"single {number}"], 1) for number in range(100)]
        retriever.gate.set()
        for ticket in singles:
            await ticket.future
        assert not large.future.done()
        results = await large.future
        assert [passages[0] for passages in results] == [passage(f"large {number}", 0) for number in range(10_000)]

    run(retriever, scenario, max_batch=64)
    position = max(retriever.searched.index(f"single {number}") for number in range(100))
    assert position < 3 * 64


def test_a_query_asked_behind_a_long_request_runs_at_the_askers_turn() -> None:
    retriever = StubRetriever()

    async def scenario(batcher: Batcher) -> None:
        await occupy(retriever, batcher)
        large = batcher.submit([f"large {number}" for number in range(1000)], 1)
        single = batcher.submit(["large 999"], 1)
        retriever.gate.set()
        assert await single.future == [[passage("large 999", 0)]]
        assert not large.future.done()
        assert (await large.future)[999] == [passage("large 999", 0)]

    run(retriever, scenario, max_batch=32)
    assert retriever.searched.count("large 999") == 1


def test_equal_queries_are_searched_once_within_and_across_requests() -> None:
    retriever = StubRetriever()

    async def scenario(batcher: Batcher) -> None:
        await occupy(retriever, batcher)
        tickets = [batcher.submit(["a", "b", "a"], 1), batcher.submit(["b", "a"], 1)]
        retriever.gate.set()
        assert await tickets[0].future == [[passage("a", 0)], [passage("b", 0)], [passage("a", 0)]]
        assert await tickets[1].future == [[passage("b", 0)], [passage("a", 0)]]

    metrics = run(retriever, scenario)
    assert retriever.searched == ["busy", "a", "b"]
    assert value(metrics, "retriever_cache_total", result="shared") == 3


def test_a_query_in_the_middle_of_its_search_is_shared() -> None:
    retriever = StubRetriever()

    async def scenario(batcher: Batcher) -> None:
        first = await occupy(retriever, batcher)
        second = batcher.submit(["busy"], 1)
        retriever.gate.set()
        assert await first.future == await second.future

    run(retriever, scenario, cache_bytes=0)
    assert retriever.searched == ["busy"]


def test_a_remembered_query_is_not_searched_again_and_top_k_is_part_of_the_memory() -> None:
    retriever = StubRetriever()

    async def scenario(batcher: Batcher) -> None:
        for top_k in (3, 3, 1, 3):
            (passages,) = await batcher.submit(["a"], top_k).future
            assert len(passages) == top_k

    metrics = run(retriever, scenario)
    assert [top_k for _, top_k in retriever.calls] == [3, 1]
    assert value(metrics, "retriever_cache_total", result="hit") == 2


def test_different_top_ks_in_one_batch_are_searched_apart() -> None:
    retriever = StubRetriever()

    async def scenario(batcher: Batcher) -> None:
        await occupy(retriever, batcher)
        tickets = {top_k: batcher.submit(["a"], top_k) for top_k in (1, 5)}
        retriever.gate.set()
        for top_k, ticket in tickets.items():
            assert len((await ticket.future)[0]) == top_k

    run(retriever, scenario)
    assert retriever.calls[1:] == [(["a"], 1), (["a"], 5)]


def test_a_failing_query_fails_its_own_request_and_no_other() -> None:
    retriever = StubRetriever(fails_on=["bad"])

    async def scenario(batcher: Batcher) -> None:
        await occupy(retriever, batcher)
        good = [batcher.submit([f"g{number}"], 1) for number in range(20)]
        bad = batcher.submit(["fine", "bad"], 1)
        retriever.gate.set()
        for number, ticket in enumerate(good):
            assert await ticket.future == [[passage(f"g{number}", 0)]]
        with pytest.raises(RequestError, match="failed on a query: LookupError: cannot search 'bad'") as caught:
            await bad.future
        assert caught.value.status == 500

    metrics = run(retriever, scenario)
    assert value(metrics, "retriever_failed_queries_total") == 1


def test_a_failure_is_not_remembered() -> None:
    retriever = StubRetriever(fails_on=["bad"])

    async def scenario(batcher: Batcher) -> None:
        for _ in range(2):
            with pytest.raises(RequestError):
                await batcher.submit(["bad"], 1).future
        retriever._fails_on = ()
        assert await batcher.submit(["bad"], 1).future == [[passage("bad", 0)]]

    run(retriever, scenario)


def test_a_retriever_that_fails_on_everything_is_not_asked_forever() -> None:
    queries = [str(number) for number in range(256)]
    retriever = StubRetriever(fails_on=queries)
    outcomes = search_isolating(retriever, queries, 1)
    assert all(isinstance(outcome, LookupError) for outcome in outcomes)
    assert len(retriever.calls) < 200


@pytest.mark.parametrize("bad", [[0], [6], [2, 3], [0, 4, 6]])
def test_isolation_finds_exactly_the_guilty_queries(bad: list[int]) -> None:
    queries = [str(number) for number in range(7)]
    outcomes = search_isolating(StubRetriever(fails_on=[str(number) for number in bad]), queries, 1)
    for number, outcome in enumerate(outcomes):
        if number in bad:
            assert isinstance(outcome, LookupError)
        else:
            assert outcome == [passage(str(number), 0)]


def test_a_wrong_number_of_lists_is_an_error_not_a_shift() -> None:
    class Short(StubRetriever):
        def search(self, queries: Any, top_k: int) -> list[list[ScoredPassage]]:
            return super().search(queries, top_k)[:-1]

    (outcome,) = search_isolating(Short(), ["a"], 1)
    assert isinstance(outcome, ValueError)
    assert "0 lists of passages for 1 queries" in str(outcome)


def test_a_full_queue_refuses_with_503_and_says_when_to_come_back() -> None:
    retriever = StubRetriever()

    async def scenario(batcher: Batcher) -> None:
        await occupy(retriever, batcher)
        kept = batcher.submit([str(number) for number in range(10)], 1)
        with pytest.raises(RequestError) as caught:
            batcher.submit(["one", "too many"], 1)
        assert caught.value.status == 503
        assert caught.value.retry_after_s is not None
        assert 1 <= caught.value.retry_after_s <= 30
        assert batcher.submit(["9", "0", "1"], 1)  # already queued: no new work
        retriever.gate.set()
        await kept.future
        assert await batcher.submit(["one", "too many"], 1).future

    run(retriever, scenario, max_queued=11)


def test_nothing_of_a_refused_request_is_searched() -> None:
    retriever = StubRetriever()

    async def scenario(batcher: Batcher) -> None:
        await occupy(retriever, batcher)
        batcher.submit(["a"], 1)
        with pytest.raises(RequestError):
            batcher.submit(["b", "c"], 1)
        retriever.gate.set()

    run(retriever, scenario, max_queued=2)
    assert retriever.searched == ["busy", "a"]


def test_a_request_larger_than_the_queue_is_served_when_the_queue_is_empty() -> None:
    retriever = StubRetriever()

    async def scenario(batcher: Batcher) -> None:
        assert len(await batcher.submit([str(number) for number in range(50)], 1).future) == 50

    run(retriever, scenario, max_queued=10)


def test_queries_nobody_waits_for_any_more_are_not_searched() -> None:
    retriever = StubRetriever()

    async def scenario(batcher: Batcher) -> None:
        await occupy(retriever, batcher)
        gone = batcher.submit(["gone", "shared"], 1)
        there = batcher.submit(["shared"], 1)
        gone.fail(RequestError(504, "late", reason="deadline"))
        retriever.gate.set()
        assert await there.future == [[passage("shared", 0)]]

    metrics = run(retriever, scenario)
    assert retriever.searched == ["busy", "shared"]
    assert value(metrics, "retriever_dropped_queries_total") == 1


def test_a_dropped_query_can_be_asked_again() -> None:
    retriever = StubRetriever()

    async def scenario(batcher: Batcher) -> None:
        busy = await occupy(retriever, batcher)
        batcher.submit(["a"], 1).fail(RequestError(504, "late", reason="deadline"))
        retriever.gate.set()
        await busy.future
        assert await batcher.submit(["a"], 1).future == [[passage("a", 0)]]

    run(retriever, scenario)


def test_closing_finishes_what_is_queued() -> None:
    retriever = StubRetriever()
    tickets = []

    async def scenario(batcher: Batcher) -> None:
        await occupy(retriever, batcher)
        tickets.extend(batcher.submit([str(number)], 1) for number in range(10))

    run(retriever, scenario)
    assert [ticket.future.result() for ticket in tickets] == [[[passage(str(number), 0)]] for number in range(10)]


def test_the_cache_forgets_the_least_recently_used_and_stays_within_its_bytes() -> None:
    cache = ResultCache(max_bytes=10 * 1000)
    entry = [ScoredPassage(b"x" * 450, 1.0)]  # 1000 bytes with the overhead
    keys = [("index", letter, 3) for letter in "abcdefghijkl"]
    for key in keys[:10]:
        cache.put(key, entry)
    assert cache.get(keys[0]) == entry
    cache.put(keys[10], entry)
    assert cache.get(keys[1]) is None
    assert cache.get(keys[0]) == cache.get(keys[10]) == entry
    cache.put(keys[10], [])
    assert len(cache) == 10
    cache.put(keys[11], [ScoredPassage(b"x" * 20_000, 1.0)])
    assert cache.get(keys[11]) is None
    assert len(cache) == 10


def test_the_caches_bytes_count_the_text_of_the_queries() -> None:
    cache = ResultCache(max_bytes=1 << 20)
    for number in range(100):
        cache.put(("index", f"{number} ".ljust(30_000, "x"), 3), [])
    assert len(cache) == (1 << 20) // 30_399


def test_a_cache_of_no_bytes_keeps_nothing() -> None:
    cache = ResultCache(0)
    cache.put(("index", "a", 3), [])
    assert cache.get(("index", "a", 3)) is None


def test_the_wait_told_to_clients_follows_the_measured_speed() -> None:
    retriever = StubRetriever()

    async def scenario(batcher: Batcher) -> None:
        batcher._queries_per_s = 10.0
        await occupy(retriever, batcher)
        batcher.submit([str(number) for number in range(95)], 1)
        with pytest.raises(RequestError) as caught:
            batcher.submit(["x"] + [f"y{number}" for number in range(10)], 1)
        assert caught.value.retry_after_s == math.ceil(95 / 10)

    run(retriever, scenario, max_queued=100)
