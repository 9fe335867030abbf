"""Engines elsewhere, as their recorded answers and Qdrant's local mode have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from qdrant_client import QdrantClient
from starlette.testclient import TestClient

from retriever_server.app import create_app
from retriever_server.corpus import Corpus
from retriever_server.encoder import PROFILES, Encoder
from retriever_server.errors import RequestError, StartError
from retriever_server.qdrant import QdrantRetriever, connect, upload
from retriever_server.remote import OpenSearchRetriever, RemoteRetriever
from retriever_server.stages import search_isolating
from tests.recorded_server import Answer, Asked, recorded_server
from tests.tiny_encoder import tiny_encoder_dir


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retriever_server.upstream.time.sleep", lambda seconds: None)


def another_retriever(asked: Asked) -> Answer:
    if asked.path == "/info":
        return Answer({"fingerprint": "abc", "rows": 9})
    return Answer(
        {
            "result": [
                [{"document": {"id": query, "title": "T", "text": query}, "score": 2.5}][: asked.json["topk"]]
                for query in asked.json["queries"]
            ]
        }
    )


def opensearch(asked: Asked) -> Answer:
    """As OpenSearch 2 answered: one response a query, in order, hits with _id, _score and _source."""
    if asked.path == "/wiki/_count":
        return Answer({"count": 5000, "_shards": {"total": 1, "successful": 1, "skipped": 0, "failed": 0}})
    lines = [orjson.loads(line) for line in asked.body.splitlines()]
    responses: list[dict[str, Any]] = []
    for header, search in zip(lines[::2], lines[1::2], strict=True):
        assert header == {"preference": "retriever"}
        query, size = search["query"]["match"]["contents"]["query"], search["size"]
        if query == "bad":
            responses.append({"error": {"type": "search_phase_execution_exception"}, "status": 400})
            continue
        failed = 4 if query == "shards down" else 0
        hits = [
            {"_index": "wiki", "_id": f"{query}-{rank}", "_score": 9.5 - rank, "_source": {"contents": f'"T"\n{query}'}}
            for rank in range(size)
        ]
        total = {"value": len(hits), "relation": "eq"}
        answer = {"took": 1, "timed_out": False, "status": 200, "_shards": {"total": 5, "failed": failed}}
        responses.append({**answer, "hits": {"total": total, "max_score": 9.5, "hits": hits}})
    return Answer({"took": 3, "responses": responses})


def test_another_server_is_asked_for_scores_and_its_documents_come_through() -> None:
    with recorded_server(another_retriever) as server:
        retriever = RemoteRetriever(f"{server.url}/retrieve")
        found = retriever.search(["a", "b"], 1)
        assert [[json.loads(passage.document) for passage in passages] for passages in found] == [
            [{"id": query, "title": "T", "text": query, "contents": f'"T"\n{query}'}] for query in "ab"
        ]
        assert found[0][0].score == 2.5
        assert server.asked[-1].json == {"queries": ["a", "b"], "topk": 1, "return_scores": True}
        assert retriever.describe()["fingerprint"].endswith(":abc")


def test_opensearch_answers_in_order_with_ids_and_scores() -> None:
    with recorded_server(opensearch) as server:
        retriever = OpenSearchRetriever(server.url, "wiki")
        found = retriever.search(["x", "y"], 2)
        assert [[json.loads(passage.document)["id"] for passage in passages] for passages in found] == [
            ["x-0", "x-1"],
            ["y-0", "y-1"],
        ]
        assert [passage.score for passage in found[0]] == [9.5, 8.5]
        assert server.asked[-1].path == "/wiki/_msearch"
        assert server.asked[-1].headers["content-type"] == "application/x-ndjson"
        assert retriever.search([], 2) == []


def test_one_bad_query_of_opensearch_fails_alone() -> None:
    with recorded_server(opensearch) as server:
        outcomes = search_isolating(OpenSearchRetriever(server.url, "wiki"), ["x", "bad", "y"], 1)
    assert [isinstance(outcome, Exception) for outcome in outcomes] == [False, True, False]


def test_failed_shards_of_opensearch_are_an_error_and_not_a_short_answer() -> None:
    with recorded_server(opensearch) as server, pytest.raises(RequestError, match=r"4 of .* shards failed") as caught:
        OpenSearchRetriever(server.url, "wiki").search(["shards down"], 1)
    assert caught.value.status == 503


def test_an_engine_that_grows_after_the_start_is_asked_for_all_that_a_request_wants() -> None:
    def respond(asked: Asked) -> Answer:
        return Answer({"count": 0}) if asked.method == "GET" else opensearch(asked)

    with (
        recorded_server(respond) as server,
        TestClient(create_app(OpenSearchRetriever(server.url, "wiki"))) as client,
    ):
        (found,) = client.post("/retrieve", json={"queries": ["x"], "topk": 5}).json()["result"]
    assert len(found) == 5


@pytest.mark.parametrize("status, tries", [(500, 3), (503, 3), (429, 3), (404, 1), (401, 1)])
def test_an_engine_that_fails_is_an_error_never_an_empty_answer(status: int, tries: int) -> None:
    def fail(asked: Asked) -> Answer:
        return another_retriever(asked) if asked.path == "/info" else Answer({"detail": "secret"}, status)

    with recorded_server(fail) as server:
        retriever = RemoteRetriever(server.url)
        with pytest.raises((RequestError, ValueError)) as caught:
            retriever.search(["a"], 1)
        assert sum(asked.path == "/retrieve" for asked in server.asked) == tries
    assert server.url not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_engine_that_is_down_is_asked_a_few_times_and_not_once_a_query() -> None:
    with recorded_server(another_retriever) as server:
        retriever = RemoteRetriever(server.url)
        server.respond = lambda asked: Answer({}, 503)
        before = len(server.asked)
        outcomes = search_isolating(retriever, [f"q{number}" for number in range(50)], 3)
        assert len(server.asked) - before == 3
    assert all(isinstance(outcome, RequestError) and outcome.status == 503 for outcome in outcomes)


@pytest.mark.parametrize(
    "body", [{"result": [[]]}, {"error": "x"}, [], b"<html>", {"result": [["text"], ["text"]]}, {"result": {}}]
)
def test_an_answer_of_another_form_is_refused(body: Any) -> None:
    with recorded_server(lambda asked: another_retriever(asked) if asked.path == "/info" else Answer(body)) as server:
        retriever = RemoteRetriever(server.url)
        with pytest.raises((ValueError, AttributeError, TypeError)):
            retriever.search(["a", "b"], 1)


@pytest.mark.parametrize("open_engine", [RemoteRetriever, lambda url: OpenSearchRetriever(url, "wiki")])
def test_an_engine_that_is_not_there_is_told_at_the_start(open_engine: Callable[[str], Any]) -> None:
    with pytest.raises(StartError, match="gave no answer"):
        open_engine("http://127.0.0.1:9")


def test_tokens_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRIEVER_TOKEN", "t1")
    monkeypatch.setenv("SEARCH_ENGINE_AUTHORIZATION", "ApiKey k2")
    with recorded_server(another_retriever) as remote, recorded_server(opensearch) as engine:
        RemoteRetriever(remote.url).search(["a"], 1)
        OpenSearchRetriever(engine.url, "wiki").search(["a"], 1)
    assert {asked.headers["authorization"] for asked in remote.asked} == {"Bearer t1"}
    assert {asked.headers["authorization"] for asked in engine.asked} == {"ApiKey k2"}


def test_qdrant_finds_what_brute_force_finds_and_uploading_goes_on(tmp_path: Path) -> None:
    texts = [f"the capital of {name} lies on rivers" for name in ("norway", "peru", "japan", "kenya", "chile", "nepal")]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{row}", "contents": text}) + "\n" for row, text in enumerate(texts)))
    corpus = Corpus.open(path)
    encoder = Encoder(str(tiny_encoder_dir(tmp_path / "tiny")), PROFILES["minilm"])
    client = connect(str(tmp_path / "qdrant"))
    upload(client, "wiki", corpus, encoder, batch=4)
    client.delete("wiki", [4, 5])
    upload(client, "wiki", corpus, encoder, batch=4)
    retriever = QdrantRetriever(client, "wiki", encoder)
    queries = ["capital of peru", "japan", "kenya or chile"]
    found = retriever.search(queries, 3)
    products = encoder.encode_queries(queries) @ encoder.encode_passages(texts).T
    expected = [[f"p{row}" for row in rows] for rows in (-products).argsort(axis=1)[:, :3].tolist()]
    assert [[json.loads(passage.document)["id"] for passage in passages] for passages in found] == expected
    assert retriever.describe()["rows_at_start"] == 6
    with pytest.raises(StartError, match="the Qdrant collection nothing cannot be opened"):
        QdrantRetriever(client, "nothing", encoder)
    client.close()


def test_a_qdrant_collection_of_another_corpus_or_encoder_is_neither_opened_nor_added_to(tmp_path: Path) -> None:
    path, other_path = tmp_path / "corpus.jsonl", tmp_path / "other.jsonl"
    rows = [json.dumps({"id": f"p{row}", "title": "T", "text": "rivers " * row}) + "\n" for row in range(1, 7)]
    path.write_text("".join(rows[:4]))
    other_path.write_text("".join([*rows[:3], rows[5], rows[4]]))
    encoder, other, wide = (
        Encoder(str(tiny_encoder_dir(tmp_path / name, **how)), PROFILES["minilm"])
        for name, how in (("tiny", {}), ("other", {"seed": 1}), ("wide", {"hidden_size": 48}))
    )
    client = connect(str(tmp_path / "qdrant"))
    upload(client, "wiki", Corpus.open(path), encoder)
    with pytest.raises(StartError, match=r"point 3 of the Qdrant collection wiki is not row 3 of .*other.jsonl"):
        upload(client, "wiki", Corpus.open(other_path), encoder)
    for stranger, cause in ((other, "gives other vectors than the Qdrant collection wiki holds"), (wide, "makes 48")):
        with pytest.raises(StartError, match=cause):
            QdrantRetriever(client, "wiki", stranger)
        with pytest.raises(StartError, match=cause):
            upload(client, "wiki", Corpus.open(path), stranger)
    assert client.count("wiki").count == 4
    client.close()


def test_a_qdrant_server_that_is_down_is_told() -> None:
    class Small:
        dim = 4

    with pytest.raises(StartError, match="cannot be opened"):
        QdrantRetriever(QdrantClient(url="http://127.0.0.1:9", timeout=1, check_compatibility=False), "wiki", Small())  # type: ignore[arg-type]
