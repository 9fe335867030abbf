"""`python -m retriever_server`: serve one corpus over HTTP."""

from __future__ import annotations

import argparse
import logging
import socket
import sys

from retriever_server import loading, workers
from retriever_server.app import create_app
from retriever_server.command import announce, clear_port_file, make_parser, settings_of
from retriever_server.errors import StartError
from retriever_server.serving import bind, listen, make_server, run

logger = logging.getLogger("retriever_server")


def main(arguments: list[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    try:
        with bind(options.host, options.port) as listener:
            clear_port_file(options.port_file)
            return _serve(listener, options)
    except StartError as error:
        logger.error("%s", error)
        return 2


def _serve(listener: socket.socket, options: argparse.Namespace) -> int:
    if options.workers > 1:
        workers.run(listener, options)
        return 0
    retriever, reranker = loading.load(options)
    failure: list[str] = []

    def on_ready(cause: str | None) -> None:
        if cause is None:
            announce(listener.getsockname()[:2], options)
        else:
            failure.append(cause)
            server.should_exit = True

    server = make_server(create_app(retriever, settings_of(options), reranker=reranker, on_ready=on_ready))
    listen(listener)
    run(server, listener)
    if failure:
        raise StartError(failure[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
