"""`python -m retriever_server.serve_ray`: the same service as a Ray Serve deployment, one replica and index a node.

Takes every option of `python -m retriever_server`. A Lucene index keeps its Java in a process of its own here too.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from typing import Any

import ray
from ray import serve
from starlette.applications import Starlette

from retriever_server import loading
from retriever_server.app import create_app
from retriever_server.command import make_parser, settings_of
from retriever_server.errors import StartError

logger = logging.getLogger("retriever_server")

APP = "retriever"


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    parser.prog = "python -m retriever_server.serve_ray"
    group = parser.add_argument_group("ray")
    group.add_argument("--replicas", type=int, default=1, help="at most one a node (default: 1)")
    group.add_argument("--gpus", type=float, default=0, help="a replica (default: 0)")
    group.add_argument("--cpus", type=float, default=1, help="a replica (default: 1)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    try:
        url = deploy(options)
    except StartError as error:
        logger.error("%s", error)
        return 2
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # after ray.init, which sets a handler of its own
        signal.signal(number, lambda *_: stop.set())
    logger.info("ready: %s at %s/retrieve, %d replicas", options.retriever, url, options.replicas)
    stop.wait()
    serve.shutdown()  # type: ignore[no-untyped-call]
    return 0


def deploy(options: argparse.Namespace) -> str:
    """Start the replicas on the running Ray (or one of this machine) and wait until they have loaded their index.

    Returns:
        The URL at which every node's proxy answers.
    """
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    serve.start(http_options={"host": options.host, "port": options.port, "location": "EveryNode"})

    def build_app() -> Starlette:  # runs in the replica, which loads the index; nothing heavy is sent over
        retriever, reranker = loading.load(options)
        return create_app(retriever, settings_of(options), reranker=reranker)

    deployment: Any = serve.deployment(
        serve.ingress(build_app)(),
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
    return f"http://{options.host}:{options.port}"


if __name__ == "__main__":
    sys.exit(main())
