"""How an app is put on the network: the socket, uvicorn's settings, and the process tuned for many small requests."""

from __future__ import annotations

import ctypes
import gc
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette

from retriever_server.errors import StartError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's mallopt."""
_BACKLOG = 4096


def bind(host: str, port: int) -> socket.socket:
    """A socket on that address, not listening yet. Port 0 takes a free one.

    Raises:
        StartError: the port is in use, or the address is not this machine's.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _refusal(host, port, error) from None
    return listener


def listen(listener: socket.socket) -> None:
    """Take connections from now on. Until then they are refused, so that a client goes to another server.

    Raises:
        StartError: another server, started since `bind`, is there first.
    """
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _refusal(host, port, error) from None


def _refusal(host: str, port: int, error: OSError) -> StartError:
    cause = error.strerror or str(error)
    return StartError(f"cannot listen on {host}:{port}: {cause}; choose another --port, 0 takes a free one")


def make_server(app: Starlette) -> uvicorn.Server:
    return uvicorn.Server(make_config(app))


def make_config(app: Starlette | Callable[[], Starlette], **several: Any) -> uvicorn.Config:
    """No access log; requests under way finish when the server is told to stop."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=30,
        **several,
    )


def run(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT. Takes the whole process: call it once everything is loaded."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    tune_process()
    server.run(sockets=[listener])


def tune_process() -> None:
    """To be called once everything is loaded."""
    gc.collect()
    gc.freeze()  # the index and the modules stay for good
    gc.set_threshold(100_000, 50, 100)  # an answer of 256 queries makes thousands of short-lived objects
    sys.setswitchinterval(0.0005)  # the event loop gets the GIL back soon after it has read from a socket
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # an answer of 500 kB in fresh pages costs twice as much as in those of the last one
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 128 << 20)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
