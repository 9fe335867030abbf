"""Web search against recorded answers of each provider, on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from retriever_server import web
from retriever_server.errors import RequestError, StartError
from retriever_server.stages import Outcome, search_isolating
from retriever_server.web import PROVIDERS, WebRetriever
from tests.recorded_server import Answer, Asked, recorded_server

KEYS = ("GOOGLE_API_KEY", "GOOGLE_CSE_ID", "SERPAPI_API_KEY", "SERPER_API_KEY", "TAVILY_API_KEY")


def result(query: str, rank: int, **extra: Any) -> dict[str, Any]:
    return {"title": f"About {query}", "link": f"https://x/{query}/{rank}", "snippet": f"{query} is {rank}.", **extra}


def recorded(provider: str, asked: Asked) -> Any:
    if provider == "google":
        query, count = asked.params["q"], int(asked.params["num"])
        items = [result(query, rank, kind="customsearch#result", displayLink="x") for rank in range(count)]
        return {"kind": "customsearch#search", "searchInformation": {"totalResults": "9"}, "items": items}
    if provider == "serpapi":
        query, count = asked.params["q"], int(asked.params["num"])
        results = [result(query, rank, position=rank + 1) for rank in range(count)]
        return {"search_metadata": {"status": "Success"}, "organic_results": results}
    if provider == "serper":
        query, count = asked.json["q"], asked.json["num"]
        results = [result(query, rank, position=rank + 1) for rank in range(count)]
        return {"searchParameters": {"q": query}, "organic": results, "credits": 1}
    query, count = asked.json["query"], asked.json["max_results"]
    found = [result(query, rank) for rank in range(count)]
    results = [{"title": one["title"], "url": one["link"], "content": one["snippet"], "score": 0.9} for one in found]
    return {"query": query, "results": results, "response_time": 1.0}


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in KEYS:
        monkeypatch.setenv(key, f"secret-{key}")
    monkeypatch.setattr("retriever_server.upstream.time.sleep", lambda seconds: None)


def open_web(url: str, tmp_path: Path, provider: str = "serper", **settings: Any) -> WebRetriever:
    return WebRetriever(provider, tmp_path / "web.sqlite", url=url, requests_per_s=1e6, **settings)


@pytest.mark.parametrize("provider", list(PROVIDERS))
def test_every_provider_answers_in_the_shape_of_a_retriever(provider: str, tmp_path: Path) -> None:
    with recorded_server(lambda asked: Answer(recorded(provider, asked))) as server:
        found = open_web(server.url, tmp_path, provider).search(["oslo", "lima", "oslo"], 2)
        assert len(server.asked) == 2
        assert all(asked.method == PROVIDERS[provider].method for asked in server.asked)
        sent = f"{server.asked[0].params} {server.asked[0].headers}"
        assert all(f"secret-{key}" in sent for key in PROVIDERS[provider].keys)
    assert found[0] == found[2]
    for query, passages in zip(["oslo", "lima"], found, strict=False):
        assert [json.loads(passage.document) for passage in passages] == [
            {
                "id": f"https://x/{query}/{rank}",
                "title": f"About {query}",
                "text": f"{query} is {rank}.",
                "url": f"https://x/{query}/{rank}",
                "contents": f'"About {query}"\n{query} is {rank}.',
            }
            for rank in range(2)
        ]
        assert [passage.score for passage in passages] == [1.0, 0.5]


def test_a_query_is_paid_for_once_also_after_a_restart(tmp_path: Path) -> None:
    with recorded_server(lambda asked: Answer(recorded("serper", asked))) as server:
        first = open_web(server.url, tmp_path).search(["oslo"], 2)
        assert open_web(server.url, tmp_path).search(["oslo"], 2) == first
        assert len(server.asked) == 1
        assert len(open_web(server.url, tmp_path).search(["oslo"], 3)[0]) == 3
        assert len(server.asked) == 2


def test_nothing_found_is_an_empty_list_and_remembered(tmp_path: Path) -> None:
    with recorded_server(lambda asked: Answer({"searchParameters": {}})) as server:
        retriever = open_web(server.url, tmp_path)
        assert retriever.search(["oslo"], 2) == retriever.search(["oslo"], 2) == [[]]
        assert len(server.asked) == 1


def test_the_daily_quota_refuses_new_queries_and_answers_known_ones(tmp_path: Path) -> None:
    with recorded_server(lambda asked: Answer(recorded("serper", asked))) as server:
        retriever = open_web(server.url, tmp_path, requests_per_day=2)
        retriever.search(["a", "b"], 1)
        with pytest.raises(RequestError, match="today's 2 web searches are used up"):
            retriever.search(["a", "c"], 1)
        assert len(retriever.search(["a", "b"], 1)) == 2
        assert len(server.asked) == 2


def test_a_failing_query_does_not_lose_what_the_others_cost(tmp_path: Path) -> None:
    def respond(asked: Asked) -> Answer:
        return Answer({}, 500) if asked.json["q"] == "bad" else Answer(recorded("serper", asked))

    with recorded_server(respond) as server:
        retriever = open_web(server.url, tmp_path)
        with pytest.raises(RequestError, match="answered 500, 3 times"):
            retriever.search(["good", "bad"], 1)
        before = len(server.asked)
        retriever.search(["good"], 1)
        assert len(server.asked) == before


def test_a_query_that_fails_or_is_not_paid_for_fails_alone(tmp_path: Path) -> None:
    def respond(asked: Asked) -> Answer:
        return Answer(recorded("serper", asked), {"broken": 500, "refused": 400}.get(asked.json["q"], 200))

    def statuses(outcomes: list[Outcome]) -> list[int]:
        return [outcome.status if isinstance(outcome, RequestError) else 200 for outcome in outcomes]

    with recorded_server(respond) as server:
        retriever = open_web(server.url, tmp_path, requests_per_day=6)
        found = search_isolating(retriever, ["a", "broken", "b", "refused", "a", "broken"], 1)
        assert statuses(found) == [200, 503, 200, 500, 200, 503]
        assert found[0] == found[4] != found[2]
        assert len(server.asked) == 6, "three tries of the broken one, each of them paid for"
        assert statuses(search_isolating(retriever, ["a", "new", "b"], 1)) == [200, 503, 200]
        assert len(server.asked) == 6


def test_requests_that_are_repeated_wait_for_their_turn_and_count_as_todays(tmp_path: Path) -> None:
    turns: list[None] = []
    with recorded_server(lambda asked: Answer({}, 500)) as server:
        retriever = open_web(server.url, tmp_path, requests_per_day=5)
        retriever._pace.wait = lambda: turns.append(None)  # type: ignore[method-assign]
        for cause in ("answered 500, 3 times", "today's 5 web searches are used up"):
            with pytest.raises(RequestError, match=cause):
                retriever.search(["oslo"], 1)
        assert len(turns) == len(server.asked) == 5


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500])
def test_no_error_holds_a_key_or_an_address(status: int, tmp_path: Path) -> None:
    with recorded_server(lambda asked: Answer({"message": "bad key secret-GOOGLE_API_KEY"}, status)) as server:
        with pytest.raises((RequestError, ValueError)) as caught:
            open_web(server.url, tmp_path, "google").search(["oslo"], 1)
        assert "secret" not in str(caught.value)
        assert server.url not in str(caught.value)


def test_a_missing_key_is_named_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_CSE_ID")
    with pytest.raises(StartError, match="by google needs the environment variable GOOGLE_CSE_ID"):
        WebRetriever("google", tmp_path / "web.sqlite")


def test_requests_keep_their_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("retriever_server.web.time.monotonic", lambda: 100.0)
    monkeypatch.setattr("retriever_server.web.time.sleep", waits.append)
    pace = web._Pace(4)
    for _ in range(4):
        pace.wait()
    assert waits == [0.0, 0.25, 0.5, 0.75]
