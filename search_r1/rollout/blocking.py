"""Blocking engines and environments behind the asynchronous protocols."""

from __future__ import annotations

import asyncio
import atexit
import os
import queue
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Generic, NoReturn, TypeVar, cast

from search_r1.protocols import AsyncEnvironment, AsyncRolloutEngine, Environment, RolloutEngine
from search_r1.rollout.rolling_state import TurnRequest
from search_r1.types import Action, Completion, Observation, Prompt, SamplingConfig

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def generate_turns(engine: RolloutEngine, requests: Sequence[TurnRequest]) -> list[Completion]:
    """One engine call for all rows; rows that are short of room go with those that have the same room."""
    rows_by_sampling: defaultdict[SamplingConfig, list[int]] = defaultdict(list)
    for row, request in enumerate(requests):
        rows_by_sampling[request.sampling].append(row)
    completions: dict[int, Completion] = {}
    for sampling, rows in rows_by_sampling.items():
        contexts = [requests[row].context for row in rows]
        seeds = [requests[row].seed for row in rows]
        completions.update(zip(rows, engine.generate(contexts, sampling, seeds), strict=True))
    return [completions[row] for row in range(len(requests))]


class BoundedCaller:
    """Runs blocking calls one after the other in a thread of its own, so that their caller can stop waiting.

    A call that was given up goes on, and later ones wait for it. The process may end meanwhile, by `end_process`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, call: Callable[[], Answer], timeout_s: float) -> Answer:
        """
        Raises:
            TimeoutError: no answer within `timeout_s`, waiting for earlier calls included.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        outcome: Future[object] = Future()
        self._calls.put((call, outcome))
        try:
            return cast(Answer, outcome.result(timeout_s))
        finally:
            outcome.cancel()

    def close(self) -> None:
        """End the thread, once a call that is under way has ended."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread = None

    def _run(self) -> None:
        while work := self._calls.get():
            _answer(*work)
            del work  # it holds on to the engine


def _answer(call: Callable[[], object], outcome: Future[object]) -> None:
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        outcome.set_result(call())
    except BaseException as error:  # noqa: BLE001  raised where it was asked for
        outcome.set_exception(error)


def end_process(status: int) -> NoReturn:
    """Run the exit handlers and end; the interpreter is not taken down, which aborts a thread that is inside torch."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(status)


class Gathered(Generic[Item, Answer]):
    """Awaitable front of a blocking function of many items, which need not be thread safe.

    One call runs at a time, in a thread; whatever is asked for meanwhile makes the next call.
    """

    def __init__(self, call: Callable[[list[Item]], list[Answer]]) -> None:
        self._call = call
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        await asyncio.sleep(0)  # who asks in the same moment joins the first call
        while batch := [(item, answer) for item, answer in self._waiting if not answer.done()]:
            self._waiting = []
            try:
                answers = await asyncio.to_thread(self._call, [item for item, _ in batch])
            except Exception as error:  # noqa: BLE001  raised where it was asked for
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), value in zip(batch, answers, strict=True):
                if not answer.done():
                    answer.set_result(value)
        self._waiting = []
        self._worker = None

    async def settle(self, timeout_s: float) -> None:
        """A thread cannot be stopped: wait until the call in it has returned, so that nothing is left running."""
        if self._worker is not None:
            await asyncio.wait([self._worker], timeout=timeout_s)


class GatheredEngine(Gathered[TurnRequest, Completion]):
    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__(partial(generate_turns, engine))

    async def agenerate(self, context: Sequence[int], sampling: SamplingConfig, seed: int) -> Completion:
        return await self(TurnRequest(list(context), sampling, seed))


class GatheredEnvironment(Gathered[tuple[Action, Prompt], Observation]):
    def __init__(self, environment: Environment) -> None:
        super().__init__(lambda items: environment.step([action for action, _ in items], [p for _, p in items]))

    async def astep(self, action: Action, prompt: Prompt) -> Observation:
        return await self((action, prompt))


def as_async_engine(engine: RolloutEngine) -> AsyncRolloutEngine:
    """The engine itself where it can sample single contexts asynchronously, else a front that gathers them."""
    return cast(AsyncRolloutEngine, engine) if hasattr(engine, "agenerate") else GatheredEngine(engine)


def as_async_environment(environment: Environment) -> AsyncEnvironment:
    return cast(AsyncEnvironment, environment) if hasattr(environment, "astep") else GatheredEnvironment(environment)
