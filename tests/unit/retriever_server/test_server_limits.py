"""Admission, deadlines, readiness and metrics of the app, over real sockets where it matters."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.testclient import TestClient

from retriever_server.app import ServerSettings, create_app
from retriever_server.schemas import Limits
from tests.fake_retrievers import StubRetriever
from tests.live_server import live_server


def settings(**changes: Any) -> ServerSettings:
    return ServerSettings(**{"warm_up_query": "warm up", **changes})


@contextmanager
def running(retriever: StubRetriever, **changes: Any) -> Iterator[httpx.Client]:
    """A live server, past its warm-up, and a client of it."""
    with (
        live_server(create_app(retriever, settings(**changes))) as url,
        httpx.Client(base_url=url, timeout=20) as client,
    ):
        wait_until(lambda: client.get("/ready").status_code == 200)
        retriever.entered.clear()
        try:
            yield client
        finally:
            retriever.gate.set()


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.005)


def ask(client: httpx.Client, *queries: str, **fields: Any) -> httpx.Response:
    return client.post("/retrieve", json={"queries": queries, "topk": 1, **fields})


def metric(client: httpx.Client, line: str) -> float:
    for row in client.get("/metrics").text.splitlines():
        if row.startswith(line + " "):
            return float(row.rsplit(" ", 1)[1])
    return 0.0


def test_ten_thousand_queries_are_one_request_and_one_more_is_refused() -> None:
    with TestClient(create_app(StubRetriever(), settings())) as client:
        answer = ask(client, *[f"q{number}" for number in range(10_000)])
        assert answer.status_code == 200
        assert [passages[0]["id"] for passages in answer.json()["result"]] == [
            f"q{number}/0" for number in range(10_000)
        ]
        refused = ask(client, *["q"] * 10_001)
    assert refused.status_code == 422
    assert refused.json()["detail"] == "10,001 queries; one request may hold 10,000"


def test_a_query_of_a_megabyte_is_refused_by_name() -> None:
    with TestClient(create_app(StubRetriever(), settings())) as client:
        refused = ask(client, "short", "x" * 1_000_000)
    assert refused.status_code == 422
    assert refused.json()["detail"] == "query 1 has 1,000,000 characters; the limit is 32,768"


def test_too_many_passages_in_one_answer_are_refused() -> None:
    with TestClient(create_app(StubRetriever(), settings())) as client:
        refused = ask(client, *[str(number) for number in range(1000)], topk=1000)
    assert refused.status_code == 422
    assert "200,000 passages" in refused.json()["detail"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_above_the_limit_is_413_with_and_without_a_declared_length(chunked: bool) -> None:
    body = b'{"queries": ["' + b"x" * 5000 + b'"]}'
    with running(StubRetriever(), limits=Limits(max_body_bytes=1000)) as client:
        refused = client.post("/retrieve", content=iter([body[:800], body[800:]]) if chunked else body)
        assert refused.status_code == 413
        assert "above 1,000 bytes" in refused.json()["detail"]
        assert ask(client, "a").status_code == 200


def test_a_full_queue_is_503_with_retry_after_and_never_429() -> None:
    retriever = StubRetriever()
    with running(retriever, max_queued=2) as client, ThreadPoolExecutor() as threads:
        retriever.gate.clear()
        held = [threads.submit(ask, client, "busy")]
        wait_until(retriever.entered.is_set)
        held.append(threads.submit(ask, client, "waits 1", "waits 2"))
        wait_until(lambda: metric(client, "retriever_queue_depth") == 2)
        refused = ask(client, "too many")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert metric(client, 'retriever_rejected_total{reason="busy"}') == 1
        retriever.gate.set()
        assert [answer.result().status_code for answer in held] == [200, 200]


@pytest.mark.parametrize("by", ["setting", "field", "header"])
def test_a_passed_deadline_is_504_and_the_query_is_not_searched_later(by: str) -> None:
    retriever = StubRetriever()
    with running(retriever, timeout_s=0.3 if by == "setting" else 30) as client, ThreadPoolExecutor() as threads:
        retriever.gate.clear()
        busy = threads.submit(ask, client, "busy", timeout_ms=10_000)
        wait_until(retriever.entered.is_set)
        fields: dict[str, Any] = {"timeout_ms": 200} if by == "field" else {}
        headers = {"x-request-timeout-ms": "200"} if by == "header" else {}
        late = client.post("/retrieve", json={"queries": ["late"], **fields}, headers=headers)
        assert late.status_code == 504
        assert "deadline" in late.json()["detail"]
        retriever.gate.set()
        busy.result()
        assert ask(client, "next").status_code == 200
    assert "late" not in retriever.searched


@pytest.mark.parametrize("header", ["0", "-5", "soon", "1.5", "9" * 5000])
def test_a_deadline_that_is_none_is_422(header: str) -> None:
    with TestClient(create_app(StubRetriever(), settings())) as client:
        answer = client.post("/retrieve", json={"queries": ["a"]}, headers={"x-request-timeout-ms": header})
    assert answer.status_code == 422


def test_a_client_that_went_away_is_not_searched_for() -> None:
    retriever = StubRetriever()
    with running(retriever) as client, ThreadPoolExecutor() as threads:
        retriever.gate.clear()
        busy = threads.submit(ask, client, "busy")
        wait_until(retriever.entered.is_set)
        body = b'{"queries": ["gone"]}'
        address = (client.base_url.host, client.base_url.port)
        with socket.create_connection(address) as leaver:
            leaver.sendall(b"POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            wait_until(lambda: metric(client, "retriever_queue_depth") == 1)
        wait_until(lambda: metric(client, 'retriever_rejected_total{reason="disconnected"}') == 1)
        retriever.gate.set()
        assert busy.result().status_code == 200
        assert ask(client, "next").status_code == 200
    assert retriever.searched == ["busy", "next"]


def test_a_client_that_leaves_in_the_middle_of_its_body_harms_nobody() -> None:
    retriever = StubRetriever()
    with running(retriever) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port)) as leaver:
            leaver.sendall(b'POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"queries": [')
        wait_until(lambda: metric(client, 'retriever_rejected_total{reason="disconnected"}') == 1)
        assert ask(client, "next").status_code == 200


def test_a_body_that_never_ends_is_408() -> None:
    with (
        running(StubRetriever(), timeout_s=0.2) as client,
        socket.create_connection((client.base_url.host, client.base_url.port)) as slow,
    ):
        slow.sendall(b'POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"queries": [')
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


class HeldReranker:
    def __init__(self) -> None:
        self.gate, self.entered, self.at_once = threading.Event(), threading.Event(), threading.Lock()
        self.seen: list[str] = []

    def score(self, query: str, documents: Any) -> list[float]:
        self.seen.append(query)
        assert self.at_once.acquire(blocking=False), "two threads rerank at once"
        self.entered.set()
        assert self.gate.wait(20)
        self.at_once.release()
        return [0.0 for _ in documents]


def test_reranking_is_bounded_in_queries_and_time_and_done_by_one_thread() -> None:
    reranker = HeldReranker()
    app = create_app(StubRetriever(), settings(max_queued=2, timeout_s=5), reranker=reranker)
    with live_server(app) as url, ThreadPoolExecutor() as threads:

        def rerank(*queries: str, timeout_ms: int = 5000) -> httpx.Response:
            fields = {"queries": queries, "documents": [["d"] for _ in queries]}
            headers = {"x-request-timeout-ms": str(timeout_ms)}
            return httpx.post(f"{url}/rerank", json=fields, headers=headers, timeout=20)

        busy = threads.submit(rerank, "a")
        wait_until(reranker.entered.is_set)
        assert rerank("late", timeout_ms=50).status_code == 504
        refused = rerank("b", "c")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        waiting = threads.submit(rerank, "b")
        reranker.gate.set()
        assert [answer.result().status_code for answer in (busy, waiting)] == [200, 200]
        assert len(rerank("a", "b", "c").json()["result"]) == 3


def test_reranking_heeds_the_bodys_deadline_and_ends_with_it() -> None:
    reranker = HeldReranker()
    fields = {"queries": [f"q{number}" for number in range(50)], "documents": [["d"]] * 50, "timeout_ms": 200}
    with live_server(create_app(StubRetriever(), settings(), reranker=reranker)) as url:
        assert httpx.post(f"{url}/rerank", json=fields, timeout=20).status_code == 504
        reranker.gate.set()
        last = httpx.post(f"{url}/rerank", json={"queries": ["last"], "documents": [["d"]]}, timeout=20)
        assert last.status_code == 200
    assert reranker.seen == ["q0", "last"]


def test_the_event_loop_answers_while_a_search_is_running() -> None:
    retriever = StubRetriever()
    with running(retriever) as client, ThreadPoolExecutor() as threads:
        retriever.gate.clear()
        busy = threads.submit(ask, client, "busy")
        wait_until(retriever.entered.is_set)
        assert client.get("/health").status_code == 200
        assert ask(client).json() == {"result": []}
        assert not busy.done()
        retriever.gate.set()
        assert busy.result().status_code == 200


def test_results_do_not_depend_on_concurrency() -> None:
    retriever = StubRetriever()
    with running(retriever, max_batch=8) as client, ThreadPoolExecutor(16) as threads:
        requests = [[f"q{(3 * number + offset) % 40}" for offset in range(number % 5)] for number in range(200)]
        answers = list(threads.map(lambda queries: ask(client, *queries).json(), requests))
    for queries, answer in zip(requests, answers, strict=True):
        assert [passages[0]["id"] for passages in answer["result"]] == [f"{query}/0" for query in queries]


def test_a_failing_query_is_an_error_status_not_an_empty_200() -> None:
    with running(StubRetriever(fails_on=["bad"])) as client:
        answer = ask(client, "fine", "bad")
        assert answer.status_code == 500
        assert "LookupError: cannot search 'bad'" in answer.json()["detail"]
        assert ask(client, "fine").status_code == 200


def test_the_server_is_live_at_once_but_ready_only_after_the_warm_up() -> None:
    retriever = StubRetriever()
    retriever.gate.clear()
    told: list[str | None] = []
    with TestClient(create_app(retriever, settings(), on_ready=told.append)) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 503
        assert "warm-up" in client.get("/ready").json()["detail"]
        assert told == []
        retriever.gate.set()
        wait_until(lambda: client.get("/ready").status_code == 200)
        assert told == [None]


def test_a_failed_warm_up_is_never_ready_and_says_why() -> None:
    told: list[str | None] = []
    with TestClient(create_app(StubRetriever(fails_on=["warm up"]), settings(), on_ready=told.append)) as client:
        wait_until(lambda: bool(told))
        answer = client.get("/ready")
    assert answer.status_code == 503
    assert "warm-up query failed" in answer.json()["detail"]
    assert told == [answer.json()["detail"]]


def test_a_hanging_search_makes_the_server_not_ready() -> None:
    retriever = StubRetriever()
    with running(retriever, timeout_s=0.05) as client:
        retriever.gate.clear()
        assert ask(client, "hangs").status_code == 504
        wait_until(lambda: client.get("/ready").status_code == 503)
        assert "one search has been running" in client.get("/ready").json()["detail"]
        assert client.get("/health").status_code == 200
        retriever.gate.set()
        wait_until(lambda: client.get("/ready").status_code == 200)


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer ", "secret", "Basic secret", "Bearer sécret"])
def test_a_token_guards_everything_but_the_probes(header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode()}
    with TestClient(create_app(StubRetriever(), settings(token="secret"))) as client:
        for method, path in [("POST", "/retrieve"), ("POST", "/search"), ("GET", "/info"), ("GET", "/metrics")]:
            refused = client.request(method, path, headers=headers)
            assert refused.status_code == 401
            assert "secret" not in refused.text
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code in (200, 503)
        given = {"authorization": "Bearer secret"}
        assert client.post("/retrieve", json={"queries": []}, headers=given).status_code == 200


def test_info_names_the_index_and_the_limits() -> None:
    with TestClient(create_app(StubRetriever(), settings())) as client:
        info = client.get("/info").json()
    assert info["fingerprint"] == "stub"
    assert (info["topk"], info["max_topk"], info["max_queries"]) == (3, 1000, 10_000)
    assert info["versions"]["orjson"]


def test_metrics_tell_what_happened() -> None:
    retriever = StubRetriever()
    with running(retriever) as client:
        for queries in (["a", "b"], ["a"], []):
            ask(client, *queries)
        client.post("/retrieve", content=b"{")
        assert metric(client, 'retriever_requests_total{route="/retrieve",status="200"}') == 3
        assert metric(client, 'retriever_requests_total{route="/retrieve",status="400"}') == 1
        assert metric(client, 'retriever_rejected_total{reason="malformed"}') == 1
        assert metric(client, "retriever_queries_total") == 4  # the warm-up is the fourth
        assert metric(client, 'retriever_cache_total{result="hit"}') == 1
        assert metric(client, 'retriever_cache_total{result="miss"}') == 3
        assert metric(client, "retriever_batch_size_count") == 2
        assert metric(client, 'retriever_seconds_count{stage="search"}') == 2
        assert metric(client, 'retriever_seconds_count{stage="request"}') == 3


def test_a_request_under_way_is_finished_when_the_server_stops() -> None:
    retriever = StubRetriever()
    with ThreadPoolExecutor() as threads:
        with running(retriever) as client:
            retriever.gate.clear()
            url = str(client.base_url)
            answer = threads.submit(httpx.post, f"{url}/retrieve", json={"queries": ["a"], "topk": 1}, timeout=20)
            wait_until(retriever.entered.is_set)
            threading.Timer(0.2, retriever.gate.set).start()
        assert answer.result().status_code == 200
        assert json.loads(answer.result().content)["result"][0][0]["id"] == "a/0"
        parts = urlsplit(url)
        with pytest.raises(OSError):
            socket.create_connection((parts.hostname, parts.port), timeout=1)
