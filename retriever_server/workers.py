"""Several server processes on one port, each over the same memory-mapped index: pages are in memory once."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from functools import partial

from starlette.applications import Starlette
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors.multiprocess import Multiprocess

from retriever_server import loading
from retriever_server.app import create_app
from retriever_server.command import announce, settings_of
from retriever_server.errors import StartError
from retriever_server.serving import listen, make_config, tune_process

logger = logging.getLogger("retriever_server")

_LOADING_S = 60
"""A process that holds Python's lock longer than this, while it loads or later, is taken for dead."""


class _Supervisor(Multiprocess):
    """Hears at once of a process that dies.

    uvicorn's keeps the process's end of the pipe open in the parent too: one that dies over a health check is then
    waited for as long as one that is busy (`_LOADING_S`).
    """

    def init_processes(self) -> None:
        super().init_processes()
        self._let_go()

    def keep_subprocess_alive(self) -> None:
        super().keep_subprocess_alive()
        self._let_go()

    def _let_go(self) -> None:
        for process in self.processes:
            process.child_conn.close()


def run(listener: socket.socket, options: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT. A process that dies is replaced.

    Raises:
        StartError: the index is not one that processes share, or a process could not open it.
    """
    _refuse_what_is_not_shared(options)
    if options.retriever == "bm25" and not options.index.exists():
        loading.load(options)  # builds it once, for all
    app = partial(_worker_app, options, listener.getsockname()[:2])
    config = make_config(app, workers=options.workers, factory=True, timeout_worker_healthcheck=_LOADING_S)
    listen(listener)
    supervisor = _Supervisor(config, [listener])
    supervisor.run()
    if any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes):
        raise StartError("a worker process did not start: its reason stands above")


def _refuse_what_is_not_shared(options: argparse.Namespace) -> None:
    shared = {
        "bm25": options.index is not None,
        "lucene": True,
        "dense": options.backend == "faiss" and options.device == "cpu" and not options.faiss_gpu,
    }
    if not shared.get(options.retriever, False):
        raise StartError(
            f"--workers {options.workers} needs a memory-mapped index, which the processes share: bm25 with --index, "
            "lucene, or dense with --backend faiss on a CPU"
        )


def _worker_app(options: argparse.Namespace, address: tuple[str, int]) -> Starlette:
    """Runs in each process."""
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")

    def on_ready(cause: str | None) -> None:
        if cause is not None:
            logger.error("%s", cause)
            os._exit(STARTUP_FAILURE)
        announce(address, options)

    try:
        retriever, reranker = loading.load(options)
    except StartError as error:
        logger.error("%s", error)
        sys.exit(STARTUP_FAILURE)
    tune_process()
    return create_app(retriever, settings_of(options), reranker=reranker, on_ready=on_ready)
