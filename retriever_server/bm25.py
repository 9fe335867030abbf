"""BM25 as Lucene scores it, over an index in bm25s's format. Pure Python packages, no Java.

score(q, d) = sum over query terms t of  idf(t) * tf / (tf + k1 * (1 - b + b * |d| / avgdl)),
idf(t) = ln(1 + (N - df + 0.5) / (df + 0.5)); k1=0.9, b=0.4 as in Anserini (Robertson and Zaragoza 2009); |d| as Lucene
stores it, exact to 40 terms and coarser beyond.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
from numpy.typing import NDArray

from retriever_server import bm25_build
from retriever_server.analysis import ANALYZER, EnglishAnalyzer
from retriever_server.building import OFFSETS, read_manifest
from retriever_server.corpus import Corpus
from retriever_server.errors import StartError
from retriever_server.retriever import ScoredPassage

logger = logging.getLogger(__name__)


class BM25Retriever:
    """Finds the passages that share terms with a query; a passage that shares none is never returned.

    bm25s keeps the score of every (term, passage) pair ready. Its own search touches every passage of the corpus for
    every query; this one touches only the postings of the query's terms, and breaks ties by row.
    """

    def __init__(self, corpus: Corpus, index: bm25s.BM25) -> None:
        self.corpus = corpus
        self._index = index
        self._terms: dict[str, int] = index.vocab_dict
        self._weights: NDArray[np.float32] = index.scores["data"]
        self._rows: NDArray[np.int32] = index.scores["indices"]
        self._starts: NDArray[np.int64] = np.asarray(index.scores["indptr"])
        self._analyze = EnglishAnalyzer()
        self._thread = threading.local()

    @classmethod
    def build(cls, corpus: Corpus, *, k1: float = 0.9, b: float = 0.4) -> BM25Retriever:
        """Index a small corpus without leaving files behind."""
        with tempfile.TemporaryDirectory(prefix="bm25-") as folder:
            bm25_build.build(corpus, Path(folder, "index"), k1=k1, b=b)
            return cls(corpus, bm25s.BM25.load(Path(folder, "index"), mmap=True, backend="numpy"))

    @classmethod
    def load(cls, folder: Path, corpus_path: Path) -> BM25Retriever:
        """Open a saved index memory-mapped.

        Raises:
            StartError: it was built for another corpus or by another analyzer, or it is damaged.
        """
        manifest = read_manifest(folder, "bm25")
        if manifest.get("analyzer") != ANALYZER:
            raise _refusal(
                folder, f"was built by the analyzer {manifest.get('analyzer')!r}, this server has {ANALYZER!r}"
            )
        try:
            offsets = np.load(folder / OFFSETS, mmap_mode="r")
            index = bm25s.BM25.load(folder, mmap=True, backend="numpy")
            sizes = len(index.scores["data"]), len(index.scores["indices"]), int(index.scores["indptr"][-1])
            whole = {*sizes, manifest["num_postings"]} == {sizes[0]} and len(offsets) == manifest["rows"] + 1
        except (OSError, ValueError, EOFError, KeyError) as error:
            raise _refusal(folder, f"is damaged ({error})") from None
        if not whole:
            raise _refusal(folder, "is damaged: its files and its manifest disagree about their sizes")
        corpus = Corpus.reopen(corpus_path, offsets, complete=manifest.get("complete") is True)
        if corpus.fingerprint != manifest.get("corpus"):
            raise _refusal(folder, f"was built for another corpus than {corpus_path}")
        return cls(corpus, index)

    def describe(self) -> dict[str, Any]:
        k1, b = self._index.k1, self._index.b
        return {
            "retriever": "bm25",
            "fingerprint": f"bm25:{k1}:{b}:{ANALYZER}:{self.corpus.fingerprint}",
            "corpus": self.corpus.fingerprint,
            "rows": len(self.corpus),
            "k1": k1,
            "b": b,
            "analyzer": ANALYZER,
            "num_terms": len(self._terms),
            "num_postings": len(self._weights),
        }

    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        return [
            [ScoredPassage(self.corpus.document(row), score) for row, score in self.rank(query, top_k)]
            for query in queries
        ]

    def rank(self, query: str, top_k: int) -> list[tuple[int, float]]:
        """(row, score) of the best passages, ties by row. Linear in the postings of the query's terms."""
        terms = Counter(self._terms[term] for term in self._analyze(query) if term in self._terms)
        if not terms:
            return []
        sums = self._sums()
        postings = [self._rows[self._starts[term] : self._starts[term + 1]] for term in terms]
        for (term, count), rows in zip(terms.items(), postings, strict=True):
            sums[rows] += count * self._weights[self._starts[term] : self._starts[term + 1]]
        scores = []
        for rows in postings:
            scores.append(sums[rows])
            sums[rows] = 0  # leaves the buffer clean, and a row of two terms counts once: it reads 0 the second time
        return _best(np.concatenate(postings), np.concatenate(scores), top_k)

    def _sums(self) -> NDArray[np.float32]:
        """(rows,) zeros, kept between queries: clearing what was touched is cheaper than a new array."""
        if not hasattr(self._thread, "sums"):
            self._thread.sums = np.zeros(len(self.corpus), dtype=np.float32)
        sums: NDArray[np.float32] = self._thread.sums
        return sums


def _best(rows: NDArray[np.int32], scores: NDArray[np.float32], top_k: int) -> list[tuple[int, float]]:
    found = scores > 0
    if top_k < len(scores):
        found &= scores >= np.partition(scores, -top_k)[-top_k]
    rows, scores = rows[found], scores[found]
    order = np.lexsort((rows, -scores))[:top_k]
    return list(zip(rows[order].tolist(), scores[order].tolist(), strict=True))


def _refusal(folder: Path, why: str) -> StartError:
    return StartError(f"the index {folder} {why}: delete the folder and build it again")


def open_or_build(
    corpus_path: Path, folder: Path | None, *, k1: float | None = None, b: float | None = None
) -> BM25Retriever:
    """The retriever over a corpus: from the saved index in `folder`, or built (and saved there, if one is named).

    Raises:
        StartError: as `Corpus.open` and `BM25Retriever.load`; `k1` or `b` differ from the saved index's.
    """
    if folder is None or not folder.exists():
        logger.info("building a bm25 index of %s", corpus_path)
        corpus, k1, b = Corpus.open(corpus_path), 0.9 if k1 is None else k1, 0.4 if b is None else b
        if folder is None:
            return BM25Retriever.build(corpus, k1=k1, b=b)
        bm25_build.build(corpus, folder, k1=k1, b=b)
    manifest = read_manifest(folder, "bm25")
    for name, asked in (("k1", k1), ("b", b)):
        if asked is not None and asked != manifest.get(name):
            raise _refusal(folder, f"was built with {name}={manifest.get(name)}, not {asked}")
    return BM25Retriever.load(folder, corpus_path)
