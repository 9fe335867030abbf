"""The seam of the server: everything that answers queries, whatever engine stands behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class ScoredPassage(NamedTuple):
    """One hit: a passage as the raw bytes of its JSON object, never parsed on its way to the client."""

    document: bytes
    score: float


class Retriever(Protocol):
    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        """Best passages first, at most `top_k` a query, one list a query, in order.

        A query's passages depend on nothing but the query and `top_k`. Called from one worker thread.
        """
        ...

    def describe(self) -> Mapping[str, Any]:
        """What `GET /info` shows. `fingerprint` names index and corpus: it changes whenever answers may."""
        ...


class Reranker(Protocol):
    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """One relevance score a document text, in order, for this query alone."""
        ...
