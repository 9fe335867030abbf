"""Dense retrieval: an encoder, and an index of passage vectors in corpus order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from retriever_server.building import corpus_of_index, read_manifest
from retriever_server.corpus import Corpus
from retriever_server.encoder import PROFILES, Encoder, Profile
from retriever_server.errors import StartError
from retriever_server.faiss_index import FaissIndex
from retriever_server.retriever import ScoredPassage
from retriever_server.torch_index import TorchIndex
from retriever_server.vectors import Vectors

FAISS_FILE = "index.faiss"


class VectorIndex(Protocol):
    def __len__(self) -> int: ...

    def search(self, queries: NDArray[np.float32], top_k: int) -> list[list[tuple[int, float]]]:
        """(row, inner product) of the best passages of each of the (n, dim) queries, best first, equal ones by row."""
        ...

    def describe(self) -> dict[str, Any]: ...


class DenseRetriever:
    """Passages by the inner product of their vectors with the query's.

    Args:
        facts: of the index's manifest; they become part of the fingerprint.
    """

    stages = ("encode", "search")

    def __init__(self, corpus: Corpus, encoder: Encoder, index: VectorIndex, facts: Mapping[str, Any]) -> None:
        self.corpus = corpus
        self.encoder = encoder
        self.index = index
        self._facts = dict(facts)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        return self.complete(queries, self.prepare(queries, top_k), top_k)

    def prepare(self, queries: Sequence[str], top_k: int) -> NDArray[np.float32]:
        """(n, dim) vectors of the queries."""
        return self.encoder.encode_queries(queries)

    def complete(self, queries: Sequence[str], prepared: NDArray[np.float32], top_k: int) -> list[list[ScoredPassage]]:
        found = self.index.search(prepared, top_k)
        return [[ScoredPassage(self.corpus.document(row), score) for row, score in hits] for hits in found]

    def describe(self) -> dict[str, Any]:
        index = self.index.describe()
        encoder = self.encoder.describe()
        names = (self.corpus.fingerprint, encoder["fingerprint"], index["index"], index.get("parameters", ""))
        return {
            "retriever": "dense",
            "fingerprint": ":".join(["dense", *map(str, names), str(self._facts.get("created", ""))]),
            "corpus": self.corpus.fingerprint,
            "encoder": encoder,
            **index,
        }


def load(
    folder: Path,
    corpus_path: Path,
    encoder: str,
    *,
    backend: str = "auto",
    devices: Sequence[str] = ("cpu",),
    parameters: str = "",
    faiss_gpus: Sequence[int] = (),
) -> DenseRetriever:
    """Open an index that `build_index` made or imported.

    Args:
        encoder: the model that encoded the passages, as a folder or hub name; it is compared with the manifest.
        backend: faiss, torch (exact), or auto: FAISS where the folder names a FAISS index.

    Raises:
        StartError: the corpus or the encoder is another one, or the index is damaged.
    """
    manifest = read_manifest(folder, "dense")
    corpus = corpus_of_index(folder, manifest, corpus_path)
    index = open_index(folder, manifest, backend=backend, devices=devices, parameters=parameters, gpus=faiss_gpus)
    if len(index) != len(corpus):
        raise StartError(f"the index {folder} is damaged: {len(index):,} vectors for {len(corpus):,} passages")
    profile = Profile(**{name: manifest["encoder"][name] for name in Profile.__dataclass_fields__})
    loaded = Encoder(encoder, profile, devices[0])
    if (loaded.dim, loaded.fingerprint) != (manifest["encoder"]["dim"], manifest["encoder"]["fingerprint"]):
        raise StartError(
            f"the index {folder} was built by the encoder {manifest['encoder']['name']} "
            f"({manifest['encoder']['dim']} dimensions), not by {encoder} ({loaded.dim})"
        )
    return DenseRetriever(corpus, loaded, index, manifest)


def open_index(
    folder: Path,
    manifest: Mapping[str, Any],
    *,
    backend: str = "auto",
    devices: Sequence[str] = ("cpu",),
    parameters: str = "",
    gpus: Sequence[int] = (),
) -> VectorIndex:
    faiss_file, vectors = manifest.get("faiss"), manifest.get("vectors")
    if backend == "auto":
        backend = "faiss" if faiss_file else "torch"
    if backend == "faiss":
        if not faiss_file:
            raise StartError(f"the index {folder} has no FAISS file: build it with --factory")
        return FaissIndex(folder / faiss_file, parameters=parameters, gpus=gpus)
    if not vectors:
        raise StartError(f"the index {folder} has no vectors of its own, only a FAISS file: use --backend faiss")
    if parameters:
        raise StartError(f"--faiss-parameters {parameters!r} has no effect on exact search")
    return TorchIndex(Vectors.described(folder, vectors), devices, max_norm=vectors.get("max_norm"))


def profile_named(name: str, passage_tokens: int | None = None) -> Profile:
    profile = PROFILES[name]
    return profile if passage_tokens is None else replace(profile, max_passage_tokens=passage_tokens)
