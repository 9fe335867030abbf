from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any, TypeVar

import pytest

from search_r1.config import EnvironmentConfig
from search_r1.environments.async_retriever import GatheringRetrieverClient
from search_r1.environments.search import SearchEnvironment
from search_r1.errors import RetrieverError
from search_r1.types import Action, Passage
from tests.fakes import FakeRetriever, decode, encode, make_prompt
from tests.scripted_server import (
    FakeServer,
    Respond,
    cut_short,
    drip,
    drip_headers,
    echo,
    fake_server,
    hang_up,
    reply,
    say_nothing,
    unused_url,
)

T = TypeVar("T")
BROKEN = (hang_up, cut_short, say_nothing, drip, drip_headers)


async def without_pause(seconds: float) -> None:
    await asyncio.sleep(0)


def run(use: Callable[[GatheringRetrieverClient], Awaitable[T]], *urls: str, **options: Any) -> T:
    """Use a client on a loop of its own and close it there."""

    async def main() -> T:
        client = GatheringRetrieverClient(urls, asleep=without_pause, **{"gather_s": 0.05, **options})
        try:
            return await use(client)
        finally:
            await client.aclose()
            client.close()

    return asyncio.run(main())


async def search_all(client: GatheringRetrieverClient, queries: Sequence[str], top_k: int = 1) -> list[list[Passage]]:
    return await asyncio.gather(*(client.asearch(query, top_k) for query in queries))


def ids(found: Sequence[Sequence[Passage]]) -> list[list[str]]:
    return [[passage.passage_id for passage in passages] for passages in found]


def test_queries_asked_together_make_one_request_and_each_gets_its_own_passages() -> None:
    with fake_server(echo) as server:
        found = run(lambda client: search_all(client, ["b", "a", "c"]), server.url)
    assert ids(found) == [["b"], ["a"], ["c"]]
    assert server.received == [{"queries": ["b", "a", "c"], "topk": 1, "return_scores": True}]


def test_equal_queries_under_way_are_sent_once_and_nobody_shares_a_list() -> None:
    with fake_server(echo) as server:
        found = run(lambda client: search_all(client, ["a", "b", "a", "a"]), server.url)
    assert ids(found) == [["a"], ["b"], ["a"], ["a"]]
    assert server.received[0]["queries"] == ["a", "b"]
    assert found[0] is not found[2]


