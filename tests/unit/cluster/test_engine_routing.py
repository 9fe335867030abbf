"""Which engine of a pool samples what. The actors are stand-ins that answer when told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from search_r1.cluster.engine_pool import EnginePool
from search_r1.types import Completion, SamplingConfig

SAMPLING = SamplingConfig(8)


class Remote:
    """A method of an actor: notes each call, and answers it when released."""

    def __init__(self) -> None:
        self.contexts: list[Sequence[int]] = []
        self.waiting: list[asyncio.Future[Completion]] = []

    def remote(self, context: Sequence[int], sampling: SamplingConfig, seed: int) -> Awaitable[Completion]:
        self.contexts.append(tuple(context))
        self.waiting.append(asyncio.get_running_loop().create_future())
        return self.waiting[-1]

    def release(self) -> None:
        for answer in self.waiting:
            if not answer.done():
                answer.set_result(Completion((1,), (0.0,), "", "stop"))


class Actor:
    def __init__(self) -> None:
        self.agenerate = Remote()


def use(count: int, body: Callable[[Callable[[Sequence[int]], None], list[Actor]], Awaitable[Any]]) -> list[Actor]:
    """Run `body(ask, actors)` over a pool of stand-ins; `ask` begins to sample a context."""
    actors = [Actor() for _ in range(count)]

    async def main() -> None:
        pool = EnginePool(lambda wanted: actors[:wanted], count)
        tasks: list[asyncio.Task[Completion]] = []

        def ask(context: Sequence[int]) -> None:
            tasks.append(asyncio.get_running_loop().create_task(pool.agenerate(context, SAMPLING, 0)))

        await body(ask, actors)
        await asyncio.sleep(0)
        for actor in actors:
            actor.agenerate.release()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    return actors


async def settle(actors: Sequence[Actor]) -> None:
    await asyncio.sleep(0)
    for actor in actors:
        actor.agenerate.release()
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_siblings_stay_together_and_groups_spread() -> None:
    async def body(ask: Callable[[Sequence[int]], None], actors: list[Actor]) -> None:
        for group in range(4):
            for _ in range(5):
                ask([7, 7, 7, group])

    actors = use(2, body)
    assert [len(actor.agenerate.contexts) for actor in actors] == [10, 10]
    homes = [set(actor.agenerate.contexts) for actor in actors]
    assert not homes[0] & homes[1]


def test_a_trajectory_comes_back_to_the_engine_that_holds_its_longest_beginning() -> None:
    async def body(ask: Callable[[Sequence[int]], None], actors: list[Actor]) -> None:
        prompts = [[5, 5, number] for number in range(6)]
        for prompt in prompts:
            ask(prompt)
        await settle(actors)
        for prompt in reversed(prompts):
            ask([*prompt, 1, 2, 3])
            await settle(actors)

    for actor in use(3, body):
        first, second = actor.agenerate.contexts[:2], actor.agenerate.contexts[2:]
        assert {context[2] for context in second} == {context[2] for context in first}


def test_a_popular_beginning_does_not_pile_up_on_one_engine() -> None:
    async def body(ask: Callable[[Sequence[int]], None], actors: list[Actor]) -> None:
        for _ in range(300):
            ask([1, 2, 3])

    loads = [len(actor.agenerate.contexts) for actor in use(3, body)]
    assert sum(loads) == 300
    assert min(loads) > 70


def test_whole_contexts_are_what_counts_not_a_shared_preamble() -> None:
    """All prompts begin with the same instructions; each next turn still finds its own engine."""
    preamble = list(range(200))

    async def body(ask: Callable[[Sequence[int]], None], actors: list[Actor]) -> None:
        for number in range(8):
            ask([*preamble, 1000 + number])
        await settle(actors)
        for number in (0, 2, 4, 6):
            ask([*preamble, 1000 + number, 1])
            await settle(actors)

    for actor in use(2, body):
        first, later = actor.agenerate.contexts[:4], actor.agenerate.contexts[4:]
        assert {context[200] for context in later} <= {context[200] for context in first}
