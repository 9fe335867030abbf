"""A batcher around a stand-in retriever, for one scenario."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from retriever_server.batching import Batcher
from retriever_server.cache import ResultCache
from retriever_server.metrics import Metrics
from tests.fake_retrievers import StubRetriever

Scenario = Callable[[Batcher], Awaitable[None]]


def run(retriever: StubRetriever, scenario: Scenario, *, cache_bytes: int = 1 << 20, **options: Any) -> Metrics:
    """Start a batcher, play the scenario within 20 s, open the retriever's gate and close."""
    metrics = Metrics()

    async def main() -> None:
        batcher = Batcher(retriever, ResultCache(cache_bytes), metrics, **options)
        batcher.start()
        try:
            await asyncio.wait_for(scenario(batcher), timeout=20)
        finally:
            retriever.gate.set()
            await batcher.close()

    asyncio.run(main())
    return metrics