def test_a_query_that_is_on_the_wire_is_joined_and_not_sent_again() -> None:
    arrived, go_on = threading.Event(), threading.Event()

    def wait(server: FakeServer, handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        arrived.set()
        assert go_on.wait(10)
        echo(server, handler, request)

    async def use(client: GatheringRetrieverClient) -> list[list[Passage]]:
        first = asyncio.create_task(client.asearch("a", 1))
        await asyncio.to_thread(arrived.wait, 10)
        second = asyncio.create_task(client.asearch("a", 1))
        await asyncio.sleep(0)
        go_on.set()
        return [await first, await second, await client.asearch("a", 1)]

    with fake_server(wait) as server:
        assert ids(run(use, server.url, gather_s=0.0)) == [["a"]] * 3
    assert len(server.received) == 2  # the third asked after the answer, so anew


def test_a_full_batch_does_not_wait_for_the_gathering_time() -> None:
    with fake_server(echo) as server:
        run(lambda client: search_all(client, list("abcd")), server.url, gather_s=3600.0, max_queries_per_request=2)
    assert sorted(len(body["queries"]) for body in server.received) == [2, 2]


def test_different_numbers_of_passages_are_different_requests() -> None:
    async def use(client: GatheringRetrieverClient) -> None:
        await asyncio.gather(client.asearch("a", 1), client.asearch("a", 2))

    with fake_server(echo) as server:
        run(use, server.url)
    assert sorted(body["topk"] for body in server.received) == [1, 2]


@pytest.mark.parametrize("failure", BROKEN, ids=lambda respond: respond.__name__)
def test_a_broken_exchange_is_tried_again_within_its_deadline(failure: Respond) -> None:
    with fake_server(failure, failure, echo) as server:
        found = run(lambda client: search_all(client, ["a", "b"]), server.url, timeout_s=0.15)
    assert ids(found) == [["a"], ["b"]]
    assert len(server.received) == 3


def test_all_queries_of_a_request_that_fails_get_its_error() -> None:
    async def use(client: GatheringRetrieverClient) -> list[object]:
        outcomes = await asyncio.gather(client.asearch("a", 1), client.asearch("b", 1), return_exceptions=True)
        assert client.stats()["failures"] == 1
        return list(outcomes)

    with fake_server(reply(503, {"detail": "the index is on fire"})) as server:
        outcomes = run(use, server.url, max_retries=2)
    assert all(isinstance(outcome, RetrieverError) for outcome in outcomes)
    assert "3 attempts" in str(outcomes[0])
    assert "on fire" in str(outcomes[1])


def test_a_final_status_is_not_tried_again() -> None:
    with fake_server(reply(404, {"result": [["an error body"]]})) as server:
        with pytest.raises(RetrieverError, match="HTTP 404"):
            run(lambda client: search_all(client, ["a"]), server.url)
        assert len(server.received) == 1


def test_a_dead_server_is_left_for_the_next_one() -> None:
    with fake_server(echo) as server:
        assert ids(run(lambda client: search_all(client, ["a"]), unused_url(), server.url)) == [["a"]]


def test_one_impatient_caller_does_not_cancel_the_others_but_the_last_one_does() -> None:
    async def use(client: GatheringRetrieverClient) -> int:
        waiting = [asyncio.create_task(client.asearch("a", 1)) for _ in range(2)]
        while not server.received:
            await asyncio.sleep(0.005)
        waiting[0].cancel()
        await asyncio.sleep(0)
        others = len(asyncio.all_tasks()) - 1  # the second caller, and the request
        waiting[1].cancel()
        await asyncio.wait(waiting)
        for _ in range(20):
            await asyncio.sleep(0)
        return others - len(asyncio.all_tasks()) + 1

    with fake_server(say_nothing) as server:
        assert run(use, server.url, gather_s=0.0) == 2


@pytest.mark.parametrize("gather_s", [0.0, 3600.0], ids=["on the wire", "still gathered"])
def test_closing_ends_every_search_that_still_waits_with_an_error(gather_s: float) -> None:
    async def use(client: GatheringRetrieverClient) -> list[object]:
        waiting = [asyncio.create_task(client.asearch(query, 1)) for query in ("a", "a", "b")]
        while not gather_s and not server.received:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0)
        await client.aclose()
        return list(await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5))

    with fake_server(say_nothing) as server:
        outcomes = run(use, server.url, gather_s=gather_s)
    assert [str(outcome) for outcome in outcomes] == ["the retriever client was closed before an answer came"] * 3
    assert all(isinstance(outcome, RetrieverError) for outcome in outcomes)


def test_the_environment_answers_single_actions_as_it_does_a_batch() -> None:
    actions = [Action("search", "a"), Action("invalid"), Action("search", "b\nc")]
    prompts = [make_prompt()] * 3

    def found(environment: SearchEnvironment) -> list[tuple[str, tuple[int, ...]]]:
        async def step() -> Any:
            return await asyncio.gather(*map(environment.astep, actions, prompts))

        single, batch = asyncio.run(step()), environment.step(actions, prompts)
        assert [(o.text, o.token_ids, o.passages) for o in single] == [(o.text, o.token_ids, o.passages) for o in batch]
        return [(o.text, o.token_ids) for o in single]

    with fake_server(echo) as server:
        client = GatheringRetrieverClient([server.url])
        assert "About b c" in found(SearchEnvironment(client, encode, decode, EnvironmentConfig(), 500))[2][0]
    blocking = FakeRetriever()
    found(SearchEnvironment(blocking, encode, decode, EnvironmentConfig(), 500))
    assert sorted(blocking.requests[:2]) == [["a"], ["b c"]]


def test_a_failed_search_comes_back_as_a_failed_observation() -> None:
    dead = SearchEnvironment(FakeRetriever(error="refused"), encode, decode, EnvironmentConfig(), 500)
    assert asyncio.run(dead.astep(Action("search", "a"), make_prompt())).failure == "refused"
