"""The HTTP schema, read the way each client in the field reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from retriever_server.app import ServerSettings, create_app
from retriever_server.bm25 import BM25Retriever
from retriever_server.command import make_parser, settings_of
from retriever_server.corpus import Corpus
from retriever_server.errors import RequestError
from retriever_server.retriever import ScoredPassage
from retriever_server.schemas import parse_retrieve, render_retrieve
from tests.fake_retrievers import StubRetriever, passage

SETTINGS = ServerSettings(warm_up_query="warm up")


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(create_app(StubRetriever(num_passages=5), SETTINGS)) as client:
        yield client


def document(query: str, rank: int) -> dict[str, str]:
    return {"id": f"{query}/{rank}", "contents": f'"{query}"\npassage {rank}'}


@pytest.mark.parametrize("queries", [[], ["a"], ["a", "b"], ["a", "b", "c"]])
def test_both_shapes_hold_for_any_number_of_queries(client: TestClient, queries: list[str]) -> None:
    with_scores = client.post("/retrieve", json={"queries": queries, "topk": 2, "return_scores": True})
    assert with_scores.json() == {
        "result": [
            [{"document": document(query, rank), "score": 10.0 - rank} for rank in range(2)] for query in queries
        ]
    }
    without = client.post("/retrieve", json={"queries": queries, "topk": 2, "return_scores": False})
    assert without.json() == {"result": [[document(query, rank) for rank in range(2)] for query in queries]}
    assert with_scores.status_code == without.status_code == 200
    assert with_scores.headers["content-type"] == "application/json"


@pytest.mark.parametrize("fields", [{}, {"topk": None}, {"top_k": None, "k": None}])
def test_a_missing_or_null_topk_takes_the_default(client: TestClient, fields: dict[str, Any]) -> None:
    (passages,) = client.post("/retrieve", json={"queries": ["a"], **fields}).json()["result"]
    assert len(passages) == 3


@pytest.mark.parametrize("name", ["topk", "top_k", "k", "top_n"])
def test_topk_has_aliases(client: TestClient, name: str) -> None:
    assert len(client.post("/retrieve", json={"queries": ["a"], name: 2}).json()["result"][0]) == 2


@pytest.mark.parametrize("name", ["return_scores", "return_score"])
def test_return_scores_has_an_alias(client: TestClient, name: str) -> None:
    assert "score" in client.post("/retrieve", json={"queries": ["a"], name: True}).json()["result"][0][0]


def test_topk_above_the_corpus_returns_what_exists(client: TestClient) -> None:
    assert len(client.post("/retrieve", json={"queries": ["a"], "topk": 1000}).json()["result"][0]) == 5


@pytest.mark.parametrize("topk", [0, -1, 1001, 10**30, 2.5, "three", True, [3]])
def test_an_absurd_topk_is_422(client: TestClient, topk: object) -> None:
    answer = client.post("/retrieve", json={"queries": ["a"], "topk": topk})
    assert answer.status_code == 422
    assert "topk" in answer.json()["detail"]


@pytest.mark.parametrize("topk", [1000, 1001, 10**12])
def test_no_topk_is_absurd_for_a_corpus_below_the_limit(tmp_path: Path, topk: int) -> None:
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": "1", "contents": '"Oslo"\nOslo is a city.'}))
    with TestClient(create_app(BM25Retriever.build(Corpus.open(tmp_path / "corpus.jsonl")), SETTINGS)) as client:
        (passages,) = client.post("/retrieve", json={"queries": ["oslo"], "topk": topk}).json()["result"]
    assert len(passages) == 1


def test_the_largest_topk_is_a_setting() -> None:
    settings = settings_of(make_parser().parse_args(["--retriever", "bm25", "--corpus", "c", "--max-topk", "2000"]))
    assert parse_retrieve(b'{"queries": ["a"], "topk": 1500}', settings.limits).top_k == 1500
    with pytest.raises(RequestError, match="from 1 to 2,000"):
        parse_retrieve(b'{"queries": ["a"], "topk": 2001}', settings.limits)


def test_unknown_fields_are_ignored(client: TestClient) -> None:
    fields = {"queries": ["a"], "topk": 1, "model": "x", "search_type": {"deep": [1]}}
    assert client.post("/retrieve", json=fields).json() == {"result": [[document("a", 0)]]}


def test_a_repeated_query_is_answered_at_each_of_its_places(client: TestClient) -> None:
    result = client.post("/retrieve", json={"queries": ["a", "b", "a"], "topk": 1}).json()["result"]
    assert result == [[document("a", 0)], [document("b", 0)], [document("a", 0)]]


def test_a_blank_query_finds_nothing(client: TestClient) -> None:
    assert client.post("/retrieve", json={"queries": ["", "a", " \n"], "topk": 1}).json()["result"] == [
        [],
        [document("a", 0)],
        [],
    ]


@pytest.mark.parametrize(
    "body, status",
    [
        (b"", 400),
        (b"{", 400),
        (b'{"queries": ["\xff"]}', 400),
        (b'{"queries": ["\\ud800"]}', 400),
        (b"[" * 100_000, 400),
        (b'{"queries": ' + b"[" * 2000 + b"]" * 2000 + b"}", 400),
        (b"[]", 422),
        (b'"a"', 422),
        (b"{}", 422),
        (b'{"queries": "a"}', 422),
        (b'{"queries": null}', 422),
        (b'{"queries": [1]}', 422),
        (b'{"queries": ["a", null]}', 422),
        (b'{"queries": ["a"], "return_scores": "yes"}', 422),
        (b'{"queries": ["a"], "timeout_ms": -1}', 422),
    ],
)
def test_a_bad_body_is_refused_with_a_sentence(client: TestClient, body: bytes, status: int) -> None:
    answer = client.post("/retrieve", content=body)
    assert answer.status_code == status
    assert answer.json()["detail"]


def test_the_search_r1_trainer_reads_contents(client: TestClient) -> None:
    payload = {"queries": ["a", "b"], "topk": 3, "return_scores": True}
    results = client.post("/retrieve", json=payload).json()["result"]
    texts = []
    for result in results:
        lines = ""
        for rank, item in enumerate(result):
            content = item["document"]["contents"]
            lines += f"Doc {rank + 1}(Title: {content.split(chr(10))[0]}) {chr(10).join(content.split(chr(10))[1:])}\n"
        texts.append(lines)
    assert texts[1].startswith('Doc 1(Title: "b") passage 0\nDoc 2(Title: "b") passage 1\n')


def test_skyrl_sends_one_query_as_a_string(client: TestClient) -> None:
    answer = client.post("/retrieve", json={"query": "a", "topk": 2, "return_scores": True}).json()
    assert [item["document"]["contents"] for item in answer["result"][0]] == ['"a"\npassage 0', '"a"\npassage 1']
    assert len(answer["result"]) == 1


def test_verls_search_tool_sends_a_list_and_reads_contents(client: TestClient) -> None:
    payload = {"queries": ["a", "b"], "topk": 1, "return_scores": True}
    results = client.post("/retrieve", json=payload).json().get("result", [])
    assert [[item["document"]["contents"] for item in items] for items in results] == [
        ['"a"\npassage 0'],
        ['"b"\npassage 0'],
    ]


def test_agent_lightning_asks_healthz_and_reads_contents_or_title_and_text(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "title": "Oslo", "text": "a capital"}\n')
    with TestClient(create_app(BM25Retriever.build(Corpus.open(tmp_path / "corpus.jsonl")))) as client:
        assert client.get("/healthz").status_code == 200
        answer = client.post("/retrieve", json={"queries": ["capital"], "topk": 1, "return_scores": True}).json()
    (item,) = answer["result"][0]
    assert item["document"]["contents"] == '"Oslo"\na capital'
    assert (item["document"]["title"], item["document"]["text"]) == ("Oslo", "a capital")


def test_slime_reads_bare_documents(client: TestClient) -> None:
    answer = client.post("/retrieve", json={"queries": ["a"], "topk": 2, "return_scores": False}).json()
    assert [found["contents"] for found in answer["result"][0]] == ['"a"\npassage 0', '"a"\npassage 1']


def test_recall_searches_one_query(client: TestClient) -> None:
    assert client.post("/search", json={"query": "a", "top_n": 2}).json() == [document("a", 0), document("a", 1)]
    documents, scores = client.post("/search", json={"query": "a", "top_n": 2, "return_score": True}).json()
    assert documents == [document("a", 0), document("a", 1)]
    assert scores == [10.0, 9.0]


def test_flashrag_searches_a_batch(client: TestClient) -> None:
    batch = client.post("/batch_search", json={"query": ["a", "b"], "top_n": 1}).json()
    assert batch == [[document("a", 0)], [document("b", 0)]]
    documents, scores = client.post(
        "/batch_search", json={"query": ["a", "b"], "top_n": 1, "return_score": True}
    ).json()
    assert documents == batch
    assert scores == [[10.0], [10.0]]
    assert client.post("/batch_search", json={"query": []}).json() == []


@pytest.mark.parametrize("path, query", [("/search", ""), ("/search", " "), ("/batch_search", ["a", ""])])
def test_an_empty_query_is_400_on_the_flashrag_routes(client: TestClient, path: str, query: object) -> None:
    assert client.post(path, json={"query": query}).status_code == 400


@pytest.mark.parametrize("path, query", [("/search", ["a"]), ("/search", None), ("/batch_search", "a")])
def test_the_flashrag_routes_refuse_the_other_form(client: TestClient, path: str, query: object) -> None:
    assert client.post(path, json={"query": query}).status_code == 422


def test_healthz_is_health(client: TestClient) -> None:
    assert client.get("/health").status_code == client.get("/healthz").status_code == 200


def test_unknown_routes_and_methods_are_json_errors(client: TestClient) -> None:
    assert client.get("/nowhere").status_code == 404
    assert client.get("/retrieve").status_code == 405
    assert "Not Found" in client.get("/nowhere").json()["detail"]


def test_documents_pass_through_byte_for_byte(tmp_path: Any) -> None:
    line = b'{"id":"1","contents":"caf\\u00e9 fox","big":12345678901234567890123,"pi":3.140,"nested":{"a":[1, 2]}}'
    (tmp_path / "c.jsonl").write_bytes(line)
    retriever = BM25Retriever.build(Corpus.open(tmp_path / "c.jsonl"))
    with TestClient(create_app(retriever)) as client:
        answer = client.post("/retrieve", json={"queries": ["fox"], "topk": 1})
    assert answer.content == b'{"result":[[' + line + b"]]}"


class LongestFirst:
    """A reranker that likes long texts, and remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[str]]] = []

    def score(self, query: str, documents: Any) -> list[float]:
        self.seen.append((query, list(documents)))
        return [float(len(text)) for text in documents]


