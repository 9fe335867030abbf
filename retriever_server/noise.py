"""Retrievers that are wrong on purpose, for studies: does the policy really read what it finds?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from retriever_server.bm25 import BM25Retriever
from retriever_server.corpus import Corpus
from retriever_server.retriever import ScoredPassage


class EmptyRetriever:
    """Finds nothing."""

    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        return [[] for _ in queries]

    def describe(self) -> dict[str, Any]:
        return {"retriever": "noise", "noise": "empty", "fingerprint": "noise:empty"}


class RandomRetriever:
    """Passages drawn at random, the same ones whenever a query is asked again. Their score is 0."""

    def __init__(self, corpus: Corpus, seed: int = 0) -> None:
        self._corpus = corpus
        self._seed = seed

    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        return [self._draw(query, min(top_k, len(self._corpus))) for query in queries]

    def _draw(self, query: str, count: int) -> list[ScoredPassage]:
        rows = random.Random(f"{self._seed}:{query}").sample(range(len(self._corpus)), count)
        return [ScoredPassage(self._corpus.document(row), 0.0) for row in rows]

    def describe(self) -> dict[str, Any]:
        return {
            "retriever": "noise",
            "noise": "random",
            "fingerprint": f"noise:random:{self._seed}:{self._corpus.fingerprint}",
            "rows": len(self._corpus),
        }


class ShuffledRetriever:
    """BM25's best `depth` passages in an order drawn anew for each query: relevant, but badly ranked."""

    def __init__(self, retriever: BM25Retriever, seed: int = 0, depth: int = 20) -> None:
        self._retriever = retriever
        self._seed = seed
        self._depth = depth

    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        found = self._retriever.search(queries, max(top_k, self._depth))
        return [
            random.Random(f"{self._seed}:{query}").sample(passages, len(passages))[:top_k]
            for query, passages in zip(queries, found, strict=True)
        ]

    def describe(self) -> dict[str, Any]:
        inner = self._retriever.describe()
        fingerprint = f"noise:shuffled:{self._seed}:{self._depth}:{inner['fingerprint']}"
        return {**inner, "retriever": "noise", "noise": "shuffled", "fingerprint": fingerprint}
