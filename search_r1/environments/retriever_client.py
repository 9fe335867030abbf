"""The retriever over HTTP: pooled connections, bounded retries, several servers, typed errors.

What is read from an answer is strict: an error body, a malformed answer or a wrong number of lists raises
`RetrieverError`; it is never taken for a passage.
"""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt

from search_r1.environments.deadline_transport import DeadlineTransport
from search_r1.errors import ConfigError, RetrieverError
from search_r1.redaction import shown
from search_r1.types import Passage

logger = logging.getLogger(__name__)

TRANSIENT_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
"""Worth another try; any other status than 200 is final."""
_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 10.0
MAX_PAUSE_S = 60.0
"""The longest wait between two attempts that a server may ask for."""
_COOL_DOWN_S = 10.0
_CHECK_TIMEOUT_S = 10.0
_MAX_CAUSE_CHARS = 300


class RetrieverClient:
    """Implements `Retriever` over one or more servers that speak `POST /retrieve`. Thread safe.

    Requests go to the servers in turn; one that fails is tried last for some seconds. Connections are made directly:
    proxy settings of the environment do not apply.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float = 30.0,
        max_retries: int = 4,
        max_queries_per_request: int = 256,
        max_connections: int = 16,
        token: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            urls: with or without the `/retrieve` path.
            timeout_s: of one attempt.
            max_retries: after the first attempt of a request, over all URLs.
            max_connections: requests in flight at once.
            token: bearer token; None takes the environment variable RETRIEVER_TOKEN, if it is set.
            sleep: waits between attempts.

        Raises:
            ConfigError: no URL, or one that is no HTTP address.
        """
        if not urls:
            raise ConfigError("environment.retriever_urls is empty: name the URL of a retrieval server")
        self.urls = tuple(retrieve_url(url) for url in urls)
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._max_queries_per_request = max_queries_per_request
        self._sleep = sleep
        token = os.environ.get("RETRIEVER_TOKEN") if token is None else token
        headers = {"content-type": "application/json", "x-request-timeout-ms": str(max(1, int(timeout_s * 1000)))}
        self._http_settings: dict[str, Any] = {
            "headers": headers | ({"authorization": f"Bearer {token}"} if token else {}),
            # httpx's pool may close a connection it has just lent to another thread when it is full or one expires,
            # so it is never full: `_in_flight` bounds the requests instead.
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None),
            "trust_env": False,
        }
        connections = {name: self._http_settings[name] for name in ("limits", "trust_env")}
        self._http = httpx.Client(**self._http_settings, transport=DeadlineTransport(**connections))
        self._in_flight = threading.BoundedSemaphore(max_connections)
        self._senders = ThreadPoolExecutor(max_connections, thread_name_prefix="retriever-client")
        self._lock = threading.Lock()
        self._next_url = 0
        self._cooling_until: dict[str, float] = {}
        self._stats = _new_stats()

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Best passages first, at most `top_k` a query, one list a query, in order. Equal queries are sent once.

        Raises:
            RetrieverError: naming the URLs and the cause, once the retries are used up or the answer is final.
        """
        unique = list(dict.fromkeys(queries))
        size = self._max_queries_per_request
        chunks = [unique[start : start + size] for start in range(0, len(unique), size)]
        if len(chunks) == 1:
            found = self._search_chunk(chunks[0], top_k)
        else:
            answers = self._senders.map(lambda chunk: self._search_chunk(chunk, top_k), chunks)
            found = [passages for answer in answers for passages in answer]
        by_query = dict(zip(unique, found, strict=True))
        return [list(by_query[query]) for query in queries]

    def check(self) -> None:
        """Ask every server one question, without retries.

        Raises:
            RetrieverError: naming each server that does not answer, and the command that starts one.
        """
        failures = []
        for url in self.urls:
            try:
                self._send(url, encode_request(["test"], 1), 1, min(self._timeout_s, _CHECK_TIMEOUT_S))
            except (_TransientError, RetrieverError) as error:
                failures.append(f"no retriever at {shown(url)}: {error}{_loopback_hint(url)}")
        if failures:
            port = urlsplit(self.urls[0]).port or 80
            command = f"python -m retriever_server --retriever bm25 --corpus corpus.jsonl --port {port}"
            raise RetrieverError("; ".join(failures) + f". Start one with: {command}")

    def stats(self) -> dict[str, Any]:
        """Since the last call: `requests` (attempts), `queries`, `retries`, `failures` (requests given up), and
        `seconds`, a list with the duration of each request that succeeded, its retries included."""
        with self._lock:
            stats, self._stats = self._stats, _new_stats()
        return stats

    def close(self) -> None:
        self._senders.shutdown()
        self._http.close()

    def _search_chunk(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        body = encode_request(queries, top_k)
        urls = self._order()
        with self._counting(urls, len(queries)):
            turns = Turns(urls)
            for attempt in Retrying(sleep=self._sleep, **self._retry_policy(turns)):
                with attempt:
                    lists = self._send(turns.url, body, len(queries), self._timeout_s)
        return [passages[:top_k] for passages in lists]

    def _retry_policy(self, turns: Turns) -> dict[str, Any]:
        """Settings of tenacity: which failures are tried again, how often, and after which pause."""
        return {
            "stop": stop_after_attempt(self._max_retries + 1),
            "retry": retry_if_exception_type(_TransientError),
            "wait": turns,
            "before_sleep": lambda state: self._count("retries", 1),
            "reraise": True,
        }

    @contextmanager
    def _counting(self, urls: Sequence[str], num_queries: int) -> Iterator[None]:
        """Around all attempts of one request: counts how it ended."""
        started = time.monotonic()
        try:
            yield
        except _TransientError as error:
            self._count("failures", 1)
            raise RetrieverError(
                f"the retriever at {' and '.join(map(shown, urls))} gave no answer in {self._max_retries + 1} "
                f"attempts; the last one: {error}"
            ) from error
        except RetrieverError:
            self._count("failures", 1)
            raise
        with self._lock:
            self._stats["queries"] += num_queries
            self._stats["seconds"].append(time.monotonic() - started)

    def _send(self, url: str, body: bytes, num_queries: int, timeout_s: float) -> list[list[Passage]]:
        """One attempt."""
        with self._attempting(url), self._in_flight:
            response = self._http.post(url, content=body, timeout=timeout(timeout_s))
        return self._read(url, response, num_queries)

    @contextmanager
    def _attempting(self, url: str) -> Iterator[None]:
        """Around one exchange: what fails on the way is told as our own errors."""
        self._count("requests", 1)
        try:
            yield
        except httpx.TransportError as error:
            self._cool(url, True)
            raise _TransientError(f"{type(error).__name__}: {shown(str(error))}") from error
        except httpx.RequestError as error:
            raise RetrieverError(f"the retriever at {shown(url)} sent an unreadable answer: {error}") from error

    def _read(self, url: str, response: httpx.Response, num_queries: int) -> list[list[Passage]]:
        """The passages of an answer that arrived."""
        status, answer = response.status_code, response.content
        self._cool(url, status in TRANSIENT_STATUSES)
        if status != 200:
            cause = f"HTTP {status}: {shown(answer.decode(errors='replace'))[:_MAX_CAUSE_CHARS]}"
            if status in TRANSIENT_STATUSES:
                raise _TransientError(cause, _retry_after_s(response.headers.get("retry-after")))
            raise RetrieverError(f"the retriever at {shown(url)} refused the request: {cause}")
        try:
            return parse_answer(answer, num_queries)
        except ValueError as error:
            raise RetrieverError(
                f"the retriever at {shown(url)} answered with something else than passages: {shown(str(error))}"
            ) from error

    def _order(self) -> list[str]:
        """The URLs as one request tries them: the next one in turn first, those that failed lately last."""
        with self._lock:
            start = self._next_url
            self._next_url = (start + 1) % len(self.urls)
            now = time.monotonic()
            return sorted(
                self.urls[start:] + self.urls[:start], key=lambda url: self._cooling_until.get(url, 0.0) > now
            )

    def _cool(self, url: str, failed: bool) -> None:
        with self._lock:
            known = self._cooling_until.pop(url, None)
            if failed:
                self._cooling_until[url] = time.monotonic() + _COOL_DOWN_S
        if failed and known is None:
            logger.warning("the retriever at %s fails; retrying", shown(url))

    def _count(self, name: str, number: int) -> None:
        with self._lock:
            self._stats[name] += number


class _TransientError(Exception):
    """An attempt failed in a way that another one may not."""

    def __init__(self, cause: str, retry_after_s: float = 0.0) -> None:
        super().__init__(cause)
        self.retry_after_s = retry_after_s


def retrieve_url(url: str) -> str:
    """The address to post to: `/retrieve` is appended where it is missing.

    >>> retrieve_url("127.0.0.1:8000")
    'http://127.0.0.1:8000/retrieve'

    Raises:
        ConfigError: it is no HTTP address.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(
            f"environment.retriever_urls: {shown(url)!r} is no HTTP address such as http://127.0.0.1:8000/retrieve"
        )
    path = parts.path.rstrip("/")
    return urlunsplit(parts._replace(path=path if path.endswith("/retrieve") else f"{path}/retrieve"))


