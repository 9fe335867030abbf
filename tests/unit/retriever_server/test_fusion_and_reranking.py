from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from retriever_server.cross_encoder import CrossEncoder
from retriever_server.errors import StartError
from retriever_server.hybrid import HybridRetriever
from retriever_server.reranking import RerankRetriever
from retriever_server.retriever import ScoredPassage
from tests.tiny_encoder import tiny_encoder_dir


class Listed:
    """Finds the same ids with the same scores for every query."""

    def __init__(self, hits: dict[str, float]) -> None:
        self._passages = [
            ScoredPassage(json.dumps({"id": name, "contents": f'"{name}"\ntext {name}'}).encode(), score)
            for name, score in hits.items()
        ]
        self.depths: list[int] = []

    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        self.depths.append(top_k)
        return [self._passages[:top_k] for _ in queries]

    def describe(self) -> dict[str, Any]:
        return {"fingerprint": "listed", "rows": len(self._passages)}


class WordCount:
    """Scores a document by how often it names the query; remembers what each query was scored with."""

    def __init__(self) -> None:
        self.seen: dict[str, list[str]] = {}

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        self.seen[query] = list(documents)
        return [float(document.count(query)) for document in documents]


def hits(found: list[list[ScoredPassage]]) -> list[tuple[str, float]]:
    (passages,) = found
    return [(json.loads(document)["id"], score) for document, score in passages]


def test_reciprocal_ranks_are_added() -> None:
    hybrid = HybridRetriever((Listed({"a": 9, "b": 8, "c": 7}), Listed({"c": 0.9, "d": 0.8, "a": 0.1})))
    expected = [("a", 1 / 61 + 1 / 63), ("c", 1 / 63 + 1 / 61), ("b", 1 / 62), ("d", 1 / 62)]
    assert hits(hybrid.search(["q"], 10)) == [(name, pytest.approx(score)) for name, score in expected]
    weighted = HybridRetriever((Listed({"a": 9, "b": 8}), Listed({"c": 1, "b": 0})), weights=(1, 3))
    assert [name for name, _ in hits(weighted.search(["q"], 3))] == ["b", "c", "a"]


def test_a_hybrid_tells_how_many_passages_it_can_return_at_most() -> None:
    assert HybridRetriever((Listed({"a": 1, "b": 1}), Listed({"c": 1}))).describe()["rows"] == 3


def test_weighted_scores_are_scaled_within_each_list() -> None:
    parts = (Listed({"a": 30, "b": 20, "c": 10}), Listed({"b": 0.9, "d": 0.5}))
    hybrid = HybridRetriever(parts, fusion="weighted", weights=(1, 2))
    assert hits(hybrid.search(["q"], 10)) == [("b", 2.5), ("a", 1.0), ("c", 0.0), ("d", 0.0)]
    assert hits(HybridRetriever((Listed({"a": 5}), Listed({})), fusion="weighted").search(["q"], 3)) == [("a", 1.0)]


def test_a_shorter_list_is_the_beginning_of_a_longer_one() -> None:
    hybrid = HybridRetriever((Listed(dict.fromkeys("abcdefgh", 1)), Listed(dict.fromkeys("hgfedcba", 1))))
    whole = hits(hybrid.search(["q"], 8))
    assert [hits(hybrid.search(["q"], top_k)) for top_k in range(1, 9)] == [whole[:top_k] for top_k in range(1, 9)]


def test_each_query_is_reranked_among_its_own_candidates() -> None:
    class PerQuery(Listed):
        def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
            return [
                [
                    ScoredPassage(json.dumps({"id": f"{q}{n}", "contents": f"{q} " * n}).encode(), -n)
                    for n in range(1, 5)
                ]
                for q in queries
            ]

    reranker = WordCount()
    found = RerankRetriever(PerQuery({}), reranker, "count").search(["x", "y"], 2)
    assert [[json.loads(document)["id"] for document, _ in passages] for passages in found] == [
        ["x4", "x3"],
        ["y4", "y3"],
    ]
    assert all(set(text) <= {query, " "} for query, texts in reranker.seen.items() for text in texts)


def test_reranking_reads_depth_passages_and_keeps_the_order_of_equals() -> None:
    inner = Listed(dict.fromkeys("abcdef", 1))
    reranked = RerankRetriever(inner, WordCount(), "count", depth=4)
    assert [name for name, _ in hits(reranked.search(["text"], 3))] == ["a", "b", "c"]
    assert [name for name, _ in hits(reranked.search(["d"], 9))][:1] == ["d"]
    assert inner.depths == [4, 9]


def test_a_cross_encoders_score_is_the_plain_models_and_alone_as_in_company(tmp_path: Path) -> None:
    folder = str(tiny_encoder_dir(tmp_path / "cross", classifier=True))
    encoder = CrossEncoder(folder)
    documents = ["peru", "rivers of norway are high " * 3, "", "mountains " * 300]
    documents += ["japan " * length for length in range(20)]
    scores = encoder.score("capital of peru", documents)
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    for document, score in zip(documents, scores, strict=True):
        inputs = tokenizer(
            ["capital of peru"], [document], truncation="longest_first", max_length=128, return_tensors="pt"
        )
        with torch.no_grad():
            expected = model(**inputs).logits[0, -1].item()
        np.testing.assert_allclose(score, expected, atol=1e-5)
        assert encoder.score("capital of peru", [document]) == [score]
    assert encoder.score("q", []) == []
    with pytest.raises(StartError, match=r"the reranker .* cannot be loaded"):
        CrossEncoder(str(tmp_path / "nothing"))
