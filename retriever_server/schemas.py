"""The wire format: what clients may send, and how answers are put together from ready-made bytes.

Written by hand because a request is on the hot path: a 256-query answer costs 0.1 ms here, 9 ms through a general
JSON encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from retriever_server.errors import RequestError
from retriever_server.retriever import ScoredPassage

_TOP_K_NAMES = ("topk", "top_k", "k", "top_n")
_RETURN_SCORES_NAMES = ("return_scores", "return_score")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for. Beyond it the answer is 413 (bytes) or 422 (everything else)."""

    default_top_k: int = 3
    max_top_k: int = 1000
    corpus_size: int | None = None
    """Passages that exist: a larger top-k is cut to it before the limits apply. None: not known."""
    max_body_bytes: int = 8 << 20
    max_queries: int = 10_000
    max_query_chars: int = 32_768
    max_passages: int = 200_000
    """Queries times top-k."""


@dataclass(frozen=True, slots=True)
class SearchRequest:
    queries: list[str]
    top_k: int
    return_scores: bool
    timeout_s: float | None
    """The client's own deadline, None when it named none."""


@dataclass(frozen=True, slots=True)
class RerankRequest:
    queries: list[str]
    documents: list[list[dict[str, Any]]]
    """One list of candidates a query."""
    top_k: int | None
    return_scores: bool
    timeout_s: float | None


def parse_retrieve(body: bytes, limits: Limits) -> SearchRequest:
    """`POST /retrieve`: `queries` is a list; `query` (one string) counts as a list of one."""
    fields = _object(body)
    queries = fields.get("queries")
    if queries is None:
        queries = fields.get("query")
        queries = [queries] if isinstance(queries, str) else queries
    return _search_request(fields, _strings(queries, "queries", limits), limits)


def parse_search(body: bytes, limits: Limits) -> SearchRequest:
    """`POST /search`: one query, which may not be empty."""
    fields = _object(body)
    query = fields.get("query")
    if not isinstance(query, str):
        raise _invalid("query must be a string")
    return _search_request(fields, _not_blank(_strings([query], "query", limits)), limits)


def parse_batch_search(body: bytes, limits: Limits) -> SearchRequest:
    """`POST /batch_search`: `query` is a list of strings, none of them empty."""
    fields = _object(body)
    return _search_request(fields, _not_blank(_strings(fields.get("query"), "query", limits)), limits)


def parse_rerank(body: bytes, limits: Limits) -> RerankRequest:
    """`POST /rerank`: `documents` holds one list of documents (objects or plain texts) a query."""
    fields = _object(body)
    queries = _strings(fields.get("queries"), "queries", limits)
    lists = fields.get("documents")
    if not isinstance(lists, list) or len(lists) != len(queries):
        raise _invalid("documents must be a list with one list of documents a query")
    if not all(isinstance(candidates, list) for candidates in lists):
        raise _invalid("documents must hold lists")
    if sum(map(len, lists)) > limits.max_passages:
        raise _invalid(f"more than {limits.max_passages:,} documents in one request")
    documents = [[_candidate(document) for document in candidates] for candidates in lists]
    top_k = _top_k(fields, ("rerank_topk", *_TOP_K_NAMES), limits, default=None)
    return RerankRequest(queries, documents, top_k, _return_scores(fields), _timeout_s(fields))


def render_retrieve(results: Sequence[Sequence[ScoredPassage]], return_scores: bool) -> bytes:
    """`{"result": [[…], …]}`, items with `document` and `score`, or the bare documents."""
    if not return_scores:
        return b'{"result":' + render_batch_search(results, False) + b"}"
    scores = _scores([passage for found in results for passage in found])[1:-1].split(b",")
    parts = [b'},{"document":', b"", b',"score":', b""] * sum(map(len, results))
    parts[1::4] = [document for found in results for document, _ in found]
    parts[3::4] = scores if parts else []
    place, before = 0, b'{"result":['
    for found in results:
        if found:
            parts[place] = before + b'[{"document":'
            place, before = place + 4 * len(found), b"}],"
        else:
            before += b"[],"
    return b"".join([*parts, before.removesuffix(b","), b"]}"])


