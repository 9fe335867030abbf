"""Retrievers for tests of the server: they record what they are asked, wait to be let go, or fail on purpose."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

from retriever_server.retriever import ScoredPassage


class StubRetriever:
    """Finds `top_k` made-up passages that name the query and their rank."""

    def __init__(self, *, num_passages: int = 1000, fails_on: Sequence[str] = ()) -> None:
        self.calls: list[tuple[list[str], int]] = []
        self.gate = threading.Event()
        """Searches wait for it; set from the start."""
        self.gate.set()
        self.entered = threading.Event()
        """Set when a search begins."""
        self._num_passages = num_passages
        self._fails_on = fails_on

    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        self.calls.append((list(queries), top_k))
        self.entered.set()
        assert self.gate.wait(timeout=20)
        for query in queries:
            if query in self._fails_on:
                raise LookupError(f"cannot search {query!r}")
        return [[passage(query, rank) for rank in range(min(top_k, self._num_passages))] for query in queries]

    def describe(self) -> dict[str, Any]:
        return {"retriever": "stub", "fingerprint": "stub"}

    @property
    def searched(self) -> list[str]:
        """Every query searched so far, without the warm-up."""
        return [query for queries, _ in self.calls for query in queries if query != "warm up"]


def passage(query: str, rank: int) -> ScoredPassage:
    document = {"id": f"{query}/{rank}", "contents": f'"{query}"\npassage {rank}'}
    return ScoredPassage(json.dumps(document).encode(), 10.0 - rank)
