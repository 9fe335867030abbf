from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from search_r1.rollout.event_loop import EventLoopThread


@pytest.mark.timeout(60)
def test_closing_leaves_behind_what_ignores_its_cancellation() -> None:
    released = threading.Event()

    async def ignore() -> None:
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)

    async def start() -> asyncio.Task[None]:
        return asyncio.create_task(ignore())

    thread = EventLoopThread("stubborn", patience_s=0.05)
    task = thread.submit(start()).result()
    thread.close()
    assert not task.done()
    released.set()
