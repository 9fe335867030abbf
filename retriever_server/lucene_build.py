"""Builds a Lucene index by Anserini's own indexer, from a corpus cut into one file a thread (it gives a file to a
thread, so that a single file keeps one busy); and takes in a Lucene folder that others have built."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from retriever_server.building import MANIFEST, OFFSETS, Progress, begin, write_whole
from retriever_server.corpus import Corpus
from retriever_server.errors import StartError
from retriever_server.lucene import ANALYZER, commit_fingerprint, find_jar, find_java, java_environment

logger = logging.getLogger(__name__)


def build(
    corpus: Corpus,
    folder: Path,
    *,
    jar: Path | None = None,
    threads: int | None = None,
    store_raw: bool = False,
    heap: str = "2g",
) -> None:
    """Write a Lucene folder that Anserini and pyserini open too, with this package's manifest beside Lucene's files.

    Args:
        store_raw: keep every passage's JSON in the index; without it the corpus file gives the text by id.
    """
    java, jar = find_java(), find_jar(jar)
    threads = threads or os.cpu_count() or 1
    partial = begin(folder, {"corpus": corpus.fingerprint, "threads": threads, "store_raw": store_raw})
    parts = partial / "input"
    parts.mkdir(exist_ok=True)
    _cut(corpus, parts, threads)
    index = partial / "index"
    shutil.rmtree(index, ignore_errors=True)
    command = [str(java / "bin/java"), f"-Xmx{heap}", "-cp", str(jar), "io.anserini.index.IndexCollection"]
    command += ["-collection", "JsonCollection", "-generator", "DefaultLuceneDocumentGenerator"]
    command += ["-input", str(parts), "-index", str(index), "-threads", str(threads), "-quiet"]
    command += ["-memoryBuffer", "512", *(["-storeRaw"] if store_raw else [])]
    logger.info("Anserini indexes %s passages", f"{len(corpus):,}")
    done = subprocess.run(command, env=java_environment(java), capture_output=True, text=True, check=False)
    if done.returncode or not any(index.glob("segments_*")):
        words = done.stderr.strip().splitlines() or ["it said nothing"]
        raise StartError(f"Anserini failed to index {corpus.path}: {words[-1][:300]}")
    _describe(index, corpus, stores_raw=store_raw, analyzer=ANALYZER, jar=jar.name)
    index.rename(folder)
    shutil.rmtree(partial)


def import_folder(corpus: Corpus, folder: Path, source: Path) -> None:
    """Make an index folder of links to somebody's Lucene files, with the corpus's line offsets beside them: without
    these, every start would read the whole corpus.

    Raises:
        StartError: `source` is no Lucene folder.
    """
    commit_fingerprint(source)
    partial = begin(folder, {"corpus": corpus.fingerprint, "sources": [str(source.resolve())]})
    links = partial / "index"
    shutil.rmtree(links, ignore_errors=True)
    links.mkdir()
    for file in source.resolve().iterdir():
        if file.is_file() and file.suffix != ".lock":
            (links / file.name).symlink_to(file)
    _describe(links, corpus, source=str(source.resolve()))
    links.rename(folder)
    shutil.rmtree(partial)


def _describe(index: Path, corpus: Corpus, **facts: Any) -> None:
    np.save(index / OFFSETS, corpus.offsets)
    kind = {"retriever": "lucene", "corpus": corpus.fingerprint, "rows": len(corpus), "complete": corpus.complete}
    write_whole(index / MANIFEST, orjson.dumps({**kind, **facts}, option=orjson.OPT_INDENT_2))


def _cut(corpus: Corpus, parts: Path, num_parts: int) -> None:
    progress = Progress("cutting the corpus", len(corpus))
    for part in range(num_parts):
        rows = range(len(corpus) * part // num_parts, len(corpus) * (part + 1) // num_parts)
        path = parts / f"{part:04d}.jsonl"
        if path.exists():
            progress.skip(len(rows))
            continue
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("wb") as out:
            for row in rows:
                out.write(corpus.document(row) + b"\n")
                progress.advance(1)
        unfinished.rename(path)
