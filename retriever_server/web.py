"""Web search in the shape of a retriever: Google's Custom Search, SerpAPI, Serper, Tavily.

Every answer is kept in a file, so that a query is paid for once and a study can be repeated.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from retriever_server.corpus import with_contents
from retriever_server.errors import QueriesFailed, RequestError, StartError
from retriever_server.retriever import ScoredPassage
from retriever_server.threads import Threads
from retriever_server.upstream import Upstream

_AT_ONCE = 8

Request = dict[str, Any]
"""Keyword arguments of httpx's request."""


@dataclass(frozen=True, slots=True)
class Provider:
    url: str
    method: str
    keys: tuple[str, ...]
    """Environment variables that must be set."""
    most: int
    """Results one request may ask for."""
    request: Callable[[Sequence[str], str, int], Request]
    """Of the keys' values, query and number of results."""
    results: str
    """The answer's list of results."""
    link: str
    snippet: str


PROVIDERS = {
    "google": Provider(
        "https://www.googleapis.com/customsearch/v1",
        "GET",
        ("GOOGLE_API_KEY", "GOOGLE_CSE_ID"),
        10,
        lambda keys, query, count: {"params": {"key": keys[0], "cx": keys[1], "q": query, "num": count}},
        "items",
        "link",
        "snippet",
    ),
    "serpapi": Provider(
        "https://serpapi.com/search",
        "GET",
        ("SERPAPI_API_KEY",),
        100,
        lambda keys, query, count: {"params": {"engine": "google", "api_key": keys[0], "q": query, "num": count}},
        "organic_results",
        "link",
        "snippet",
    ),
    "serper": Provider(
        "https://google.serper.dev/search",
        "POST",
        ("SERPER_API_KEY",),
        100,
        lambda keys, query, count: {"headers": {"X-API-KEY": keys[0]}, "json": {"q": query, "num": count}},
        "organic",
        "link",
        "snippet",
    ),
    "tavily": Provider(
        "https://api.tavily.com/search",
        "POST",
        ("TAVILY_API_KEY",),
        20,
        lambda keys, query, count: {
            "headers": {"authorization": f"Bearer {keys[0]}"},
            "json": {"query": query, "max_results": count},
        },
        "results",
        "url",
        "content",
    ),
}


class WebRetriever:
    """Documents are `{"id": link, "title", "text": snippet, "url", "contents"}`; the score is 1 / rank.

    Args:
        cache: SQLite file of what was answered before, and of how many requests each day has seen.
        requests_per_s: requests, repeated ones included, are spaced at least this far apart.
        requests_per_day: beyond it, queries that are not in the cache are refused with 503.
        url: another address, for a proxy or a test.

    Raises:
        StartError: a key is missing from the environment.
    """

    def __init__(
        self,
        provider: str,
        cache: Path,
        *,
        requests_per_s: float = 5.0,
        requests_per_day: int = 1000,
        url: str | None = None,
    ) -> None:
        self._name = provider
        self._provider = PROVIDERS[provider]
        missing = [key for key in self._provider.keys if not os.environ.get(key)]
        if missing:
            raise StartError(f"web search by {provider} needs the environment variable {' and '.join(missing)}")
        self._keys = [os.environ[key] for key in self._provider.keys]
        self._url = url or self._provider.url
        self._upstream = Upstream(f"web search by {provider}", before_each=self._admit)
        self._pace = _Pace(requests_per_s)
        self._requests_per_day = requests_per_day
        self._counting = threading.Lock()
        self._pool = Threads("web", _AT_ONCE)
        try:
            self._memory = sqlite3.connect(cache, check_same_thread=False, isolation_level=None)
            self._memory.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, documents BLOB)")
            self._memory.execute("CREATE TABLE IF NOT EXISTS days (day TEXT PRIMARY KEY, requests INTEGER)")
        except sqlite3.Error as error:
            raise StartError(f"the web cache {cache} cannot be opened: {error}") from None

    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        """What is known comes from the cache. Answers that arrive are kept even where another query fails.

        Raises:
            QueriesFailed: by position, the quota is used up or the provider fails on the query.
        """
        count = min(top_k, self._provider.most)
        found = {query: self._recall(query, count) for query in dict.fromkeys(queries)}
        asked = {query: self._pool.submit(self._ask, query, count) for query, known in found.items() if known is None}
        failed: dict[str, RequestError] = {}
        for query, answer in asked.items():
            try:
                found[query] = documents = answer.result()
                self._remember(query, count, documents)
            except RequestError as error:
                failed[query] = error
            except ValueError as error:
                failed[query] = RequestError(500, str(error), reason="failed")
        if failed:
            raise QueriesFailed({place: failed[query] for place, query in enumerate(queries) if query in failed})
        return [
            [ScoredPassage(document, 1 / rank) for rank, document in enumerate((found[query] or [])[:top_k], start=1)]
            for query in queries
        ]

    def describe(self) -> dict[str, Any]:
        return {"retriever": "web", "fingerprint": f"web:{self._name}", "provider": self._name}

    def _ask(self, query: str, count: int) -> list[bytes]:
        answer = self._upstream.ask(
            self._provider.method, self._url, **self._provider.request(self._keys, query, count)
        )
        results = answer.get(self._provider.results, []) if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise ValueError(f"web search by {self._name} answered in an unknown form")
        return [self._document(result) for result in results if result.get(self._provider.link)]

    def _document(self, result: dict[str, Any]) -> bytes:
        link, title = result[self._provider.link], result.get("title") or ""
        text = result.get(self._provider.snippet) or ""
        return with_contents({"id": link, "title": title, "text": text, "url": link})

    def _key(self, query: str, count: int) -> str:
        return f"{self._name}:{count}:{query}"

    def _recall(self, query: str, count: int) -> list[bytes] | None:
        row = self._memory.execute("SELECT documents FROM answers WHERE key = ?", (self._key(query, count),)).fetchone()
        return None if row is None else [orjson.dumps(document) for document in orjson.loads(row[0])]

    def _remember(self, query: str, count: int, documents: list[bytes]) -> None:
        packed = b"[" + b",".join(documents) + b"]"
        self._memory.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (self._key(query, count), packed))

    def _admit(self) -> None:
        """Before every request, repeated ones too: count it as one of today's and wait for its turn.

        Raises:
            RequestError: 503 when none is left.
        """
        day = time.strftime("%Y-%m-%d", time.gmtime())
        with self._counting:
            row = self._memory.execute("SELECT requests FROM days WHERE day = ?", (day,)).fetchone()
            used = row[0] if row else 0
            if used >= self._requests_per_day:
                what = f"today's {self._requests_per_day:,} web searches are used up"
                raise RequestError(503, what, reason="quota", retry_after_s=30)
            self._memory.execute("INSERT OR REPLACE INTO days VALUES (?, ?)", (day, used + 1))
        self._pace.wait()


class _Pace:
    """Lets one caller through every 1 / `per_s` seconds."""

    def __init__(self, per_s: float) -> None:
        self._gap_s = 1 / per_s
        self._lock = threading.Lock()
        self._next = 0.0

    def wait(self) -> None:
        with self._lock:
            now = time.monotonic()
            mine = max(self._next, now)
            self._next = mine + self._gap_s
        time.sleep(mine - now)
