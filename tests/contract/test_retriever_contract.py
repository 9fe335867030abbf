"""What every retriever promises: those of the server, and the framework's client over a real server.

All are asked through one small function that returns (passage id, score) pairs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from retriever_server.app import create_app
from retriever_server.bm25 import BM25Retriever, open_or_build
from retriever_server.corpus import Corpus
from retriever_server.noise import EmptyRetriever, RandomRetriever, ShuffledRetriever
from retriever_server.retriever import Retriever
from search_r1.environments.retriever_client import RetrieverClient
from tests.live_server import live_server

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


def retriever_named(name: str, folder: Path) -> Retriever:
    path = write_corpus(folder)
    builders: dict[str, Callable[[], Any]] = {
        "bm25": lambda: BM25Retriever.build(Corpus.open(path)),
        "bm25 saved": lambda: [open_or_build(path, folder / "index") for _ in range(2)][1],
        "empty": EmptyRetriever,
        "random": lambda: RandomRetriever(Corpus.open(path)),
        "shuffled": lambda: ShuffledRetriever(BM25Retriever.build(Corpus.open(path))),
    }
    retriever: Retriever = builders[name]()
    return retriever


@contextmanager
def asking(kind: str, folder: Path) -> Iterator[Ask]:
    name, _, over = kind.partition(" over ")
    retriever = retriever_named(name, folder)
    if over:
        with live_server(create_app(retriever)) as url:
            yield ask_over_http(url)
    else:
        yield ask_directly(retriever)


@pytest.fixture(
    scope="module",
    params=[
        "bm25",
        "bm25 saved",
        "empty",
        "random",
        "shuffled",
        "bm25 over http",
        "random over http",
        "empty over http",
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
        best = ask_directly(retriever_named("bm25", tmp_path))(QUERIES, 16)
        for bad, good in zip(shuffled(QUERIES, 16), best, strict=True):
            assert sorted(bad) == sorted(good)
        assert shuffled(QUERIES, 16) != best
