"""Threads that run what they are given, and that a hanging call cannot make immortal."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

_LAST_WAIT_S = 2.0
"""How long a call under way may still take when its thread is closed. Nobody waits for its result then."""

P = ParamSpec("P")
T = TypeVar("T")


class Threads(Executor):
    """Run calls in the order they come, one a thread. A call that never returns does not keep the process alive, as it
    would in a `ThreadPoolExecutor`."""

    def __init__(self, name: str, count: int = 1) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  # whoever asked sees it
                future.set_exception(error)

        self._calls.put(call)
        return future

    def close(self) -> None:
        """End after what was submitted, or leave a call alone that goes on for longer than a moment."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(_LAST_WAIT_S)
            if thread.is_alive():
                logger.warning("%s: a call still runs and is left alone", thread.name)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call
