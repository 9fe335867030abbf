"""Two retrievers over one corpus, their lists merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from retriever_server.retriever import Retriever, ScoredPassage

_RANK_OFFSET = 60


class HybridRetriever:
    """Merges the best `depth` passages of both lists. A passage is known by its id.

    rrf: sum over the lists of weight / (60 + rank), rank from 1 (Cormack, Clarke and Büttcher 2009).
    weighted: sum of weight · score, scores brought to 0..1 within each list; 0 where a passage is missing from a list.
    Equal scores keep the order of the first list, then of the second.
    """

    def __init__(
        self,
        retrievers: tuple[Retriever, Retriever],
        *,
        fusion: str = "rrf",
        weights: tuple[float, float] = (1.0, 1.0),
        depth: int = 100,
    ) -> None:
        self._retrievers = retrievers
        self._rrf = fusion == "rrf"
        self._weights = weights
        self._depth = depth

    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        depth = max(self._depth, top_k)
        first, second = (retriever.search(queries, depth) for retriever in self._retrievers)
        return [self._merge(pair)[:top_k] for pair in zip(first, second, strict=True)]

    def _merge(self, lists: tuple[list[ScoredPassage], list[ScoredPassage]]) -> list[ScoredPassage]:
        documents: dict[str, bytes] = {}
        scores: dict[str, float] = {}
        for weight, passages in zip(self._weights, lists, strict=True):
            parts = _rank_scores(passages) if self._rrf else _scaled(passages)
            for passage, part in zip(passages, parts, strict=True):
                passage_id = str(orjson.loads(passage.document)["id"])
                documents.setdefault(passage_id, passage.document)
                scores[passage_id] = scores.get(passage_id, 0.0) + weight * part
        best = sorted(scores, key=lambda passage_id: -scores[passage_id])  # stable: equal ones stay as they came
        return [ScoredPassage(documents[passage_id], scores[passage_id]) for passage_id in best]

    def describe(self) -> dict[str, Any]:
        parts = [dict(retriever.describe()) for retriever in self._retrievers]
        fusion = "rrf" if self._rrf else "weighted"
        names = ":".join(str(part["fingerprint"]) for part in parts)
        rows = [part.get("rows") for part in parts]
        return {
            "retriever": "hybrid",
            "rows": None if None in rows else sum(rows),  # no more than that can come back
            "fingerprint": f"hybrid:{fusion}:{self._weights}:{self._depth}:{names}",
            "fusion": fusion,
            "weights": list(self._weights),
            "depth": self._depth,
            "parts": parts,
        }


def _rank_scores(passages: Sequence[ScoredPassage]) -> list[float]:
    return [1 / (_RANK_OFFSET + rank) for rank in range(1, len(passages) + 1)]


def _scaled(passages: Sequence[ScoredPassage]) -> list[float]:
    """The best score becomes 1 and the worst 0; where all are equal, all become 1."""
    scores = [passage.score for passage in passages]
    low, high = min(scores, default=0.0), max(scores, default=0.0)
    return [(score - low) / (high - low) if high > low else 1.0 for score in scores]
