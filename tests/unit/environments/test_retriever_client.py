from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.environments.retriever_client import (
    RetrieverClient,
    encode_request,
    parse_answer,
    parse_document,
    retrieve_url,
)
from search_r1.errors import ConfigError, RetrieverError
from search_r1.types import Passage
from tests.scripted_server import (
    FakeServer,
    Respond,
    cut_short,
    drip,
    drip_headers,
    echo,
    fake_server,
    hang_up,
    item,
    reply,
    say_nothing,
    unused_url,
)

BROKEN = (hang_up, cut_short, say_nothing, drip, drip_headers)


class Pauses(list[float]):
    """A sleep that only takes notes."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


def client_of(*urls: str, pauses: Pauses | None = None, **options: Any) -> RetrieverClient:
    return RetrieverClient(urls, sleep=Pauses() if pauses is None else pauses, **options)


def ids(found: Sequence[Sequence[Passage]]) -> list[list[str]]:
    return [[passage.passage_id for passage in passages] for passages in found]


def test_passages_come_back_in_the_order_of_the_queries() -> None:
    with fake_server(echo) as server:
        found = client_of(server.url).search(["b", "a"], 3)
    assert found == [
        [Passage('"About b"', "text of b", "b", 1.5)],
        [Passage('"About a"', "text of a", "a", 1.5)],
    ]
    assert server.received == [{"queries": ["b", "a"], "topk": 3, "return_scores": True}]


def test_no_queries_send_no_request() -> None:
    with fake_server(echo) as server:
        assert client_of(server.url).search([], 3) == []
    assert server.received == []


def test_equal_queries_are_sent_once_and_all_answered() -> None:
    with fake_server(echo) as server:
        found = client_of(server.url).search(["a", "b", "a", "a"], 3)
    assert ids(found) == [["a"], ["b"], ["a"], ["a"]]
    assert server.received[0]["queries"] == ["a", "b"]
    assert found[0] is not found[2]


def test_a_large_batch_goes_in_chunks_and_keeps_its_order() -> None:
    queries = [f"q{number}" for number in range(25)]
    with fake_server(echo) as server:
        found = client_of(server.url, max_queries_per_request=4).search(queries, 1)
    assert ids(found) == [[query] for query in queries]
    assert sorted(len(body["queries"]) for body in server.received) == [1, 4, 4, 4, 4, 4, 4]


def test_chunks_are_in_flight_together_but_no_more_than_allowed() -> None:
    meeting = threading.Barrier(2, timeout=10)
    running, most = 0, 0
    lock = threading.Lock()

    def meet(server: FakeServer, handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        meeting.wait()
        with lock:
            running -= 1
        echo(server, handler, request)

    with fake_server(meet) as server:
        client_of(server.url, max_queries_per_request=1, max_connections=2).search(list("abcdef"), 1)
    assert most == 2


@pytest.mark.parametrize("failure", BROKEN, ids=lambda respond: respond.__name__)
def test_a_broken_exchange_is_tried_again(failure: Respond) -> None:
    pauses = Pauses()
    with fake_server(failure, failure, echo) as server:
        client = client_of(server.url, pauses=pauses, timeout_s=0.15)
        assert ids(client.search(["a"], 1)) == [["a"]]
    stats = client.stats()
    assert (stats["requests"], stats["retries"], stats["failures"]) == (3, 2, 0)
    assert len(pauses) == 2


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_passing_status_is_tried_again(status: int) -> None:
    with fake_server(reply(status, {"detail": "busy"}), echo) as server:
        assert ids(client_of(server.url).search(["a"], 1)) == [["a"]]
    assert len(server.received) == 2


@pytest.mark.parametrize("status", [204, 301, 400, 401, 404, 413, 422, 501])
def test_a_final_status_is_not_tried_again_and_its_body_is_no_passage(status: int) -> None:
    body = b"" if status == 204 else b'{"result": [["an error body"]]}'
    with (
        fake_server(reply(status, body)) as server,
        pytest.raises(RetrieverError, match=rf"{server.url} refused the request: HTTP {status}"),
    ):
        client_of(server.url).search(["a"], 1)
    assert len(server.received) == 1


def test_retries_end_and_the_error_names_url_and_cause() -> None:
    pauses = Pauses()
    with fake_server(reply(503, {"detail": "the index is on fire"})) as server:
        client = client_of(server.url, pauses=pauses, max_retries=3)
        with pytest.raises(RetrieverError, match=rf"{server.url} gave no answer in 4 attempts.*503.*on fire"):
            client.search(["a"], 1)
    assert len(server.received) == 4
    stats = client.stats()
    assert (stats["retries"], stats["failures"], stats["seconds"]) == (3, 1, [])
    assert len(pauses) == 3


def test_a_server_that_is_not_there_ends_in_a_typed_error() -> None:
    url = unused_url()
    with pytest.raises(RetrieverError, match="ConnectError"):
        client_of(url, max_retries=2).search(["a"], 1)


def test_pauses_grow_exponentially_with_full_jitter() -> None:
    random.seed(0)
    rows = []
    with fake_server(reply(503, {})) as server:
        for _ in range(40):
            pauses = Pauses()
            with pytest.raises(RetrieverError):
                client_of(server.url, pauses=pauses, max_retries=6).search(["a"], 1)
            rows.append(pauses)
    for column, limit in zip(zip(*rows, strict=True), [0.5, 1, 2, 4, 8, 10], strict=True):
        assert max(column) <= limit
        assert max(column) > 0.7 * limit
        assert min(column) < 0.3 * limit


def test_retry_after_is_honoured() -> None:
    pauses = Pauses()
    with fake_server(reply(503, {}, retry_after="17"), reply(503, {}, retry_after="soon"), echo) as server:
        client_of(server.url, pauses=pauses).search(["a"], 1)
    assert pauses[0] == 17.0
    assert pauses[1] <= 1.0


def test_each_of_several_servers_is_left_alone_as_long_as_it_asked() -> None:
    clock, asked = Pauses(), list[tuple[str, float]]()

    def busy(name: str, retry_after: str) -> Respond:
        def respond(server: FakeServer, handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
            asked.append((name, sum(clock)))
            reply(503, {}, retry_after=retry_after)(server, handler, request)

        return respond

    with fake_server(busy("a", "30")) as a, fake_server(busy("b", "20")) as b, pytest.raises(RetrieverError):
        client_of(a.url, b.url, pauses=clock, max_retries=4).search(["x"], 1)
    assert asked == [("a", 0.0), ("b", 0.0), ("b", 20.0), ("a", 30.0), ("b", 40.0)]


def test_retry_after_of_an_hour_does_not_stop_the_run_for_an_hour() -> None:
    pauses = Pauses()
    with fake_server(reply(503, {}, retry_after="3600"), echo) as server:
        client_of(server.url, pauses=pauses).search(["a"], 1)
    assert pauses == [60.0]


def test_requests_go_to_the_servers_in_turn() -> None:
    with fake_server(echo) as first, fake_server(echo) as second:
        client = client_of(first.url, second.url)
        for number in range(6):
            client.search([str(number)], 1)
    assert [len(first.received), len(second.received)] == [3, 3]


def test_a_dead_server_costs_nothing_while_another_lives() -> None:
    pauses = Pauses()
    dead = unused_url()
    with fake_server(echo) as alive:
        client = client_of(dead, alive.url, pauses=pauses)
        for number in range(8):
            assert ids(client.search([str(number)], 1)) == [[str(number)]]
    assert len(alive.received) == 8
    assert client.stats()["retries"] == 1  # the first request finds out, the others avoid the dead one
    assert pauses == [0.0]


def test_the_error_names_every_server_that_failed() -> None:
    first, second = unused_url(), unused_url()
    with pytest.raises(RetrieverError) as caught:
        client_of(first, second, max_retries=1).search(["a"], 1)
    assert first in str(caught.value)
    assert second in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>Bad gateway</html>",
        b"[" * 100_000,
        b'{"result": [[{"document": {"contents": "x"}',
        b"[]",
        b"null",
        b'{"detail": "an error"}',
        b'{"result": null}',
        b'{"result": {"a": []}}',
        b'{"result": []}',
        b'{"result": [[], []]}',
        b'{"result": [null]}',
        b'{"result": ["no list"]}',
        b'{"result": [["no document"]]}',
        b'{"result": [[{"document": "no object", "score": 1}]]}',
        b'{"result": [[{"document": {"id": "1"}, "score": 1}]]}',
        b'{"result": [[{"error": "index not loaded"}]]}',
        b'{"result": [[{"document": {"contents": "  "}}]]}',
        b'{"result": [[{"document": {"contents": 7}}]]}',
        b"\xff\xfe",
    ],
)
def test_a_malformed_answer_is_never_taken_for_a_passage(body: bytes) -> None:
    with (
        fake_server(reply(200, body)) as server,
        pytest.raises(RetrieverError, match=rf"{server.url} answered with something else than passages"),
    ):
        client_of(server.url).search(["a"], 1)


def test_an_answer_in_an_encoding_it_does_not_have_is_an_error() -> None:
    with (
        fake_server(reply(200, b"not gzip", content_encoding="gzip")) as server,
        pytest.raises(RetrieverError, match="unreadable answer"),
    ):
        client_of(server.url).search(["a"], 1)


def test_more_passages_than_asked_for_are_cut() -> None:
    many = reply(200, {"result": [[item(str(number)) for number in range(9)]]})
    with fake_server(many) as server:
        assert ids(client_of(server.url).search(["a"], 2)) == [["0", "1"]]


def test_bare_documents_are_read_too() -> None:
    with fake_server(reply(200, {"result": [[{"id": 5, "title": "T", "text": "x"}]]})) as server:
        assert client_of(server.url).search(["a"], 2) == [[Passage("T", "x", "5", None)]]


@given(st.text())
def test_every_query_text_can_be_sent(query: str) -> None:
    assert json.loads(encode_request([query], 3))["queries"] == [query]


def test_a_query_with_a_lone_surrogate_is_sent_without_it() -> None:
    with fake_server(echo) as server:
        client_of(server.url).search(["a\ud800b"], 1)
    assert server.received[0]["queries"] == ["a?b"]


def test_stats_are_reset_on_read() -> None:
    with fake_server(echo) as server:
        client = client_of(server.url)
        client.search(["a", "b"], 1)
        stats = client.stats()
        assert (stats["requests"], stats["queries"], len(stats["seconds"])) == (1, 2, 1)
        assert client.stats() == {"requests": 0, "queries": 0, "retries": 0, "failures": 0, "seconds": []}


def test_one_client_serves_many_threads() -> None:
    with fake_server(echo) as first, fake_server(echo) as second, ThreadPoolExecutor(8) as threads:
        client = client_of(first.url, second.url, max_connections=3)
        found = list(threads.map(lambda number: client.search([str(number)], 1), range(200)))
    assert ids([passages for lists in found for passages in lists]) == [[str(number)] for number in range(200)]
    assert client.stats()["requests"] == 200


def test_the_token_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRIEVER_TOKEN", "secret")
    with fake_server(echo) as server:
        client_of(server.url).search(["a"], 1)
    assert server.headers[0]["authorization"] == "Bearer secret"


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", unused_url())
    with fake_server(echo) as server:
        assert ids(client_of(server.url, max_retries=0).search(["a"], 1)) == [["a"]]


def test_check_passes_where_a_server_answers() -> None:
    with fake_server(echo) as server:
        client_of(server.url).check()


def test_check_names_the_missing_server_and_the_command_that_starts_one() -> None:
    url = unused_url()
    port = url.split(":")[2].split("/")[0]
    with pytest.raises(RetrieverError) as caught:
        client_of(url).check()
    message = str(caught.value)
    assert url in message
    assert f"python -m retriever_server --retriever bm25 --corpus corpus.jsonl --port {port}" in message


def test_check_says_that_a_loopback_address_is_this_machine_only() -> None:
    with pytest.raises(RetrieverError, match=f"this machine itself, {socket.gethostname()}"):
        client_of(unused_url()).check()


def test_check_refuses_a_server_that_is_no_retriever() -> None:
    with fake_server(reply(200, b"<html>hello</html>")) as server, pytest.raises(RetrieverError, match="not JSON"):
        client_of(server.url).check()


def test_check_asks_every_server() -> None:
    dead = unused_url()
    with fake_server(echo) as server, pytest.raises(RetrieverError, match=dead):
        client_of(server.url, dead).check()


@pytest.mark.parametrize(
    "url, expected",
    [
        ("http://host:8000/retrieve", "http://host:8000/retrieve"),
        ("http://host:8000", "http://host:8000/retrieve"),
        ("http://host:8000/", "http://host:8000/retrieve"),
        ("host:8000", "http://host:8000/retrieve"),
        ("https://host/api", "https://host/api/retrieve"),
        ("https://host/api/retrieve/", "https://host/api/retrieve"),
        ("http://[::1]:8000", "http://[::1]:8000/retrieve"),
    ],
)
def test_the_retrieve_path_is_appended_where_it_is_missing(url: str, expected: str) -> None:
    assert retrieve_url(url) == expected


@pytest.mark.parametrize("url", ["", "ftp://host/retrieve", "http://", "http://host:99999", "http://host:port"])
def test_an_address_that_is_none_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(ConfigError, match="retriever_urls"):
        RetrieverClient([url])


def test_a_client_without_a_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="retriever_urls is empty"):
        RetrieverClient([])


@pytest.mark.parametrize(
    "document, title, text",
    [
        ({"contents": '"Oslo"\nOslo is a city.'}, '"Oslo"', "Oslo is a city."),
        ({"contents": '"Oslo"\nfirst line\nsecond line'}, '"Oslo"', "first line\nsecond line"),
        ({"contents": '""Heroes" (David Bowie album)"\ntext'}, '""Heroes" (David Bowie album)"', "text"),
        ({"contents": '"The "Weird Al" Show"\ntext'}, '"The "Weird Al" Show"', "text"),
        ({"contents": '"Mercury (planet)"\ntext'}, '"Mercury (planet)"', "text"),
        ({"contents": "Oslo\nOslo is a city."}, "Oslo", "Oslo is a city."),
        ({"contents": '"Oslo"\r\nOslo is a city.\r\n'}, '"Oslo"', "Oslo is a city."),
        ({"contents": "a passage without a line break"}, "", "a passage without a line break"),
        ({"contents": "text alone", "title": "Oslo"}, "Oslo", "text alone"),
        ({"contents": '"He said "no" and left'}, "", '"He said "no" and left'),
        ({"contents": '"Only a title"'}, '"Only a title"', ""),
        ({"contents": '"Only a title"\n'}, '"Only a title"', ""),
        ({"contents": '""\ntext without a title'}, "", "text without a title"),
        ({"contents": '""\ntext', "title": "Oslo"}, "Oslo", "text"),
        ({"title": "Oslo", "text": "a city"}, "Oslo", "a city"),
        ({"title": '"Heroes"', "text": "an album"}, '"Heroes"', "an album"),
        ({"contents": None, "title": "Oslo", "text": "a city"}, "Oslo", "a city"),
        ({"title": "Oslo"}, "Oslo", ""),
        ({"text": "a city"}, "", "a city"),
    ],
)
def test_every_form_of_document_becomes_title_and_text(document: dict[str, Any], title: str, text: str) -> None:
    assert parse_document(document) == Passage(title, text)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=5) | st.binary())
def test_any_answer_is_passages_or_a_value_error(answer: object) -> None:
    body = answer if isinstance(answer, bytes) else json.dumps({"result": answer}).encode()
    try:
        lists = parse_answer(body, 1)
    except ValueError:
        return
    assert all(isinstance(passage, Passage) for passages in lists for passage in passages)