def render_search(results: Sequence[Sequence[ScoredPassage]], return_scores: bool) -> bytes:
    """`[…documents]`, or with scores `[[…documents], […scores]]`."""
    (passages,) = results
    return b"[" + _bare(passages) + b"," + _scores(passages) + b"]" if return_scores else _bare(passages)


def render_batch_search(results: Sequence[Sequence[ScoredPassage]], return_scores: bool) -> bytes:
    """`[[…documents], …]`, or with scores `[[[…documents], …], [[…scores], …]]`."""
    documents = b"[" + b",".join([_bare(passages) for passages in results]) + b"]"
    if not return_scores:
        return documents
    return b"[" + documents + b",[" + b",".join([_scores(passages) for passages in results]) + b"]]"


def _bare(passages: Sequence[ScoredPassage]) -> bytes:
    return b"[" + b",".join([passage.document for passage in passages]) + b"]"


def _scores(passages: Sequence[ScoredPassage]) -> bytes:
    return orjson.dumps([passage.score for passage in passages])


def _object(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, f"the body is not JSON: {error.msg}", reason="malformed") from None
    if not isinstance(fields, dict):
        raise _invalid("the body must be a JSON object")
    return fields


def _search_request(fields: dict[str, Any], queries: list[str], limits: Limits) -> SearchRequest:
    top_k = _top_k(fields, _TOP_K_NAMES, limits, limits.default_top_k, limits.corpus_size)
    assert top_k is not None
    if len(queries) * top_k > limits.max_passages:
        raise _invalid(f"{len(queries)} queries times topk {top_k} is above {limits.max_passages:,} passages")
    return SearchRequest(queries, top_k, _return_scores(fields), _timeout_s(fields))


def _strings(value: object, name: str, limits: Limits) -> list[str]:
    if not isinstance(value, list) or not set(map(type, value)) <= {str}:
        raise _invalid(f"{name} must be a list of strings")
    if len(value) > limits.max_queries:
        raise _invalid(f"{len(value):,} queries; one request may hold {limits.max_queries:,}")
    longest = max(map(len, value), default=0)
    if longest > limits.max_query_chars:
        position = [len(query) for query in value].index(longest)
        raise _invalid(f"query {position} has {longest:,} characters; the limit is {limits.max_query_chars:,}")
    return value


def _not_blank(queries: list[str]) -> list[str]:
    if not all(map(str.strip, queries)):
        raise RequestError(400, "a query is empty", reason="invalid")
    return queries


def _top_k(
    fields: dict[str, Any], names: Sequence[str], limits: Limits, default: int | None, at_most: int | None = None
) -> int | None:
    top_k = next((fields[name] for name in names if fields.get(name) is not None), default)
    if top_k is None:
        return None
    if at_most is not None and type(top_k) is int:
        top_k = min(top_k, max(at_most, 1))
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= limits.max_top_k:
        raise _invalid(f"topk must be an integer from 1 to {limits.max_top_k:,}")
    return top_k


def _return_scores(fields: dict[str, Any]) -> bool:
    value = next((fields[name] for name in _RETURN_SCORES_NAMES if fields.get(name) is not None), False)
    if not isinstance(value, bool):
        raise _invalid("return_scores must be true or false")
    return value


def _timeout_s(fields: dict[str, Any]) -> float | None:
    milliseconds = fields.get("timeout_ms")
    if milliseconds is None:
        return None
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, int | float) or milliseconds <= 0:
        raise _invalid("timeout_ms must be a number above 0")
    return milliseconds / 1000


def _candidate(document: object) -> dict[str, Any]:
    if isinstance(document, str):
        return {"contents": document}
    inner = document.get("document", document) if isinstance(document, dict) else None
    if not isinstance(inner, dict):
        raise _invalid("a document must be an object or a string")
    return inner


def _invalid(message: str) -> RequestError:
    return RequestError(422, message, reason="invalid")
