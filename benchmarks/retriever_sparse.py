"""BM25 in Python, Lucene in its process, and pyserini's own batch_search, over the same passages and questions, k=3."""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from retriever_server.bm25 import BM25Retriever
from retriever_server.corpus import Corpus
from retriever_server.errors import StartError

SHARED = Path(os.environ.get("SEARCH_R1_SHARED", Path(__file__).resolve().parents[2] / "shared"))
MINIBENCH = SHARED / "data/minibench"
TOP_K, BATCH = 3, 256


def material(folder: Path) -> tuple[Path, list[str]]:
    """Minibench where it lies beside the checkout, else made-up passages and questions of the same number."""
    if (MINIBENCH / "corpus.jsonl").exists():
        lines = (MINIBENCH / "questions.jsonl").read_text().splitlines()
        return MINIBENCH / "corpus.jsonl", [json.loads(line)["question"] for line in lines]
    draw = random.Random(0)
    words = [f"{chr(97 + number % 26)}{number}" for number in range(30_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    path = folder / "corpus.jsonl"
    with path.open("w") as out:
        for row in range(5_000):
            out.write(json.dumps({"id": str(row), "contents": " ".join(draw.choices(words, weights, k=90))}) + "\n")
    return path, [" ".join(draw.choices(words, weights, k=8)) for _ in range(1_200)]


def run_section(rounds: int, seconds: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus_path, queries = material(folder)
        corpus = Corpus.open(corpus_path)
        bm25 = BM25Retriever.build(corpus)
        rows = [
            {
                "engine": "bm25 (Python)",
                "threads": threads,
                **timed(_in_threads(bm25.search, threads), queries, seconds),
            }
            for threads in (1, 2)
        ]
        try:
            rows += _lucene(corpus, queries, folder, seconds)
        except StartError as error:
            rows.append({"engine": "lucene", "skipped": str(error)})
        return rows


def _lucene(corpus: Corpus, queries: list[str], folder: Path, seconds: float) -> list[dict[str, Any]]:
    from retriever_server import lucene_build
    from retriever_server.lucene import LuceneRetriever

    rows: list[dict[str, Any]] = []
    lucene_build.build(corpus, folder / "lucene", threads=1, store_raw=True)
    for threads in (1, 2):
        retriever = LuceneRetriever(folder / "lucene", corpus, threads=threads)
        rows.append({"engine": "lucene", "threads": threads, **timed(retriever.search, queries, seconds)})
        retriever.close()
    script = Path(__file__).with_name("retriever_pyserini.py")
    command = [sys.executable, str(script), str(folder / "lucene"), str(seconds)]
    done = subprocess.run(command, input=json.dumps(queries), capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not found:
        return [*rows, {"engine": "pyserini", "skipped": done.stderr.strip().splitlines()[-1][:200]}]
    return rows + [{"engine": "pyserini batch_search", **row} for row in found]


def _in_threads(search: Callable[..., Any], threads: int) -> Callable[..., Any]:
    if threads == 1:
        return search
    pool = ThreadPoolExecutor(threads)

    def split(queries: Sequence[str], top_k: int) -> Any:
        return list(pool.map(lambda part: search(queries[part::threads], top_k), range(threads)))

    return split


def timed(search: Callable[..., Any], queries: list[str], seconds: float) -> dict[str, float]:
    """Queries/s and CPU time a query, this process's and its children's, after a warm-up over all queries."""
    for start in range(0, len(queries), BATCH):
        search(queries[start : start + BATCH], TOP_K)
    count, start, cpu, started = 0, 0, _cpu_s(), time.perf_counter()
    while time.perf_counter() - started < seconds:
        part = queries[start : start + BATCH]
        search(part, TOP_K)
        count += len(part)
        start = (start + BATCH) % len(queries)
    took = time.perf_counter() - started
    return {"queries_per_s": count / took, "cpu_us": (_cpu_s() - cpu) / count * 1e6}


def _cpu_s() -> float:
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in [own, *own.children(recursive=True)])


def summary(rows: list[dict[str, Any]]) -> str:
    known = [row for row in rows if "skipped" not in row]
    return "queries/s with 1 and 2 threads: " + "; ".join(
        f"{engine} {' and '.join(format(row['queries_per_s'], ',.0f') for row in known if row['engine'] == engine)}"
        for engine in dict.fromkeys(row["engine"] for row in known)
    )


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'sparse, batches of 256, k=3':44} {'threads':>8} {'q/s':>8} {'CPU us':>8}"]
    for row in rows:
        if "skipped" in row:
            lines.append(f"{row['engine']}: skipped: {row['skipped']}")
        else:
            lines.append(f"{row['engine']:44} {row['threads']:8} {row['queries_per_s']:8.0f} {row['cpu_us']:8.0f}")
    return lines
