"""The options of `python -m retriever_server`, which `serve_ray` shares."""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from pathlib import Path

from retriever_server import loading
from retriever_server.app import ServerSettings
from retriever_server.errors import StartError
from retriever_server.loading import number
from retriever_server.schemas import Limits

logger = logging.getLogger("retriever_server")

_DESCRIPTION = """\
Serve a corpus of JSON lines ({"id", "contents"} or {"id", "title", "text"}; plain or .gz) over POST /retrieve.
GET /health, /ready, /info and /metrics tell how it stands. Everything else is in docs/retriever.md."""
_EXAMPLES = """\
examples:
  python -m retriever_server --retriever bm25 --corpus corpus.jsonl
  python -m retriever_server --retriever bm25 --corpus corpus.jsonl --index bm25_index   # built once, then opened
  python -m retriever_server --retriever lucene --index lucene_index --corpus corpus.jsonl
  python -m retriever_server --retriever dense --index e5_index --corpus corpus.jsonl --encoder intfloat/e5-base-v2
  python -m retriever_server --retriever hybrid --parts bm25=bm25_index dense=e5_index --corpus corpus.jsonl --encoder …
  python -m retriever_server --retriever noise --noise empty --port 0 --port-file port.txt

A bearer token is asked for when the environment variable RETRIEVER_TOKEN is set.
Exit code: 0 after SIGTERM or Ctrl-C, 2 when a file or a setting is wrong."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m retriever_server",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    loading.add_options(parser)
    add = parser.add_argument_group("service").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", type=number(int, 0, 65_535), default=8000, help="0 takes a free one (default: 8000)")
    add("--port-file", type=Path, help="write the port there once the server is ready")
    add("--topk", type=number(int, 1), default=3, help="passages a query when a request names no topk (default: 3)")
    add("--max-topk", type=number(int, 1), default=1000, help="largest topk a request may ask for (default: 1000)")
    add("--timeout-s", type=number(float, 0.001), default=30.0, help="longest a request may take (default: 30)")
    add("--max-batch", type=number(int, 1), default=256, help="queries searched together (default: 256)")
    add("--max-queued", type=number(int, 1), default=20_000, help="waiting queries before 503 (default: 20000)")
    add(
        "--cache-mb",
        type=number(float, 0),
        default=256,
        help="memory for known results, 0 for none (default: 256)",
    )
    add("--workers", type=number(int, 1), default=1, help="processes that share a memory-mapped index (default: 1)")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


def settings_of(options: argparse.Namespace) -> ServerSettings:
    return ServerSettings(
        limits=Limits(default_top_k=options.topk, max_top_k=max(options.max_topk, options.topk)),
        timeout_s=options.timeout_s,
        max_batch=options.max_batch,
        max_queued=options.max_queued,
        cache_bytes=int(options.cache_mb * (1 << 20)),
        token=os.environ.get("RETRIEVER_TOKEN") or None,
    )


def clear_port_file(path: Path | None) -> None:
    """Remove the file of an earlier server, and find out now whether a new one can be written."""
    if path is None:
        return
    try:
        path.unlink(missing_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise StartError(
            f"--port-file {path} cannot be written: {error.strerror}; name one in a folder of yours"
        ) from None


def announce(address: tuple[str, int], options: argparse.Namespace) -> None:
    """Say that the server is ready, in the log and in the port file."""
    host, port = address
    if options.port_file is not None:
        partial = options.port_file.with_name(f"{options.port_file.name}.{os.getpid()}.partial")
        partial.write_text(f"{port}\n")
        partial.rename(options.port_file)
    logger.info("ready: %s at http://%s:%d/retrieve", options.retriever, f"[{host}]" if ":" in host else host, port)
