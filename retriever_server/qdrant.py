"""Dense retrieval from a Qdrant collection, for corpora that outgrow a machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from qdrant_client import QdrantClient, models
from qdrant_client.http.exceptions import ApiException

from retriever_server.building import Progress
from retriever_server.corpus import Corpus, contents_of, has_contents, with_contents
from retriever_server.encoder import Encoder, refuse_other_encoder
from retriever_server.errors import RequestError, StartError
from retriever_server.retriever import ScoredPassage

_SAMPLES = 16


class QdrantRetriever:
    """A Qdrant collection of passage vectors whose payload is the passage. Equal scores come by point id.

    Args:
        client: of a server, or of Qdrant's local mode.
        exact: search every vector in place of the collection's graph.
    """

    def __init__(self, client: QdrantClient, collection: str, encoder: Encoder, *, exact: bool = False) -> None:
        self._client, self._collection, self._encoder, self._exact = client, collection, encoder, exact
        try:
            self._rows = client.count(collection, exact=True).count
            points, _ = client.scroll(collection, limit=_SAMPLES, with_payload=True, with_vectors=True)
        except (ApiException, ValueError, OSError) as error:
            raise StartError(f"the Qdrant collection {collection} cannot be opened: {error}") from None
        _refuse_other_encoder(encoder, points, collection)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        if not queries:
            return []
        params = models.SearchParams(exact=self._exact)
        requests = [
            models.QueryRequest(query=vector.tolist(), limit=top_k, with_payload=True, params=params)
            for vector in self._encoder.encode_queries(queries)
        ]
        try:
            responses = self._client.query_batch_points(self._collection, requests)
        except ApiException as error:
            what = f"Qdrant gave no answer ({type(error).__name__})"
            raise RequestError(503, what, reason="upstream", retry_after_s=2) from None
        return [[self._passage(point) for point in _ordered(response.points)] for response in responses]

    def _passage(self, point: models.ScoredPoint) -> ScoredPassage:
        return ScoredPassage(with_contents({"id": str(point.id), **(point.payload or {})}), point.score)

    def describe(self) -> dict[str, Any]:
        encoder = self._encoder.describe()
        return {
            "retriever": "qdrant",
            "fingerprint": f"qdrant:{self._collection}:{self._rows}:{self._exact}:{encoder['fingerprint']}",
            "rows_at_start": self._rows,
            "collection": self._collection,
            "exact": self._exact,
            "encoder": encoder,
        }


def upload(client: QdrantClient, collection: str, corpus: Corpus, encoder: Encoder, batch: int = 256) -> None:
    """Encode a corpus into a collection (made where it is missing); goes on after the rows that are there already.

    Raises:
        StartError: those rows are of another corpus or encoder.
    """
    try:
        exists = client.collection_exists(collection)
    except (ApiException, OSError) as error:
        raise StartError(f"Qdrant gives no answer: {error}") from None
    if not exists:
        size = models.VectorParams(size=encoder.dim, distance=models.Distance.DOT)
        client.create_collection(collection, size)
    done = client.count(collection, exact=True).count
    _refuse_other_corpus(client, collection, corpus, encoder, done)
    progress = Progress("uploading passages", len(corpus))
    progress.skip(done)
    for start in range(done, len(corpus), batch):
        rows = range(start, min(start + batch, len(corpus)))
        vectors = encoder.encode_passages(list(corpus.texts(rows.start, rows.stop)))
        points = [
            models.PointStruct(id=row, vector=vector.tolist(), payload=orjson.loads(corpus.document(row)))
            for row, vector in zip(rows, vectors, strict=True)
        ]
        client.upsert(collection, points, wait=True)
        progress.advance(len(rows))


def _refuse_other_corpus(client: QdrantClient, collection: str, corpus: Corpus, encoder: Encoder, done: int) -> None:
    rows = sorted({done * sample // _SAMPLES for sample in range(_SAMPLES)} | {done - 1}) if done else []
    points = client.retrieve(collection, rows, with_payload=True, with_vectors=True)
    found = {point.id: (point.payload or {}) for point in points}
    for row in rows:
        known = found.get(row, {})
        same_text = row < len(corpus) and contents_of(known) == next(corpus.texts(row, row + 1))
        if not same_text or str(known.get("id")) != corpus.id_of(row):
            raise StartError(
                f"point {row} of the Qdrant collection {collection} is not row {row} of {corpus.path}: it was uploaded "
                "from another corpus; name another --collection"
            )
    _refuse_other_encoder(encoder, points, collection)


def _refuse_other_encoder(encoder: Encoder, points: Sequence[models.Record], collection: str) -> None:
    """Points of others, with several vectors or without `contents`, are taken on trust."""
    known = [(point.payload, point.vector) for point in points if point.payload and has_contents(point.payload)]
    texts = [contents_of(payload) for payload, vector in known if isinstance(vector, list)]
    stored = np.array([vector for _, vector in known if isinstance(vector, list)], dtype=np.float32)
    if texts:
        refuse_other_encoder(encoder, texts, stored, f"the Qdrant collection {collection} holds")


def _ordered(points: Sequence[models.ScoredPoint]) -> list[models.ScoredPoint]:
    return sorted(points, key=lambda point: (-point.score, str(point.id).rjust(40)))


def connect(url: str, api_key: str | None = None) -> QdrantClient:
    """A client of the server at a URL, or of Qdrant's local mode in a folder."""
    if url.startswith(("http://", "https://")):
        return QdrantClient(url=url, api_key=api_key, timeout=30)
    try:
        return QdrantClient(path=url)
    except (RuntimeError, OSError) as error:
        raise StartError(f"the Qdrant folder {url} cannot be opened: {error}") from None
