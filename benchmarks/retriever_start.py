"""How soon a server over two million passages is ready, and what it keeps in memory beside the page cache."""

import logging
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from retriever_server import bm25_build
from retriever_server.corpus import Corpus

PASSAGES = 2_000_000
_BLOCK = 50_000


def write_corpus(path: Path, passages: int) -> None:
    """Short passages over a vocabulary with few common and many rare words."""
    draw = random.Random(0)
    words = [f"{chr(97 + number % 26)}{number}" for number in range(200_000)]
    weights = [0.0]
    for rank in range(1, len(words) + 1):
        weights.append(weights[-1] + 1 / rank)
    with path.open("w") as out:
        for first in range(0, passages, _BLOCK):
            drawn = draw.choices(words, cum_weights=weights[1:], k=12 * _BLOCK)
            for number in range(min(_BLOCK, passages - first)):
                text = " ".join(drawn[12 * number : 12 * number + 12])
                out.write(f'{{"id":"{first + number}","contents":"\\"{drawn[12 * number]}\\"\\n{text}"}}\n')


def run_section(rounds: int, seconds: float, passages: int = PASSAGES) -> list[dict[str, Any]]:
    logging.getLogger().setLevel(logging.INFO)
    with tempfile.TemporaryDirectory(prefix="retriever-start-") as name:
        folder = Path(name)
        started = time.perf_counter()
        write_corpus(folder / "corpus.jsonl", passages)
        written_s, started = time.perf_counter() - started, time.perf_counter()
        bm25_build.build(Corpus.open(folder / "corpus.jsonl"), folder / "index")
        built_s = time.perf_counter() - started
        found = sorted((_start(folder) for _ in range(rounds)), key=lambda row: row["ready_s"])
    return [{"passages": passages, "corpus_written_s": written_s, "index_built_s": built_s, **found[rounds // 2]}]


def _start(folder: Path) -> dict[str, float]:
    port_file = folder / "port"
    files = ["--corpus", str(folder / "corpus.jsonl"), "--index", str(folder / "index")]
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "retriever_server", *files, "--port", "0", "--port-file", str(port_file)],
        stderr=subprocess.DEVNULL,
    )
    try:
        while not port_file.exists():
            assert process.poll() is None, "the server ended"
            time.sleep(0.01)
        ready_s = time.perf_counter() - started
        cpu_s = sum(psutil.Process(process.pid).cpu_times()[:2])
        url = f"http://127.0.0.1:{port_file.read_text().strip()}/retrieve"
        queries = [f"a{number} b{number + 1}" for number in range(0, 52_000, 26)]
        answer = httpx.post(url, json={"queries": queries}, timeout=60).json()
        assert len(answer["result"]) == len(queries)
        memory = {"anonymous_mb": _memory_mb(process.pid, "RssAnon"), "file_mb": _memory_mb(process.pid, "RssFile")}
        return {"ready_s": ready_s, "ready_cpu_s": cpu_s, **memory}
    finally:
        process.terminate()
        process.wait()
        port_file.unlink(missing_ok=True)


def _memory_mb(pid: int, kind: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith(kind)]
    return int(line.split()[1]) / 1024


def summary(rows: list[dict[str, Any]]) -> str:
    (row,) = rows
    memory = f"{row['anonymous_mb']:.0f} MB beside the page cache"
    return f"{row['passages']:,} passages: ready after {row['ready_s']:.2f} s, {memory}"


def table(rows: list[dict[str, Any]]) -> list[str]:
    (row,) = rows
    return [
        f"start over {row['passages']:,} passages (index built in {row['index_built_s']:.0f} s): ready after "
        f"{row['ready_s']:.2f} s ({row['ready_cpu_s']:.2f} s of CPU), {row['anonymous_mb']:.0f} MB of its own memory, "
        f"{row['file_mb']:.0f} MB of mapped files"
    ]
