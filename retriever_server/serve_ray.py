"""`python -m retriever_server.serve_ray`: the same service as a Ray Serve deployment, one replica and index a node.

Takes every option of `python -m retriever_server` but `--workers` and `--port 0`. A Lucene index keeps its Java in a
process of its own here too.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from starlette.applications import Starlette

from retriever_server import loading
from retriever_server.app import create_app
from retriever_server.command import announce, clear_port_file, make_parser, settings_of
from retriever_server.errors import StartError
from retriever_server.loading import number

logger = logging.getLogger("retriever_server")

APP = "retriever"


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    parser.prog = "python -m retriever_server.serve_ray"
    group = parser.add_argument_group("ray")
    group.add_argument("--replicas", type=number(int, 1), default=1, help="at most one a node (default: 1)")
    group.add_argument("--gpus", type=number(float, 0), default=0, help="a replica (default: 0)")
    group.add_argument("--cpus", type=number(float, 0), default=1, help="a replica (default: 1)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    try:
        if options.workers > 1 or not options.port:
            raise StartError(
                "Ray Serve takes no --workers and no --port 0: use --replicas, and a port that all nodes have"
            )
        clear_port_file(options.port_file)
        deploy(options)
    except StartError as error:
        logger.error("%s", error)
        return 2
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):  # after ray.init, which sets a handler of its own
        signal.signal(signum, lambda *_: stop.set())
    announce((options.host, options.port), options)
    stop.wait()
    serve.shutdown()  # type: ignore[no-untyped-call]
    return 0


def deploy(options: argparse.Namespace) -> None:
    """Start the replicas on the running Ray (or one of this machine) and wait until they have loaded their index."""
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    serve.start(http_options={"host": options.host, "port": options.port, "location": "EveryNode"})
    deployment: Any = serve.deployment(
        serve.ingress(app_builder(options))(),
        name=APP,
        num_replicas=options.replicas,
        max_replicas_per_node=1,
        max_ongoing_requests=options.max_queued,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
    )
    try:
        serve.run(deployment.bind(), name=APP, route_prefix="/")
    except RuntimeError as error:
        raise StartError(f"the replicas did not start: {str(error).strip().splitlines()[-1]}") from None


def app_builder(options: argparse.Namespace) -> Callable[[], Starlette]:
    """What each replica runs to load the index; nothing heavy is sent over. The token comes from this process."""
    settings = settings_of(options)

    def build_app() -> Starlette:
        retriever, reranker = loading.load(options)
        return create_app(retriever, settings, reranker=reranker)

    return build_app


if __name__ == "__main__":
    sys.exit(main())
