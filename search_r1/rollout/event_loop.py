"""An event loop in a thread, so that synchronous code can start asynchronous work, wait for it, and cancel it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Job(Generic[T]):
    """A coroutine that runs on the loop of another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        loop.call_soon_threadsafe(self._start, coroutine)

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._outcome.set_exception(concurrent.futures.CancelledError())
        elif error := task.exception():
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(task.result())

    def result(self) -> T:
        """Wait for it. When the wait itself is interrupted (Ctrl-C), the job is cancelled first."""
        try:
            return self._outcome.result()
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel, and return once nothing of it runs any more."""
        if not self._outcome.done():
            self._loop.call_soon_threadsafe(lambda: self._task.cancel())
            concurrent.futures.wait([self._outcome])


class EventLoopThread:
    """One loop for the life of its owner, so that connections made on it can be kept."""

    def __init__(self, name: str, patience_s: float = 10.0) -> None:
        """`close` gives what it cancels `patience_s` to end."""
        self._patience_s = patience_s
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), name=name, daemon=True)
        self._thread.start()
        started.result()

    async def _serve(self, started: concurrent.futures.Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        started.set_result(None)
        await self._stop.wait()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Job[T]:
        return Job(self._loop, coroutine)

    def close(self) -> None:
        """Cancel what still runs, and end the thread; one on which something ignores that is left behind."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(self._patience_s)
