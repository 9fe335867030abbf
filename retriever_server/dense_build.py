"""Builds an index of passage vectors in shards, goes on after an interruption, and takes in what others have built."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retriever_server import faiss_index
from retriever_server.building import OFFSETS, Progress, begin, finish, new_array_file
from retriever_server.corpus import Corpus
from retriever_server.dense import FAISS_FILE
from retriever_server.encoder import Encoder, refuse_other_encoder
from retriever_server.errors import StartError
from retriever_server.vectors import Vectors

logger = logging.getLogger(__name__)

SHARD_ROWS = 50_000
_SLICE = 2_048
_TRAIN_ROWS = 500_000
_SAMPLES = 32


def build(
    corpus: Corpus, folder: Path, encoder: Encoder, *, factory: str | None = None, shard_rows: int = SHARD_ROWS
) -> None:
    """Encode every passage into float16 shards; with `factory`, put them into a FAISS index as well.

    Args:
        factory: FAISS's factory string, e.g. "HNSW32" or "IVF65536_HNSW32,RaBitQ,Refine(SQ8)"; None for exact search.
    """
    settings = {"corpus": corpus.fingerprint, "encoder": encoder.describe(), "shard_rows": shard_rows}
    partial = begin(folder, settings)
    shards = [partial / f"vectors-{start:012d}.npy" for start in range(0, len(corpus), shard_rows)]
    progress = Progress("encoding passages", len(corpus))
    for number, path in enumerate(shards):
        start, stop = number * shard_rows, min((number + 1) * shard_rows, len(corpus))
        if path.exists():
            progress.skip(stop - start)
            continue
        _write(path, (stop - start, encoder.dim), _encoded(corpus, encoder, start, stop, progress))
    _finish(corpus, folder, partial, encoder, Vectors.of_arrays(shards), factory)


def import_vectors(
    corpus: Corpus, folder: Path, encoder: Encoder, sources: Sequence[Path], *, convert: bool = False
) -> None:
    """Make an index folder of what exists: a FAISS index (Flat ones also in their published parts) or raw memmaps.

    The files stay where they are and are read in place.

    Args:
        convert: copy Flat or memmapped vectors into float16 shards inside the folder, half the size of float32.

    Raises:
        StartError: the files do not fit the corpus, or this encoder and profile give other vectors for its passages.
    """
    partial = begin(folder, {"corpus": corpus.fingerprint, "sources": [str(source.resolve()) for source in sources]})
    vectors = _vectors_of(sources, encoder.dim, len(corpus))
    if vectors is None:
        if len(sources) != 1:
            raise StartError("only a Flat index comes in parts: join the others first")
        index = faiss_index.FaissIndex(sources[0])
        _refuse_other_size(sources, len(index), index.dim, corpus, encoder)
        _refuse_other_encoder(corpus, encoder, index.vectors_of)
        _finish(corpus, folder, partial, encoder, None, None, faiss_file=sources[0].resolve())
        return
    _refuse_other_size(sources, len(vectors), vectors.dim, corpus, encoder)
    _refuse_other_encoder(corpus, encoder, vectors.take)
    if convert:
        progress = Progress("converting vectors", len(vectors))
        shards = []
        for start in range(0, len(vectors), SHARD_ROWS):
            stop = min(start + SHARD_ROWS, len(vectors))
            shards.append(partial / f"vectors-{start:012d}.npy")
            if shards[-1].exists():
                progress.skip(stop - start)
                continue
            _write(shards[-1], (stop - start, vectors.dim), iter([vectors.read(start, stop)]))
            progress.advance(stop - start)
        vectors = Vectors.of_arrays(shards)
    _finish(corpus, folder, partial, encoder, vectors, None)


def _encoded(
    corpus: Corpus, encoder: Encoder, start: int, stop: int, progress: Progress
) -> Iterator[NDArray[np.float32]]:
    for begin_row in range(start, stop, _SLICE):
        end_row = min(begin_row + _SLICE, stop)
        yield encoder.encode_passages(list(corpus.texts(begin_row, end_row)))
        progress.advance(end_row - begin_row)


def _write(path: Path, shape: tuple[int, int], blocks: Iterator[NDArray[Any]]) -> None:
    unfinished = path.with_suffix(".unfinished")
    shard = new_array_file(unfinished, np.float16, shape)
    place = 0
    for block in blocks:
        shard[place : place + len(block)] = block
        place += len(block)
    shard.flush()
    unfinished.rename(path)


def _vectors_of(sources: Sequence[Path], dim: int, rows: int) -> Vectors | None:
    for source in sources:
        if not source.is_file():
            raise StartError(f"{source} does not exist")
    if all(source.suffix == ".npy" for source in sources):
        return Vectors.of_arrays(sources)
    if all(source.suffix == ".memmap" for source in sources):
        return Vectors.of_memmaps(sources, dim, rows)
    return Vectors.of_flat_index(sources)


def _refuse_other_size(sources: Sequence[Path], rows: int, dim: int, corpus: Corpus, encoder: Encoder) -> None:
    name = sources[0].name
    if rows != len(corpus):
        raise StartError(f"{name} holds {rows:,} vectors and {corpus.path} {len(corpus):,} passages")
    if dim != encoder.dim:
        raise StartError(f"{name} holds vectors of {dim} numbers and the encoder {encoder.name} makes {encoder.dim}")


def _refuse_other_encoder(corpus: Corpus, encoder: Encoder, vectors_of: Any) -> None:
    rows = np.unique(np.linspace(0, len(corpus) - 1, _SAMPLES, dtype=np.int64))
    stored = vectors_of(rows)
    if stored is None:
        logger.warning("this FAISS index does not tell its vectors: the encoder is taken on trust")
        return
    texts = [text for row in rows.tolist() for text in corpus.texts(row, row + 1)]
    refuse_other_encoder(encoder, texts, stored, "the files hold")


def _finish(
    corpus: Corpus,
    folder: Path,
    partial: Path,
    encoder: Encoder,
    vectors: Vectors | None,
    factory: str | None,
    faiss_file: Path | None = None,
) -> None:
    if vectors is not None and factory is not None:
        every = max(1, len(vectors) // _TRAIN_ROWS)
        sample = np.concatenate([block[::every] for block in _blocks(vectors, None)])
        progress = Progress(f"adding to {factory}", len(vectors))
        faiss_index.build(_blocks(vectors, progress), factory, vectors.dim, sample, partial / FAISS_FILE)
        faiss_file = Path(FAISS_FILE)
    np.save(partial / OFFSETS, corpus.offsets)
    manifest: dict[str, Any] = {
        "retriever": "dense",
        "corpus": corpus.fingerprint,
        "rows": len(corpus),
        "complete": corpus.complete,
        "encoder": encoder.describe(),
        "factory": factory,
        "faiss": None if faiss_file is None else str(faiss_file),
        "vectors": None,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if vectors is not None:
        manifest["vectors"] = {**vectors.describe(partial), "max_norm": vectors.max_norm()}
    finish(partial, folder, manifest)


def _blocks(vectors: Vectors, progress: Progress | None) -> Iterator[NDArray[np.float32]]:
    for start in range(0, len(vectors), SHARD_ROWS):
        stop = min(start + SHARD_ROWS, len(vectors))
        yield vectors.read(start, stop).astype(np.float32)
        if progress is not None:
            progress.advance(stop - start)
