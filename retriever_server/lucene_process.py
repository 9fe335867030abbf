"""The process that holds the JVM. `lucene.py` starts it and speaks with it in JSON lines over the standard streams.

The JVM lives here alone: beside Ray it crashes, and a process must not fork after it has started.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from ctypes import c_float
from typing import Any

import orjson

_MAX_CLAUSES = 65_536
"""Distinct terms a query may have; Lucene's own limit of 1,024 would refuse a long one."""

Hits = list[list[Any]]
"""(id, raw JSON or None, score) of each hit."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Java prints goes to the log, not between the answers
    settings = orjson.loads(sys.stdin.buffer.readline())
    try:
        search, facts = _open(settings)
    except Exception as error:  # noqa: BLE001  # whatever went wrong, the other side turns it into a sentence
        facts = {"error": str(error)}
    _send(answers, facts)
    if "error" in facts:
        return
    for line in sys.stdin.buffer:
        request = orjson.loads(line)
        try:
            answer: dict[str, Any] = {"hits": search(request["queries"], request["top_k"])}
        except Exception as error:  # noqa: BLE001  # likewise
            answer = {"error": str(error)}
        _send(answers, answer)


def _send(answers: Any, message: dict[str, Any]) -> None:
    answers.write(orjson.dumps(message) + b"\n")
    answers.flush()


def _open(settings: dict[str, Any]) -> tuple[Callable[[list[str], int], list[Hits]], dict[str, Any]]:
    """Start the JVM and open the index.

    Returns:
        The search function, and what `lucene.py` wants to know: number of passages, whether raw text is stored.
    """
    import jnius_config

    jnius_config.set_classpath(settings["jar"])
    jnius_config.add_options(f"-Xmx{settings['heap']}", "-Dlog4j2.level=error", "-Xshare:auto")
    from jnius import autoclass

    searcher = autoclass("io.anserini.search.SimpleSearcher")(settings["index"])
    searcher.set_bm25(settings["k1"], settings["b"])
    autoclass("org.apache.lucene.search.IndexSearcher").setMaxClauseCount(_MAX_CLAUSES)
    num_passages = searcher.get_total_num_docs()
    first = searcher.doc(0) if num_passages else None
    stored = first is not None and first.get("raw") is not None
    want_raw = stored and settings["want_raw"]

    def hits_of(found: Any) -> Hits:
        return [[hit.docid, hit.lucene_document.get("raw") if want_raw else None, hit.score] for hit in found]

    java_class = autoclass("java.lang.Class")
    list_class = java_class.forName("java.util.ArrayList")
    mapper = autoclass("com.fasterxml.jackson.databind.ObjectMapper")()
    stored_fields = mapper.configOverride(java_class.forName("org.apache.lucene.document.Document"))
    stored_fields.setIsIgnoredType(autoclass("java.lang.Boolean")("true"))

    def search(queries: list[str], top_k: int) -> list[Hits]:
        top_k = min(top_k, max(num_passages, 1))
        if len(queries) == 1:
            return [hits_of(searcher.search(queries[0], top_k))]
        names = [str(number) for number in range(len(queries))]
        texts, numbers = (mapper.readValue(json.dumps(part), list_class) for part in (queries, names))
        found = searcher.batch_search(texts, numbers, top_k, settings["threads"])
        if want_raw:
            return [hits_of(found.get(name)) for name in names]
        # All hits as one text: to reach for each one from Python costs as much as the search.
        by_name = orjson.loads(mapper.writeValueAsString(found))
        return [[[hit["docid"], None, c_float(hit["score"]).value] for hit in by_name[name]] for name in names]

    return search, {"rows": num_passages, "stores_raw": stored}


if __name__ == "__main__":
    main()
