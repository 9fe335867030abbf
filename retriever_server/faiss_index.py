"""Search in a FAISS index, opened memory-mapped: Flat, HNSW, IVF, PQ, RaBitQ, Refine; any inner-product index."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from retriever_server.errors import StartError

_BLAS_FROM_QUERIES = 20
"""From how many queries on Flat and the coarse quantizers multiply matrices. FAISS's own threshold is ten times as high
and makes batches of 16 to 128 queries 4 to 9 times slower."""
_RESCORE_BYTES = 256 << 20
_ROUNDING = 1e-5
"""Of the lengths' product: hits closer than this may come from FAISS in another order, or not at all."""
_MOST_TIES = 10_000
"""Beyond as many equal hits of one query, which of them come is left to FAISS."""


class FaissIndex:
    """Takes a few more hits than asked for from FAISS, and more while the last are as good as those asked for; scores
    them again one by one and sorts. What FAISS computes differs in the last bits with the batch, this does not.

    Args:
        parameters: FAISS's own names, e.g. "nprobe=64", "efSearch=128", "k_factor_rf=4".
        gpus: device numbers; the index is copied there in shards (needs faiss-gpu) and used by one search at a time.
    """

    def __init__(self, path: Path, *, parameters: str = "", gpus: Sequence[int] = ()) -> None:
        faiss.cvar.distance_compute_blas_threshold = _BLAS_FROM_QUERIES
        try:
            self._index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise StartError(f"the FAISS index {path} is missing or damaged: {_cause(error)}") from None
        if self._index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise StartError(f"the FAISS index {path} measures distances; this server needs inner products")
        if parameters:
            try:
                space: Any = faiss.ParameterSpace()
                space.set_index_parameters(self._index, parameters)
            except RuntimeError as error:
                raise StartError(f"the FAISS index {path} takes no {parameters!r}: {_cause(error)}") from None
        self._parameters = parameters
        self._rescores = self._scores_are_products()
        self._lock: Any = nullcontext()
        if gpus:
            self._lock = threading.Lock()
            self._index = _on_gpus(self._index, gpus)
            self._rescores = False

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def dim(self) -> int:
        return int(self._index.d)

    def describe(self) -> dict[str, Any]:
        return {
            "index": type(self._index).__name__,
            "rows": len(self),
            "dim": self.dim,
            "parameters": self._parameters,
            "rescored": self._rescores,
        }

    def search(self, queries: NDArray[np.float32], top_k: int) -> list[list[tuple[int, float]]]:
        """(row, score) of the best passages, best first, equal ones by row; fewer where the index finds fewer.

        Args:
            queries: (n, dim).
        """
        count = min(2 * top_k + 16, len(self))
        group = max(1, _RESCORE_BYTES // (4 * self.dim * max(count, 1))) if self._rescores else len(queries)
        results = []
        for start in range(0, len(queries), max(group, 1)):
            results += self._search(queries[start : start + group], count, top_k)
        return results

    def vectors_of(self, rows: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """(n, dim) vectors as the index remembers them; None where it cannot tell them by row."""
        try:
            found: NDArray[np.float32] = np.stack([self._index.reconstruct(row) for row in rows.tolist()])
        except RuntimeError:
            return None
        return found

    def _search(self, queries: NDArray[np.float32], count: int, top_k: int) -> list[list[tuple[int, float]]]:
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        with self._lock:
            if self._rescores:
                scores, rows, vectors = self._index.search_and_reconstruct(queries, count)
                products = np.einsum("nd,nkd->nk", queries.astype(np.float64), vectors.astype(np.float64))
                scores = products.astype(np.float32)
            else:
                scores, rows = self._index.search(queries, count)
        results = []
        for place, (own_scores, own_rows) in enumerate(zip(scores, rows, strict=True)):
            found = own_rows >= 0  # FAISS fills up with -1 where it found fewer
            own_scores, own_rows = own_scores[found], own_rows[found]
            order = np.lexsort((own_rows, -own_scores))[:top_k]
            if self._rescores and found.all() and count < min(len(self), _MOST_TIES):
                gap = own_scores[order[-1]] - own_scores.min()
                if gap <= _ROUNDING * np.linalg.norm(queries[place]) * np.linalg.norm(vectors[place, -1]):
                    results += self._search(queries[place : place + 1], min(4 * count, len(self)), top_k)
                    continue
            results.append(list(zip(own_rows[order].tolist(), own_scores[order].tolist(), strict=True)))
        return results

    def _scores_are_products(self) -> bool:
        """Whether a hit's score is the product with the vector that the index gives back for it. One-bit codes alone
        have a better estimate than that and keep it."""
        if not len(self):
            return False
        probe = np.random.default_rng(0).standard_normal((1, self.dim)).astype(np.float32)
        try:
            scores, rows, vectors = self._index.search_and_reconstruct(probe, min(8, len(self)))
        except RuntimeError:
            return False
        products = vectors[0] @ probe[0]
        scale = np.abs(vectors[0]) @ np.abs(probe[0])
        return bool((np.abs(products - scores[0]) <= 1e-4 * scale + 1e-6)[rows[0] >= 0].all())


def build(
    blocks: Iterable[NDArray[np.float32]], factory: str, dim: int, sample: NDArray[np.float32], path: Path
) -> None:
    """Train an index on a sample of vectors, add every block and write it.

    Args:
        blocks: (n, dim) arrays, in row order.
    """
    try:
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
        index.train(sample)
    except RuntimeError as error:
        raise StartError(f"FAISS cannot make {factory!r} of {len(sample):,} vectors: {_cause(error)}") from None
    for block in blocks:
        index.add(np.ascontiguousarray(block, dtype=np.float32))
    unfinished = path.with_name(path.name + ".unfinished")
    faiss.write_index(index, str(unfinished))
    unfinished.rename(path)


def _on_gpus(index: Any, gpus: Sequence[int]) -> Any:
    if not hasattr(faiss, "index_cpu_to_gpus_list"):
        raise StartError("FAISS was installed without GPU support: pip install faiss-gpu in place of faiss-cpu")
    options = faiss.GpuMultipleClonerOptions()
    options.shard = True
    options.useFloat16 = True
    return faiss.index_cpu_to_gpus_list(index, co=options, gpus=list(gpus))


def _cause(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[-1].rsplit(": ", 1)[-1][:200]
