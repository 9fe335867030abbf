"""Engine actors side by side as one engine: data parallel, sticky routing, dead ones replaced."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from search_r1.cluster.placement import resources
from search_r1.cluster.routing import Router
from search_r1.cluster.weight_sync import send_weights
from search_r1.cluster.worker_group import fetch
from search_r1.errors import ConfigError, EngineLostError, SearchR1Error
from search_r1.protocols import Weights
from search_r1.types import Completion, SamplingConfig

logger = logging.getLogger(__name__)

Send = Callable[[list[Any]], object]
"""Sends the policy's current weights to engine actors, and returns when they have them."""

_MAX_ATTEMPTS = 3
"""Engines that may die over one completion."""
_MAX_RESTARTS = 3
"""Replacements over the life of a pool, for each engine it began with."""
_POLL_S = 0.05


class EnginePool:
    """A `RolloutEngine` and an `AsyncRolloutEngine` over engine actors.

    Contexts go where `Router` sends them. When an engine dies, what it was sampling is sampled elsewhere, and another
    engine is started in the background; it takes part once it has the current weights.
    """

    def __init__(
        self,
        start: Callable[[int], list[Any]],
        count: int,
        start_timeout_s: float = 300.0,
        give_back: Callable[[Any], object] | None = None,
    ) -> None:
        """
        Args:
            start: Starts this many engine actors, without waiting until they are ready.
            count: Engines of the pool.
            start_timeout_s: Seconds until they must be ready.
            give_back: Told of each engine that died, before another one is started.

        Raises:
            ConfigError: they are not, with what the cluster has.
        """
        self._start = start
        self._give_back = give_back
        self._start_timeout_s = start_timeout_s
        self._live = start(count)
        self._wait_ready(self._live)
        self._starting: list[Any] = []
        self._lock = threading.Lock()
        self._router: Router[Any] = Router()
        self._weights_lock = threading.Lock()
        self._send: Send | None = None
        self._sleep_level = 0
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
            reference = engine.agenerate.remote(list(context), sampling, seed)
            try:
                return await reference
            except asyncio.CancelledError:
                ray.cancel(reference)
                raise
            except RayError as error:
                self._report(engine, error)
            finally:
                self._router.release(engine)
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
        parts: defaultdict[Any, list[int]] = defaultdict(list)
        for row in rows:
            while (engine := self._assign(contexts[row])) is None:
                time.sleep(_POLL_S)
            parts[engine].append(row)
        calls = {
            engine: engine.generate.remote([contexts[r] for r in part], sampling, [seeds[r] for r in part])
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
                self._router.release(engine, len(part))
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
                    send(engines)
                    break
            time.sleep(_POLL_S)
        self._router.forget_homes()
        self._remove_dead(engines)

    def load_weights(self, weights: Weights) -> None:
        self.update_weights(partial(send_weights, [list(weights)]))

    def sleep(self, level: int = 1) -> None:
        """Give the engines' device memory back; one that is started meanwhile falls asleep too."""
        with self._weights_lock:
            self._sleep_level = level
            self._each("sleep", level)

    def wake_up(self, weights_only: bool = False) -> None:
        with self._weights_lock:
            self._sleep_level = self._sleep_level if weights_only else 0
            self._each("wake_up", weights_only)

    def score_each(self, *args: Any) -> list[list[list[float]]]:
        """What every engine scores; see `ScoringEngine`."""
        return self._each("score", *args)

    def forget(self) -> None:
        self._each("forget")
        self._router.forget_homes()

    def _each(self, method: str, *args: Any) -> list[Any]:
        """The same call on every engine; those that die over it are replaced."""
        answers = []
        for engine, call in [(engine, engine.call.remote(method, *args)) for engine in self._engines()]:
            try:
                answers.append(ray.get(call))
            except RayError as error:
                self._report(engine, error)
        return answers

    def close(self) -> None:
        with self._lock:
            self._closed = True
            engines, self._live = self._live, []
        try:
            ray.get([engine.close.remote() for engine in engines])
        except RayError as error:
            logger.warning("an engine did not close in order: %s", _first_line(error))
        for engine in [*engines, *self._starting]:
            ray.kill(engine)

    def _engines(self) -> list[Any]:
        """Those that live; none while the only ones are still starting.

        Raises:
            EngineLostError: there is none and none will come.
        """
        with self._lock:
            if not self._live and not self._starting:
                raise EngineLostError(f"no rollout engine is left: {self._cause}")
            return list(self._live)

    def _assign(self, context: Sequence[int]) -> Any | None:
        """The engine that samples a context; None while the only ones are still starting."""
        engines = self._engines()
        return self._router.assign(context, engines) if engines else None

    def _report(self, engine: Any, error: RayError) -> None:
        """Notice a dead engine; whatever else went wrong is raised, our own errors as themselves."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, RayActorError | EngineLostError):
            self._remove(engine, _first_line(cause))
        elif isinstance(cause, SearchR1Error):
            raise cause from error
        else:
            raise error

    def _remove(self, engine: Any, cause: str) -> None:
        """Take an engine out, whoever noticed first, and start another one in the background."""
        with self._lock:
            if self._closed or engine not in self._live:
                return
            self._live.remove(engine)
            self._cause = cause
            ray.kill(engine)
            logger.warning("a rollout engine died: %s", cause)
            if self._give_back is not None:
                self._give_back(engine)
            if self._restarts_left:
                self._restarts_left -= 1
                self._restart()

    def _restart(self) -> None:
        try:
            (engine,) = self._start(1)
        except SearchR1Error as error:
            self._cause = f"a new one did not start: {_first_line(error)}"
            return
        self._starting.append(engine)
        threading.Thread(target=self._replace, args=(engine,), name="engine-restart", daemon=True).start()

    def _replace(self, engine: Any) -> None:
        """Let a new engine take part once it has started and has the current weights."""
        try:
            self._wait_ready([engine])
            with self._weights_lock:
                if self._send is not None:
                    self._send([engine])
                if self._sleep_level:
                    fetch(engine.call.remote("sleep", self._sleep_level))
                fetch(engine.ready.remote())
                with self._lock:
                    self._live.append(engine)
        except (RayError, SearchR1Error) as error:
            self._cause = f"a new one did not start: {_first_line(error)}"
        finally:
            with self._lock:
                self._starting.remove(engine)

    def _wait_ready(self, engines: Sequence[Any]) -> None:
        try:
            fetch([engine.ready.remote() for engine in engines], self._start_timeout_s)
        except GetTimeoutError as error:
            raise ConfigError(
                f"{len(engines)} rollout engines did not start within {self._start_timeout_s:g} s; the cluster has "
                f"{resources()}: lower engine.num_engines or engine.tensor_parallel_size, add nodes, or raise "
                "cluster.start_timeout_s where a large model takes longer"
            ) from error

    def _remove_dead(self, engines: Sequence[Any]) -> None:
        for engine, answer in [(engine, engine.ready.remote()) for engine in engines]:
            try:
                ray.get(answer)
            except RayActorError as error:
                self._remove(engine, _first_line(error))

    def _lost_error(self) -> EngineLostError:
        return EngineLostError(f"{_MAX_ATTEMPTS} engines died over the same completion; the last one: {self._cause}")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
