"""Reordering of given candidates: each query against its own documents, never against another query's."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event
from typing import Any

import orjson

from retriever_server.corpus import contents_of
from retriever_server.retriever import Reranker, Retriever, ScoredPassage
from retriever_server.schemas import RerankRequest


class RerankRetriever:
    """The best `depth` passages of any retriever, in the reranker's order; each query with its own candidates."""

    stages = ("search", "rerank")

    def __init__(self, retriever: Retriever, reranker: Reranker, name: str, depth: int = 50) -> None:
        self._retriever = retriever
        self._reranker = reranker
        self._name = name
        self._depth = depth

    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        return self.complete(queries, self.prepare(queries, top_k), top_k)

    def prepare(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        """The candidates of each query."""
        return self._retriever.search(queries, max(self._depth, top_k))

    def complete(
        self, queries: Sequence[str], prepared: list[list[ScoredPassage]], top_k: int
    ) -> list[list[ScoredPassage]]:
        return [self._reorder(query, passages)[:top_k] for query, passages in zip(queries, prepared, strict=True)]

    def _reorder(self, query: str, passages: list[ScoredPassage]) -> list[ScoredPassage]:
        scores = self._reranker.score(query, [contents_of(orjson.loads(passage.document)) for passage in passages])
        scored = [ScoredPassage(passage.document, score) for passage, score in zip(passages, scores, strict=True)]
        return sorted(scored, key=lambda passage: -passage.score)

    def describe(self) -> dict[str, Any]:
        inner = dict(self._retriever.describe())
        fingerprint = f"rerank:{self._name}:{self._depth}:{inner['fingerprint']}"
        return {**inner, "fingerprint": fingerprint, "reranker": self._name, "rerank_depth": self._depth}


def rerank(reranker: Reranker, request: RerankRequest, given_up: Event) -> list[list[ScoredPassage]]:
    """Best documents first, one list a query; ties keep the order they came in. Stops where the request is given up."""
    results: list[list[ScoredPassage]] = []
    for query, documents in zip(request.queries, request.documents, strict=True):
        if given_up.is_set():
            break
        scores = reranker.score(query, [contents_of(document) for document in documents]) if documents else []
        passages = [
            ScoredPassage(orjson.dumps(document), score) for document, score in zip(documents, scores, strict=True)
        ]
        passages.sort(key=lambda passage: -passage.score)
        results.append(passages[: request.top_k])
    return results
