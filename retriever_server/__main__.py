"""`python -m retriever_server`: serve one corpus over HTTP."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from pathlib import Path

from retriever_server.app import ServerSettings, create_app
from retriever_server.errors import StartError
from retriever_server.retriever import Retriever
from retriever_server.schemas import Limits
from retriever_server.serving import bind, make_server, run

logger = logging.getLogger("retriever_server")

_DESCRIPTION = """\
Serve a corpus of JSON lines ({"id", "contents"} or {"id", "title", "text"}; plain or .gz) over POST /retrieve.
GET /health, /ready, /info and /metrics tell how it stands. Everything else is in docs/retriever.md."""
_EXAMPLES = """\
examples:
  python -m retriever_server --retriever bm25 --corpus corpus.jsonl
  python -m retriever_server --retriever bm25 --corpus corpus.jsonl --index bm25_index   # built once, then opened
  python -m retriever_server --retriever noise --noise empty --port 0 --port-file port.txt

A bearer token is asked for when the environment variable RETRIEVER_TOKEN is set.
Exit code: 0 after SIGTERM or Ctrl-C, 2 when a file or a setting is wrong."""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    try:
        with bind(options.host, options.port) as listener:
            if options.port_file is not None:
                options.port_file.unlink(missing_ok=True)
            return _serve(_load(options), listener, options)
    except StartError as error:
        logger.error("%s", error)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m retriever_server",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--retriever", choices=("bm25", "noise"), default="bm25")
    add("--corpus", type=Path, help="JSON lines, one passage a line (not needed by --noise empty)")
    add("--index", type=Path, help="folder of the saved bm25 index; built and saved there when it does not exist")
    add("--k1", type=float, help="bm25 (default: 0.9, or what --index was built with)")
    add("--b", type=float, help="bm25 (default: 0.4, or what --index was built with)")
    add("--noise", choices=("empty", "random", "shuffled"), default="empty", help="what the noise retriever returns")
    add("--seed", type=int, default=0, help="of the noise (default: 0)")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", type=_port, default=8000, help="0 takes a free one (default: 8000)")
    add("--port-file", type=Path, help="write the port there once the server is ready")
    add("--topk", type=_positive, default=3, help="passages a query when a request names no topk (default: 3)")
    add("--timeout-s", type=float, default=30.0, help="longest a request may take (default: 30)")
    add("--max-batch", type=_positive, default=256, help="queries searched together (default: 256)")
    add("--max-queued", type=_positive, default=20_000, help="waiting queries before 503 (default: 20000)")
    add("--cache-mb", type=float, default=256, help="memory for remembered results, 0 for none (default: 256)")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


def _load(options: argparse.Namespace) -> Retriever:
    # Imported here: a wrong flag or a port in use is told without loading numpy and the index first.
    from retriever_server.noise import EmptyRetriever, RandomRetriever, ShuffledRetriever

    if options.retriever == "noise" and options.noise == "empty":
        return EmptyRetriever()
    if options.corpus is None:
        raise StartError("--corpus is missing: name a file of JSON lines with id and contents")
    if options.retriever == "noise" and options.noise == "random":
        from retriever_server.corpus import Corpus

        return RandomRetriever(Corpus.open(options.corpus), options.seed)
    from retriever_server.bm25 import open_or_build

    bm25 = open_or_build(options.corpus, options.index, k1=options.k1, b=options.b)
    return ShuffledRetriever(bm25, options.seed) if options.retriever == "noise" else bm25


def _serve(retriever: Retriever, listener: socket.socket, options: argparse.Namespace) -> int:
    failure: list[str] = []

    def on_ready(cause: str | None) -> None:
        if cause is None:
            _announce(listener, options)
        else:
            failure.append(cause)
            server.should_exit = True

    settings = ServerSettings(
        limits=Limits(default_top_k=options.topk),
        timeout_s=options.timeout_s,
        max_batch=options.max_batch,
        max_queued=options.max_queued,
        cache_bytes=int(options.cache_mb * (1 << 20)),
        token=os.environ.get("RETRIEVER_TOKEN") or None,
    )
    server = make_server(create_app(retriever, settings, on_ready=on_ready))
    run(server, listener)
    if failure:
        raise StartError(failure[0])
    return 0


def _announce(listener: socket.socket, options: argparse.Namespace) -> None:
    host, port = listener.getsockname()[:2]
    if options.port_file is not None:
        partial = options.port_file.with_name(options.port_file.name + ".partial")
        partial.write_text(f"{port}\n")
        partial.rename(options.port_file)
    logger.info("ready: %s at http://%s:%d/retrieve", options.retriever, f"[{host}]" if ":" in host else host, port)


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65_535:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 65535")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