def parse_answer(body: bytes, num_queries: int) -> list[list[Passage]]:
    """The passages of an answer in the wire format, with or without scores.

    Raises:
        ValueError: it is anything else than one list of documents a query.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError(f"not JSON: {body[:_MAX_CAUSE_CHARS]!r}") from None
    lists = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(lists, list) or not all(isinstance(items, list) for items in lists):
        raise ValueError(f"no `result` with one list a query: {body[:_MAX_CAUSE_CHARS]!r}")
    if len(lists) != num_queries:
        raise ValueError(f"{len(lists)} lists for {num_queries} queries")
    return [[_passage_of_item(item) for item in items] for items in lists]


def parse_document(document: Mapping[str, Any], score: float | None = None) -> Passage:
    """A corpus document as a passage.

    `contents` is the title on the first line and the text below it. A title keeps the quotes that its corpus writes:
    published checkpoints were trained on them. Without a line break it is a text, or a title where all of it stands
    in quotes. Without `contents`, `title` and `text` are taken as they are.

    >>> parse_document({"id": "7", "contents": '"Oslo"\\nOslo is the capital of Norway.'}).title
    '"Oslo"'

    Raises:
        ValueError: there is neither.
    """
    contents, title, text = (_text(document, key) for key in ("contents", "title", "text"))
    if contents.strip():
        head, newline, body = contents.strip("\r\n").partition("\n")
        head = head.strip()
        if newline or _is_quoted(head):
            title, text = (head if head.strip('"') else title), body.strip()
        else:
            text = head
    elif not title.strip() and not text.strip():
        raise ValueError(
            f"a document with neither contents nor title and text: {str(dict(document))[:_MAX_CAUSE_CHARS]}"
        )
    passage_id = document.get("id")
    return Passage(title.strip(), text.strip(), "" if passage_id is None else str(passage_id), score)


def _passage_of_item(item: object) -> Passage:
    if isinstance(item, dict):
        document, score = item.get("document", item), item.get("score")
        if isinstance(document, dict):
            return parse_document(document, float(score) if isinstance(score, int | float) else None)
    raise ValueError(f"no document: {str(item)[:_MAX_CAUSE_CHARS]!r}")


def _text(document: Mapping[str, Any], key: str) -> str:
    value = document.get(key)
    return value if isinstance(value, str) else ""


def _is_quoted(text: str) -> bool:
    return len(text) >= 2 and text[0] == text[-1] == '"'


def encode_request(queries: Sequence[str], top_k: int) -> bytes:
    fields = {"queries": list(queries), "topk": top_k, "return_scores": True}
    return json.dumps(fields, ensure_ascii=False).encode("utf-8", errors="replace")


class Turns:
    """Which URL each attempt of one request goes to, and the pause before it.

    They take turns, but one that asked to be left alone longer than others waits. Pauses grow exponentially with full
    jitter once all were tried, and last no less than the next URL asked for, of which earlier pauses count.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.url = urls[0]
        self._asked_s = dict.fromkeys(urls, 0.0)  # the longest not tried first

    def __call__(self, state: RetryCallState) -> float:
        """Seconds until the next attempt, for which `url` is set."""
        error = state.outcome.exception() if state.outcome is not None else None
        del self._asked_s[self.url]
        self._asked_s[self.url] = min(error.retry_after_s, MAX_PAUSE_S) if isinstance(error, _TransientError) else 0.0
        self.url = min(self._asked_s, key=self._asked_s.__getitem__)
        more = state.attempt_number - len(self._asked_s)
        longest_s = min(_MAX_BACKOFF_S, _BACKOFF_S * 2.0**more) if more >= 0 else 0.0
        pause_s = max(random.uniform(0, longest_s), self._asked_s[self.url])
        self._asked_s = {url: max(0.0, asked_s - pause_s) for url, asked_s in self._asked_s.items()}
        return pause_s


def timeout(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=min(timeout_s, 5.0))


def _retry_after_s(header: str | None) -> float:
    """Seconds of a Retry-After header; its date form counts as not given."""
    return float(header) if header is not None and header.strip().isdecimal() else 0.0


def _loopback_hint(url: str) -> str:
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.startswith("127.") or host == "::1":
        return f" ({host} is this machine itself, {socket.gethostname()}; a server elsewhere needs its own address)"
    return ""


def _new_stats() -> dict[str, Any]:
    return {"requests": 0, "queries": 0, "retries": 0, "failures": 0, "seconds": []}
