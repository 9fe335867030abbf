"""Builds a BM25 index in blocks of passages: never the corpus nor all postings in memory, and no finished block twice.

A block's postings wait on disk; at the end they are weighed and put term by term into memory-mapped arrays in bm25s's
format. Passage lengths go through Lucene's one-byte encoding, so that scores equal Lucene's.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
from array import array
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from retriever_server.analysis import ANALYZER, EnglishAnalyzer
from retriever_server.building import OFFSETS, Progress, begin, finish, new_array_file, write_whole
from retriever_server.corpus import Corpus
from retriever_server.errors import StartError

BLOCK_ROWS = 50_000


def build(
    corpus: Corpus, folder: Path, *, k1: float = 0.9, b: float = 0.4, workers: int | None = None, block_rows: int = 0
) -> None:
    """Write the index of a corpus to `folder`; goes on where an interrupted build of the same corpus stopped.

    Args:
        workers: processes that analyse blocks (default: one a core, none for a single block).
    """
    block_rows = block_rows or BLOCK_ROWS
    settings = {"corpus": corpus.fingerprint, "analyzer": ANALYZER, "k1": k1, "b": b, "block_rows": block_rows}
    partial = begin(folder, settings)
    np.save(partial / OFFSETS, corpus.offsets)
    blocks = partial / "blocks"
    blocks.mkdir(exist_ok=True)
    starts = range(0, len(corpus), block_rows)
    _analyze(corpus, partial, blocks, block_rows, min(workers or os.cpu_count() or 1, len(starts)))
    files = [_block_file(blocks, start) for start in starts]
    facts = _merge(files, partial, len(corpus), k1, b)
    if not facts["num_terms"]:
        shutil.rmtree(partial)
        raise StartError(f"no passage of {corpus.path} holds a word to search for")
    shutil.rmtree(blocks)
    params = {"k1": k1, "b": b, "method": "lucene", "dtype": "float32", "int_dtype": "int32", "backend": "numpy"}
    params.update(num_docs=len(corpus), version=version("bm25s"))
    write_whole(partial / "params.index.json", orjson.dumps(params))
    manifest = {
        "retriever": "bm25",
        "corpus": corpus.fingerprint,
        "rows": len(corpus),
        "complete": corpus.complete,
        "k1": k1,
        "b": b,
        "analyzer": ANALYZER,
        **facts,
        "bm25s": version("bm25s"),
    }
    finish(partial, folder, manifest)


def lucene_lengths(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Lengths as Lucene remembers them (its SmallFloat): below 24 as they are, above it 24 plus the four leading bits
    of the rest, so that they are exact up to 40."""
    rest = np.maximum(lengths - 24, 0)
    shift = np.maximum(np.frexp(rest.astype(np.float64))[1] - 4, 0)
    return np.where(lengths < 24, lengths, 24 + ((rest >> shift) << shift))


def _analyze(corpus: Corpus, partial: Path, blocks: Path, block_rows: int, workers: int) -> None:
    progress = Progress("analysing passages", len(corpus))
    todo: list[tuple[int, int]] = []
    for start in range(0, len(corpus), block_rows):
        stop = min(start + block_rows, len(corpus))
        if _block_file(blocks, start).exists():
            progress.skip(stop - start)
        else:
            todo.append((start, stop))
    if workers == 1 or len(todo) == 1:
        analyze = EnglishAnalyzer()
        for start, stop in todo:
            _write_block(corpus, analyze, start, stop, _block_file(blocks, start))
            progress.advance(stop - start)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        tasks = {
            pool.submit(_work, corpus.path, partial / OFFSETS, start, stop, _block_file(blocks, start)): stop - start
            for start, stop in todo
        }
        for task in as_completed(tasks):
            task.result()
            progress.advance(tasks[task])


def _block_file(blocks: Path, start: int) -> Path:
    return blocks / f"{start:012d}.npz"


_worker: dict[str, Any] = {}
"""In a worker process: the corpus and the analyzer, kept between blocks."""


