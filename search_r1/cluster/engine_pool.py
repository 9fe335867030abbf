"""Engine actors side by side as one engine: data parallel, sticky routing, dead ones replaced."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from search_r1.cluster.worker_group import fetch
from search_r1.errors import EngineLostError, SearchR1Error, TrainingError
from search_r1.protocols import Weights
from search_r1.types import Completion, SamplingConfig

logger = logging.getLogger(__name__)

Send = Callable[[list[Any]], object]
"""Sends the policy's current weights to engine actors, and returns when they have them."""

_MAX_ATTEMPTS = 3
"""Engines that may die over one completion."""
_MAX_RESTARTS = 3
"""Replacements over the life of a pool, for each engine it began with."""
_MAX_HOMES = 1 << 16
_POLL_S = 0.05


@dataclass(eq=False, slots=True)
class _Engine:
    actor: Any
    num_running: int = 0
    """Completions it has been asked for and not yet given."""


class EnginePool:
    """A `RolloutEngine` and an `AsyncRolloutEngine` over engine actors.

    A context goes to the engine that sampled the longest beginning of it, whose cache holds that part: siblings of a
    group and the turns of a trajectory stay together. It goes to the idlest engine where that one is much busier.

    When an engine dies, what it was sampling is sampled elsewhere, and another engine is started in the background; it
    takes part once it has the current weights.
    """

    def __init__(self, start: Callable[[int], list[Any]], count: int) -> None:
        """
        Args:
            start: Starts this many engine actors and waits until they are ready.
            count: Engines of the pool.
        """
        self._start = start
        self._live = [_Engine(actor) for actor in start(count)]
        self._lock = threading.Lock()
        self._homes: OrderedDict[int, _Engine] = OrderedDict()
        self._weights_lock = threading.Lock()
        self._send: Send | None = None
        self._num_starting = 0
        self._restarts_left = _MAX_RESTARTS * count
        self._cause = ""
        self._closed = False

    async def agenerate(self, context: Sequence[int], sampling: SamplingConfig, seed: int) -> Completion:
        """
        Raises:
            EngineLostError: the engines that were asked died one after the other, or none is left.
        """
        for _ in range(_MAX_ATTEMPTS):
            while (engine := self._assign(context)) is None:
                await asyncio.sleep(_POLL_S)
            reference = engine.actor.agenerate.remote(list(context), sampling, seed)
            try:
                return await reference
            except asyncio.CancelledError:
                ray.cancel(reference)
                raise
            except RayError as error:
                self._report(engine, error)
            finally:
                self._release(engine, 1)
        raise self._lost_error()

    def generate(
        self, contexts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        """One call an engine, all at the same time.

        Raises:
            EngineLostError: as `agenerate`.
        """
        completions: dict[int, Completion] = {}
        for _ in range(_MAX_ATTEMPTS):
            missing = [row for row in range(len(contexts)) if row not in completions]
            completions |= self._sample(missing, contexts, sampling, seeds)
        if len(completions) < len(contexts):
            raise self._lost_error()
        return [completions[row] for row in range(len(contexts))]

    def _sample(
        self,
        rows: Sequence[int],
        contexts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        seeds: Sequence[int],
    ) -> dict[int, Completion]:
        """These rows' completions, without those whose engine died."""
        parts: defaultdict[_Engine, list[int]] = defaultdict(list)
        for row in rows:
            while (engine := self._assign(contexts[row])) is None:
                time.sleep(_POLL_S)
            parts[engine].append(row)
        calls = {
            engine: engine.actor.generate.remote([contexts[r] for r in part], sampling, [seeds[r] for r in part])
            for engine, part in parts.items()
        }
        completions: dict[int, Completion] = {}
        try:
            for engine, part in parts.items():
                try:
                    completions.update(zip(part, ray.get(calls[engine]), strict=True))
                except RayError as error:
                    self._report(engine, error)
        except BaseException:
            for call in calls.values():
                ray.cancel(call)
            raise
        finally:
            for engine, part in parts.items():
                self._release(engine, len(part))
        return completions

    def update_weights(self, send: Send) -> None:
        """Give every engine new weights; one that dies meanwhile is replaced by one that has them.

        Raises:
            EngineLostError: none is left.
        """
        while True:
            with self._weights_lock:
                self._send = send
                if engines := self._engines():
                    try:
                        send([engine.actor for engine in engines])
                    except (RayError, TrainingError) as error:
                        if not self._remove_dead(engines):
                            raise
                        logger.warning(
                            "an engine died during a weight update, which is repeated: %s", _first_line(error)
                        )
                    else:
                        break
            time.sleep(_POLL_S)
        with self._lock:
            self._homes.clear()

    def load_weights(self, weights: Weights) -> None:
        bucket = ray.put(list(weights))

        def send(actors: list[Any]) -> None:
            fetch([actor.receive_weights.remote([bucket]) for actor in actors])
            fetch([actor.finish_weights.remote() for actor in actors])

        self.update_weights(send)

    def sleep(self) -> None:
        """Give the engines' device memory back."""
        self._each("sleep")

    def wake_up(self) -> None:
        self._each("wake_up")

    def _each(self, method: str) -> None:
        fetch([engine.actor.call.remote(method) for engine in self._engines()])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            engines, self._live = self._live, []
        try:
            ray.get([engine.actor.close.remote() for engine in engines])
        except RayError as error:
            logger.warning("an engine did not close in order: %s", _first_line(error))
        for engine in engines:
            ray.kill(engine.actor)

    def _engines(self) -> list[_Engine]:
        """Those that live; none while the only ones are still starting.

        Raises:
            EngineLostError: there is none and none will come.
        """
        with self._lock:
            if not self._live and not self._num_starting:
                raise EngineLostError(f"no rollout engine is left: {self._cause}")
            return list(self._live)

    def _assign(self, context: Sequence[int]) -> _Engine | None:
        """Choose the engine for a context and count it there; None while the only ones are still starting."""
        if not (engines := self._engines()):
            return None
        with self._lock:
            idlest = min(engines, key=lambda engine: engine.num_running)
            home, key = None, 0
            for key in accumulate(context, lambda prefix, token: hash((prefix, token)), initial=0):
                home = self._homes.get(key, home)
            if home is None or home not in engines or _is_much_busier(home, idlest):
                home = idlest
            self._homes[key] = home
            self._homes.move_to_end(key)
            if len(self._homes) > _MAX_HOMES:
                self._homes.popitem(last=False)
            home.num_running += 1
            return home

    def _release(self, engine: _Engine, count: int) -> None:
        with self._lock:
            engine.num_running -= count

    def _report(self, engine: _Engine, error: RayError) -> None:
        """Notice a dead engine; whatever else went wrong is raised, our own errors as themselves."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, RayActorError | EngineLostError):
            self._remove(engine, _first_line(cause))
        elif isinstance(cause, SearchR1Error):
            raise cause from error
        else:
            raise error

    def _remove(self, engine: _Engine, cause: str) -> None:
        """Take an engine out, whoever noticed first, and start another one in the background."""
        with self._lock:
            if engine not in self._live:
                return
            self._live.remove(engine)
            self._cause = cause
            restart = self._restarts_left > 0 and not self._closed
            self._restarts_left -= restart
            self._num_starting += restart
        logger.warning("a rollout engine died%s: %s", "; another is started" if restart else " for good", cause)
        ray.kill(engine.actor)
        if restart:
            threading.Thread(target=self._replace, name="engine-restart", daemon=True).start()

    def _replace(self) -> None:
        try:
            (actor,) = self._start(1)
            with self._weights_lock:
                self._admit(actor)
        except (RayError, SearchR1Error) as error:
            self._cause = f"a new one could not be started: {_first_line(error)}"
            logger.error("%s", self._cause)
        finally:
            with self._lock:
                self._num_starting -= 1

    def _admit(self, actor: Any) -> None:
        """Let a new engine take part, with the current weights."""
        try:
            if self._send is not None:
                self._send([actor])
        except BaseException:
            ray.kill(actor)
            raise
        with self._lock:
            if not self._closed:
                self._live.append(_Engine(actor))
                return
        ray.kill(actor)

    def _remove_dead(self, engines: Sequence[_Engine]) -> int:
        """How many of these do not answer any more."""
        count = 0
        for engine in engines:
            try:
                ray.get(engine.actor.ready.remote())
            except RayActorError as error:
                self._remove(engine, _first_line(error))
                count += 1
        return count

    def _lost_error(self) -> EngineLostError:
        return EngineLostError(f"{_MAX_ATTEMPTS} engines died over the same completion; the last one: {self._cause}")


def _is_much_busier(engine: _Engine, idlest: _Engine) -> bool:
    """By more than a group and a quarter: recomputing a prefix is cheaper than waiting."""
    return engine.num_running > 8 + 1.25 * idlest.num_running


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
