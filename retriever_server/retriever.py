"""The seam of the server: everything that answers queries, whatever engine stands behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable


class ScoredPassage(NamedTuple):
    """One hit: a passage as the raw bytes of its JSON object, never parsed on its way to the client."""

    document: bytes
    score: float


class Retriever(Protocol):
    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        """Best passages first, at most `top_k` a query, one list a query, in order.

        A query's passages depend on nothing but the query and `top_k`. Called by one thread at a time.
        """
        ...

    def describe(self) -> Mapping[str, Any]:
        """What `GET /info` shows. `fingerprint` names index and corpus: it changes whenever answers may."""
        ...


@runtime_checkable
class StagedRetriever(Retriever, Protocol):
    """A retriever whose search falls into two stages, each run in a thread of its own: a batch is prepared while the
    one before it is searched. `search(q, k)` equals `complete(q, prepare(q, k), k)`."""

    stages: tuple[str, str]
    """What the metrics call them."""

    def prepare(self, queries: Sequence[str], top_k: int) -> Any: ...

    def complete(self, queries: Sequence[str], prepared: Any, top_k: int) -> list[list[ScoredPassage]]: ...


class Reranker(Protocol):
    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """One relevance score a document text, in order, for this query alone."""
        ...
