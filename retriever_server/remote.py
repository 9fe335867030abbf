"""Retrievers that ask an engine elsewhere: another /retrieve, OpenSearch or Elasticsearch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import orjson

from retriever_server.corpus import with_contents
from retriever_server.errors import RequestError, StartError
from retriever_server.retriever import ScoredPassage
from retriever_server.upstream import Upstream

_MAX_QUERIES_PER_REQUEST = 256


class RemoteRetriever:
    """Another server that speaks POST /retrieve."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/").removesuffix("/retrieve")
        token = os.environ.get("RETRIEVER_TOKEN")
        headers = {"authorization": f"Bearer {token}"} if token else None
        self._upstream = Upstream("the remote retriever", headers=headers)
        try:
            self._info = self._upstream.ask("GET", f"{self._url}/info")
        except ValueError:  # a server of another make: it need not have /info
            self._info = {}
        except RequestError as error:
            raise StartError(f"{url}: {error}") from None

    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        results = []
        for start in range(0, len(queries), _MAX_QUERIES_PER_REQUEST):
            part = list(queries[start : start + _MAX_QUERIES_PER_REQUEST])
            body = {"queries": part, "topk": top_k, "return_scores": True}
            answer = self._upstream.ask("POST", f"{self._url}/retrieve", json=body)
            lists = answer.get("result") if isinstance(answer, dict) else None
            if not isinstance(lists, list) or len(lists) != len(part):
                raise ValueError("the remote retriever did not answer with one list a query")
            results += [[self._passage(item, rank) for rank, item in enumerate(items)] for items in lists]
        return results

    def _passage(self, item: dict[str, Any], rank: int) -> ScoredPassage:
        if "document" in item:
            return ScoredPassage(with_contents(item["document"]), float(item["score"]))
        return ScoredPassage(with_contents(item), 1 / (1 + rank))  # it has no scores: the order is all there is

    def describe(self) -> dict[str, Any]:
        behind = self._info.get("fingerprint", "unknown")
        return {"retriever": "remote", "fingerprint": f"remote:{self._url}:{behind}", "behind": self._info}


class OpenSearchRetriever:
    """BM25 of an OpenSearch or Elasticsearch index, over one text field.

    $SEARCH_ENGINE_AUTHORIZATION, where set, is sent as the Authorization header ("ApiKey …" or "Basic …").
    """

    def __init__(self, url: str, index: str, field: str = "contents") -> None:
        authorization = os.environ.get("SEARCH_ENGINE_AUTHORIZATION")
        self._upstream = Upstream(
            "the search engine", headers={"authorization": authorization} if authorization else {}
        )
        self._url = f"{url.rstrip('/')}/{index}"
        self._index, self._field = index, field
        try:
            self._rows = int(self._upstream.ask("GET", f"{self._url}/_count")["count"])
        except (RequestError, ValueError) as error:
            raise StartError(f"the index {index} cannot be opened: {error}") from None

    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        if not queries:
            return []
        lines: list[dict[str, Any]] = []
        for query in queries:
            lines.append({"preference": "retriever"})  # one copy of each shard, so that answers repeat
            lines.append({"query": {"match": {self._field: {"query": query}}}, "size": top_k})
        body = b"".join(orjson.dumps(line) + b"\n" for line in lines)
        headers = {"content-type": "application/x-ndjson"}
        answer = self._upstream.ask("POST", f"{self._url}/_msearch", content=body, headers=headers)
        responses = answer["responses"]
        for response in responses:
            if response.get("status", 200) in (429, 502, 503):
                raise RequestError(503, "the search engine is overloaded", reason="upstream", retry_after_s=2)
            if "error" in response or response.get("timed_out"):
                raise ValueError(f"the search engine failed on a query: status {response.get('status')}")
            if failed := response.get("_shards", {}).get("failed"):
                what = f"{failed} of the search engine's shards failed"
                raise RequestError(503, what, reason="upstream", retry_after_s=2)
        return [[self._passage(hit) for hit in response["hits"]["hits"]] for response in responses]

    def _passage(self, hit: dict[str, Any]) -> ScoredPassage:
        return ScoredPassage(with_contents({"id": hit["_id"], **hit["_source"]}), float(hit["_score"]))

    def describe(self) -> dict[str, Any]:
        return {
            "retriever": "opensearch",
            "fingerprint": f"opensearch:{self._url}:{self._field}:{self._rows}",
            "rows_at_start": self._rows,
            "index": self._index,
            "field": self._field,
        }