def _work(corpus: Path, offsets: Path, start: int, stop: int, file: Path) -> None:
    if not _worker:
        _worker["corpus"] = Corpus.reopen(corpus, np.load(offsets, mmap_mode="r"), complete=False)
        _worker["analyze"] = EnglishAnalyzer()
    _write_block(_worker["corpus"], _worker["analyze"], start, stop, file)


def _write_block(corpus: Corpus, analyze: EnglishAnalyzer, start: int, stop: int, file: Path) -> None:
    """One block's postings, sorted by (its own numbering of) term, then row."""
    terms: dict[str, int] = {}
    occurrences, lengths = array("q"), array("q")
    for text in corpus.texts(start, stop):
        found = [terms.setdefault(term, len(terms)) for term in analyze(text)]
        occurrences.extend(found)
        lengths.append(len(found))
    num_rows = stop - start
    rows = np.repeat(np.arange(num_rows), lengths)
    pairs, counts = np.unique(np.array(occurrences, dtype=np.int64) * num_rows + rows, return_counts=True)
    term_of, row_of = np.divmod(pairs, num_rows)
    unfinished = file.with_suffix(".unfinished")
    with unfinished.open("wb") as out:
        np.savez(
            out,
            terms=np.frombuffer("\n".join(terms).encode(), dtype=np.uint8),
            term_of=term_of.astype(np.int32),
            row_of=(row_of + start).astype(np.int32),
            counts=counts.astype(np.int32),
            lengths=np.array(lengths, dtype=np.int64),
        )
    unfinished.rename(file)


def _merge(files: list[Path], partial: Path, num_rows: int, k1: float, b: float) -> dict[str, int]:
    """Second pass: number the terms over all blocks, then put every posting with its weight where its term's are."""
    terms: dict[str, int] = {}
    frequencies = np.zeros(0, dtype=np.int64)
    lengths = []
    for block in _blocks(files):
        numbers = _numbers(block, terms)
        frequencies = np.pad(frequencies, (0, len(terms) - len(frequencies)))
        frequencies[numbers] += np.bincount(block["term_of"], minlength=len(numbers))
        lengths.append(block["lengths"])
    mean_length = sum(int(part.sum()) for part in lengths) / max(num_rows, 1)
    if not terms:
        return {"num_terms": 0, "num_postings": 0}
    quantized = lucene_lengths(np.concatenate(lengths))
    norms = k1 * (1 - b + b * quantized / mean_length)
    idf = np.log1p((num_rows - frequencies + 0.5) / (frequencies + 0.5))
    starts = np.concatenate([[0], np.cumsum(frequencies)])
    shape = (int(starts[-1]),)
    weights = new_array_file(partial / "data.csc.index.npy", np.float32, shape)
    rows = new_array_file(partial / "indices.csc.index.npy", np.int32, shape)
    next_place = starts[:-1].copy()
    progress = Progress("merging postings", shape[0])
    for block in _blocks(files):
        term_of, row_of, counts = block["term_of"], block["row_of"], block["counts"]
        numbers = _numbers(block, terms)
        sizes = np.bincount(term_of, minlength=len(numbers))
        places = next_place[numbers][term_of] + np.arange(len(term_of)) - (np.cumsum(sizes) - sizes)[term_of]
        weights[places] = idf[numbers][term_of] * counts / (counts + norms[row_of])
        rows[places] = row_of
        next_place[numbers] += sizes
        progress.advance(len(term_of))
    weights.flush()
    rows.flush()
    np.save(partial / "indptr.csc.index.npy", starts)
    write_whole(partial / "vocab.index.json", orjson.dumps(terms))
    return {"num_terms": len(terms), "num_postings": shape[0]}


def _blocks(files: list[Path]) -> Iterator[dict[str, NDArray[Any]]]:
    for file in files:
        with np.load(file) as block:
            yield {name: block[name] for name in block.files}


def _numbers(block: dict[str, NDArray[Any]], terms: dict[str, int]) -> NDArray[np.int64]:
    """The number over all blocks of each of a block's terms; new ones are added to `terms`."""
    text = block["terms"].tobytes().decode()
    own = text.split("\n") if text else []
    return np.array([terms.setdefault(term, len(terms)) for term in own], dtype=np.int64)
