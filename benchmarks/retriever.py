"""The retrieval server, measured on this machine, each time beside what one would otherwise use.

    python benchmarks/retriever.py                      # all sections
    python benchmarks/retriever.py --sections http soak

http    the HTTP layer over a retriever that costs nothing, beside a plain FastAPI endpoint
dense   64 clients with one query each, batched by the server, beside a thread pool
sparse  bm25 and Lucene, beside pyserini's own batch_search
start   until a server over two million passages is ready, and its memory
soak    a minute of overload, disconnects, slow clients and bad bodies

Servers run on one core, the load on another; rounds alternate between the servers and tables show medians. CPU time a
request hardly depends on what else the machine does; throughput does.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import retriever_dense
import retriever_http
import retriever_load
import retriever_soak
import retriever_sparse
import retriever_start

SECTIONS: dict[str, Any] = {
    "start": retriever_start,
    "sparse": retriever_sparse,
    "soak": retriever_soak,
    "dense": retriever_dense,
    "http": retriever_http,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--seconds", type=float, default=3.0, help="of one measurement (default: 3)")
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement (default: 3)")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/retriever.json"))
    options = parser.parse_args()
    os.sched_setaffinity(0, retriever_load.CORES)
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    results = results if isinstance(results, dict) else {}
    summaries = []
    for name in options.sections:
        started = time.perf_counter()
        if name in ("http", "dense", "soak"):
            os.sched_setaffinity(0, retriever_load.CORES[-1:])
        rows = SECTIONS[name].run_section(options.rounds, options.seconds)
        os.sched_setaffinity(0, retriever_load.CORES)
        print(*SECTIONS[name].table(rows), f"({name}: {time.perf_counter() - started:.0f} s)", "", sep="\n", flush=True)
        summaries.append(f"{name:7} {SECTIONS[name].summary(rows)}")
        results[name] = rows
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(*summaries, sep="\n")


if __name__ == "__main__":
    main()
