"""Reordering of given candidates: each query against its own documents, never against another query's."""

from __future__ import annotations

import orjson

from retriever_server.corpus import contents_of
from retriever_server.retriever import Reranker, ScoredPassage
from retriever_server.schemas import RerankRequest


def rerank(reranker: Reranker, request: RerankRequest) -> list[list[ScoredPassage]]:
    """Best documents first, one list a query; ties keep the order they came in."""
    results = []
    for query, documents in zip(request.queries, request.documents, strict=True):
        scores = reranker.score(query, [contents_of(document) for document in documents]) if documents else []
        passages = [
            ScoredPassage(orjson.dumps(document), score) for document, score in zip(documents, scores, strict=True)
        ]
        passages.sort(key=lambda passage: -passage.score)
        results.append(passages[: request.top_k])
    return results
