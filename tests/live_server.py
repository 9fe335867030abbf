"""A retrieval server on a free port of this machine, in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.applications import Starlette

from retriever_server.serving import bind, make_server


@contextmanager
def live_server(app: Starlette) -> Iterator[str]:
    """Serve the app, yield its base URL, stop it."""
    with bind("127.0.0.1", 0) as listener:
        server = make_server(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=10)
