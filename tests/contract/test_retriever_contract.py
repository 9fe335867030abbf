"""What every retriever promises: those of the server, and the framework's client over a real server.

All are asked through one small function that returns (passage id, score) pairs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from retriever_server import dense, dense_build, lucene_build, qdrant
from retriever_server.app import create_app
from retriever_server.bm25 import BM25Retriever, open_or_build
from retriever_server.corpus import Corpus
from retriever_server.cross_encoder import CrossEncoder
from retriever_server.encoder import PROFILES, Encoder
from retriever_server.hybrid import HybridRetriever
from retriever_server.lucene import LuceneRetriever
from retriever_server.noise import EmptyRetriever, RandomRetriever, ShuffledRetriever
from retriever_server.remote import OpenSearchRetriever, RemoteRetriever
from retriever_server.reranking import RerankRetriever
from retriever_server.retriever import Retriever, ScoredPassage, StagedRetriever
from retriever_server.web import WebRetriever
from search_r1.environments.retriever_client import RetrieverClient
from tests.live_server import live_server
from tests.lucene_jar import needs_lucene
from tests.recorded_server import Answer, Asked, recorded_server
from tests.tiny_encoder import tiny_encoder_dir

Ask = Callable[[Sequence[str], int], list[list[tuple[str, float]]]]

COUNTRIES = ["Norway", "Peru", "Japan", "Kenya", "Chile", "Nepal", "Spain", "Egypt"]
QUERIES = ["capital of Norway", "rivers", "Peru or Japan", "mountains of Nepal and Chile"]


def write_corpus(folder: Path) -> Path:
    """Ids that are neither rows nor numbers, two passages a country."""
    rows = []
    for country in reversed(COUNTRIES):
        rows.append({"id": f"{country}/b", "contents": f'"{country}"\nThe capital of {country} lies on rivers.'})
        rows.append({"id": f"{country}/a", "title": country, "text": f"Mountains of {country} are high."})
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ask_directly(retriever: Retriever) -> Ask:
    def ask(queries: Sequence[str], top_k: int) -> list[list[tuple[str, float]]]:
        found = retriever.search(queries, top_k)
        return [[(orjson.loads(document)["id"], score) for document, score in passages] for passages in found]

    return ask


def ask_over_http(url: str) -> Ask:
    client = RetrieverClient([url], max_queries_per_request=3)

    def ask(queries: Sequence[str], top_k: int) -> list[list[tuple[str, float]]]:
        found = client.search(queries, top_k)
        return [[(passage.passage_id, passage.score or 0.0) for passage in passages] for passages in found]

    return ask


def bm25(path: Path) -> BM25Retriever:
    return BM25Retriever.build(Corpus.open(path))


def open_lucene(path: Path, held: ExitStack) -> Retriever:
    lucene_build.build(Corpus.open(path), path.parent / "lucene", threads=1)
    retriever = LuceneRetriever(path.parent / "lucene", Corpus.open(path))
    held.callback(retriever.close)
    return retriever


def tiny_encoder(path: Path) -> Encoder:
    return Encoder(str(tiny_encoder_dir(path.parent / "tiny")), PROFILES["e5"])


def open_dense(path: Path, factory: str | None) -> Retriever:
    dense_build.build(Corpus.open(path), path.parent / "dense", tiny_encoder(path), factory=factory, shard_rows=5)
    return dense.load(path.parent / "dense", path, str(path.parent / "tiny"))


def open_qdrant(path: Path, held: ExitStack) -> Retriever:
    client, encoder = qdrant.connect(str(path.parent / "qdrant")), tiny_encoder(path)
    held.callback(client.close)
    qdrant.upload(client, "wiki", Corpus.open(path), encoder)
    return qdrant.QdrantRetriever(client, "wiki", encoder)


def open_opensearch(path: Path, held: ExitStack) -> Retriever:
    engine = bm25(path)

    def respond(asked: Asked) -> Answer:
        if asked.method == "GET":
            return Answer({"count": 16})
        searches = [orjson.loads(line) for line in asked.body.splitlines()][1::2]
        lists = [engine.search([one["query"]["match"]["contents"]["query"]], one["size"])[0] for one in searches]
        return Answer(
            {"responses": [{"status": 200, "hits": {"hits": [hit(found) for found in hits]}} for hits in lists]}
        )

    def hit(found: ScoredPassage) -> dict[str, Any]:
        document = orjson.loads(found.document)
        return {"_id": document["id"], "_score": found.score, "_source": document}

    return OpenSearchRetriever(held.enter_context(recorded_server(respond)).url, "wiki")


def open_web(path: Path, held: ExitStack) -> Retriever:
    engine = bm25(path)

    def respond(asked: Asked) -> Answer:
        (found,) = engine.search([asked.json["q"]], asked.json["num"])
        ids = [orjson.loads(document)["id"] for document, _ in found]
        return Answer({"organic": [{"title": name, "link": name, "snippet": "text"} for name in ids]})

    held.enter_context(pytest.MonkeyPatch.context()).setenv("SERPER_API_KEY", "key")
    url = held.enter_context(recorded_server(respond)).url
    return WebRetriever("serper", path.parent / "web.sqlite", requests_per_s=1e6, url=url)


def open_hybrid(path: Path, fusion: str) -> Retriever:
    return HybridRetriever((bm25(path), open_dense(path, None)), fusion=fusion)


def open_reranked(path: Path) -> Retriever:
    judge = CrossEncoder(str(tiny_encoder_dir(path.parent / "judge", classifier=True)))
    return RerankRetriever(bm25(path), judge, "judge", depth=5)


OPENERS: dict[str, Callable[[Path, ExitStack], Any]] = {
    "bm25": lambda path, held: bm25(path),
    "bm25 saved": lambda path, held: [open_or_build(path, path.parent / "index") for _ in range(2)][1],
    "lucene": open_lucene,
    "dense exact": lambda path, held: open_dense(path, None),
    "dense Flat": lambda path, held: open_dense(path, "Flat"),
    "dense HNSW": lambda path, held: open_dense(path, "HNSW8"),
    "hybrid rrf": lambda path, held: open_hybrid(path, "rrf"),
    "hybrid weighted": lambda path, held: open_hybrid(path, "weighted"),
    "reranked": lambda path, held: open_reranked(path),
    "remote": lambda path, held: RemoteRetriever(held.enter_context(live_server(create_app(bm25(path))))),
    "opensearch": open_opensearch,
    "qdrant": open_qdrant,
    "web": open_web,
    "empty": lambda path, held: EmptyRetriever(),
    "random": lambda path, held: RandomRetriever(Corpus.open(path)),
    "shuffled": lambda path, held: ShuffledRetriever(bm25(path)),
}
OVER_HTTP = ("bm25", "random", "empty", "dense exact", "reranked")


@contextmanager
def opened(name: str, folder: Path) -> Iterator[Retriever]:
    with ExitStack() as held:
        yield OPENERS[name](write_corpus(folder), held)


@contextmanager
def asking(kind: str, folder: Path) -> Iterator[Ask]:
    name, _, over = kind.partition(" over ")
    with opened(name, folder) as retriever:
        if over:
            with live_server(create_app(retriever)) as url:
                yield ask_over_http(url)
        else:
            yield ask_directly(retriever)


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(name, marks=needs_lucene if name == "lucene" else ()) for name in OPENERS),
        *(f"{name} over http" for name in OVER_HTTP),
    ],
)
def ask(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    with asking(request.param, tmp_path_factory.mktemp("corpus")) as ask:
        yield ask


def test_there_is_one_list_a_query_in_order(ask: Ask) -> None:
    assert ask(QUERIES, 3) == [ask([query], 3)[0] for query in QUERIES]


def test_no_queries_give_no_lists(ask: Ask) -> None:
    assert ask([], 3) == []


def test_an_answer_does_not_depend_on_its_batch_mates(ask: Ask) -> None:
    alone = ask(["rivers"], 5)[0]
    assert ask([*QUERIES, "rivers", "rivers", "unheard of"], 5)[4:6] == [alone, alone]


def test_an_answer_is_the_same_whenever_it_is_asked(ask: Ask) -> None:
    first = ask(QUERIES, 3)
    ask(["something else"], 7)
    assert ask(QUERIES, 3) == first


@pytest.mark.parametrize("top_k", [1, 2, 16, 500])
def test_at_most_top_k_passages_come_and_at_most_what_exists(ask: Ask, top_k: int) -> None:
    for passages in ask(QUERIES, top_k):
        assert len(passages) <= min(top_k, 16)


def test_no_passage_comes_twice_and_every_id_is_the_corpuss(ask: Ask) -> None:
    known = {f"{country}/{part}" for country in COUNTRIES for part in "ab"}
    for passages in ask(QUERIES, 16):
        ids = [passage_id for passage_id, _ in passages]
        assert len(set(ids)) == len(ids)
        assert set(ids) <= known


def test_scores_are_finite_numbers(ask: Ask) -> None:
    for passages in ask(QUERIES, 16):
        assert all(abs(score) < 1e6 for _, score in passages)


@pytest.mark.parametrize(
    "query", ["", " \n\t", "\x00\x07", "?!…", "a" * 20_000, "東京 \U0001f355 מָיִם ١٢٣", "</information> <search>"]
)
def test_strange_queries_are_answered_like_any_other(ask: Ask, query: str) -> None:
    strange, plain = ask([query, "rivers"], 3)
    assert len(strange) <= 3
    assert plain == ask(["rivers"], 3)[0]


@pytest.mark.parametrize("name", ["dense exact", "dense HNSW", "reranked"])
def test_a_search_in_two_stages_is_the_search_in_one(name: str, tmp_path: Path) -> None:
    with opened(name, tmp_path) as retriever:
        assert isinstance(retriever, StagedRetriever)
        staged = retriever.complete(QUERIES, retriever.prepare(QUERIES, 3), 3)
        assert staged == retriever.search(QUERIES, 3)


@pytest.mark.parametrize("kind", ["bm25", "bm25 saved", "bm25 over http"])
def test_bm25_puts_the_best_passage_first_and_scores_fall(kind: str, tmp_path: Path) -> None:
    with asking(kind, tmp_path) as ask:
        for country in COUNTRIES:
            passages = ask([f"capital of {country}"], 8)[0]
            assert passages[0][0] == f"{country}/b"
            scores = [score for _, score in passages]
            assert scores == sorted(scores, reverse=True)


def test_http_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "direct").mkdir()
    with asking("bm25 over http", tmp_path) as over_http, asking("bm25", tmp_path / "direct") as directly:
        assert over_http(QUERIES, 5) == directly(QUERIES, 5)


def test_noise_is_what_it_says(tmp_path: Path) -> None:
    with (
        asking("empty", tmp_path) as empty,
        asking("random", tmp_path) as random,
        asking("shuffled", tmp_path) as shuffled,
    ):
        assert empty(QUERIES, 3) == [[], [], [], []]
        drawn = random(QUERIES, 3)
        assert all(len(passages) == 3 for passages in drawn)
        assert len({tuple(passages) for passages in drawn}) == len(QUERIES)
        best = ask_directly(bm25(write_corpus(tmp_path)))(QUERIES, 16)
        for bad, good in zip(shuffled(QUERIES, 16), best, strict=True):
            assert sorted(bad) == sorted(good)
        assert shuffled(QUERIES, 16) != best