def test_the_reranker_scores_each_query_against_its_own_documents_only() -> None:
    reranker = LongestFirst()
    request = {
        "queries": ["q1", "q2", "q3"],
        "documents": [[{"contents": "bb"}, {"document": {"contents": "cccc"}, "score": 1.0}, "ddd"], ["e"], []],
        "rerank_topk": 2,
        "return_scores": True,
    }
    with TestClient(create_app(StubRetriever(), SETTINGS, reranker=reranker)) as client:
        scored = client.post("/rerank", json=request).json()
        bare = client.post("/rerank", json=request | {"return_scores": False, "rerank_topk": None}).json()
    assert reranker.seen[:2] == [("q1", ["bb", "cccc", "ddd"]), ("q2", ["e"])]
    assert scored["result"] == [
        [{"document": {"contents": "cccc"}, "score": 4.0}, {"document": {"contents": "ddd"}, "score": 3.0}],
        [{"document": {"contents": "e"}, "score": 1.0}],
        [],
    ]
    assert [[found["contents"] for found in found_list] for found_list in bare["result"]] == [
        ["cccc", "ddd", "bb"],
        ["e"],
        [],
    ]


@pytest.mark.parametrize("documents", [None, [], [[]], ["a", "b"], [[1], []]])
def test_a_rerank_request_without_one_list_a_query_is_422(documents: object) -> None:
    with TestClient(create_app(StubRetriever(), SETTINGS, reranker=LongestFirst())) as client:
        assert client.post("/rerank", json={"queries": ["a", "b"], "documents": documents}).status_code == 422


def test_there_is_no_rerank_route_without_a_reranker(client: TestClient) -> None:
    assert client.post("/rerank", json={"queries": [], "documents": []}).status_code == 404


@pytest.mark.parametrize("sizes", [[], [0], [1], [0, 0], [2, 0, 1], [0, 1], [3, 0], [0, 2, 0, 0, 1, 0]])
def test_answers_put_together_by_hand_are_the_json_of_their_lists(sizes: list[int]) -> None:
    results = [[passage(f"q{place}", rank) for rank in range(size)] for place, size in enumerate(sizes)]
    items = [[{"document": json.loads(document), "score": score} for document, score in found] for found in results]
    assert json.loads(render_retrieve(results, True)) == {"result": items}
    bare = [[item["document"] for item in found] for found in items]
    assert json.loads(render_retrieve(results, False)) == {"result": bare}


def test_scores_are_written_so_that_they_are_read_back_exactly() -> None:
    scores = [0.0, -1.5, 1e-12, 9.80325698852539, 1 / 3, 1e22]
    rendered = render_retrieve([[ScoredPassage(b"{}", score) for score in scores]], True)
    assert [item["score"] for item in json.loads(rendered)["result"][0]] == scores
