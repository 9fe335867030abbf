"""The training workers as one thing: built together, called together."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from search_r1.cluster.placement import EnginePlaces, Home, Place, reserve, worker_bundle, worker_environment
from search_r1.cluster.worker import EngineWorker, Factory, Worker
from search_r1.config import ClusterConfig
from search_r1.errors import ConfigError, SearchR1Error, TrainingError
from search_r1.types import RolloutBatch

logger = logging.getLogger(__name__)
_CONTROL_CALLS = 8
"""Room for weights and health beside the completions of an engine."""
_DEATH_NOTICE_S = 90.0
"""Longest a cluster takes to notice that a node left, which the other workers feel at once."""


def fetch(references: Any, timeout_s: float | None = None) -> Any:
    """`ray.get` that raises our own errors as themselves, and names a dead worker.

    Raises:
        SearchR1Error: what the worker raised.
        TrainingError: a worker process died.
        GetTimeoutError: nothing came within `timeout_s`.
    """
    try:
        return ray.get(references, timeout=timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, SearchR1Error):
            raise error.cause from error
        raise
    except RayActorError as error:
        lines = str(error).splitlines()
        if "creation task" in lines[0]:
            raise TrainingError(f"a worker process did not start: {lines[-1].strip()}") from error
        raise TrainingError(
            f"a worker process died ({lines[0]}): out of memory, or its node left; "
            "start the same command again to go on from the last checkpoint"
        ) from error


class WorkerGroup:
    """`num_workers` ranks in one process group, one placement group."""

    def __init__(self, config: ClusterConfig, factory: Factory) -> None:
        bundle = worker_bundle(config)
        remedy = "lower cluster.num_workers, cpus_per_worker or gpus_per_worker"
        self.placement = reserve([bundle] * config.num_workers, config.start_timeout_s, remedy)
        self._turn = threading.Lock()
        self.workers = [self._start(config, rank) for rank in range(config.num_workers)]
        self.homes: list[Home] = fetch([worker.home.remote() for worker in self.workers])
        address, port = fetch(self.workers[0].rendezvous.remote())
        self._call(lambda rank, worker: worker.build.remote(address, port, factory))

    def _start(self, config: ClusterConfig, rank: int) -> Any:
        return Worker.options(  # type: ignore[attr-defined]
            num_cpus=config.cpus_per_worker,
            num_gpus=config.gpus_per_worker,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.placement, placement_group_bundle_index=rank),
            runtime_env={"env_vars": worker_environment(config.cpus_per_worker)},
        ).remote(rank, config.num_workers)

    def check_shared(self, folder: Path) -> None:
        """Workers write checkpoints and read them again, so a file that the driver makes must be there for all.

        Raises:
            ConfigError: a node that lacks it.
        """
        while not folder.is_dir():
            folder = folder.parent
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".seen-by-all-nodes-") as probe:
            seen = self._call(lambda rank, worker: worker.sees.remote(probe.name))
        if not all(seen):
            blind = sorted({home.node_id for home, sees in zip(self.homes, seen, strict=True) if not sees})
            raise ConfigError(
                f"the nodes {', '.join(blind)} do not see {folder}, where the run's checkpoints are to be: set run_dir "
                "(in fine-tuning output_dir) to a folder on a filesystem that all nodes share"
            )

    def __len__(self) -> int:
        return len(self.workers)

    def all(self, role: str, method: str, *args: Any) -> list[Any]:
        """The same call on every worker, answers by rank."""
        return self._call(lambda rank, worker: worker.call.remote(role, method, *args))

    def each(self, role: str, method: str, arguments: Sequence[Any]) -> list[Any]:
        """One argument a worker, answers by rank."""
        assert len(arguments) == len(self.workers), f"{len(arguments)} arguments for {len(self.workers)} workers"
        return self._call(lambda rank, worker: worker.call.remote(role, method, arguments[rank]))

    def score(self, batches: Sequence[RolloutBatch], roles: Sequence[str]) -> list[dict[str, Tensor]]:
        """One batch a worker, what its roles say of it, by rank."""
        return self._call(lambda rank, worker: worker.score.remote(batches[rank], roles))

    def offload(self) -> None:
        self._call(lambda rank, worker: worker.offload.remote())

    def _call(self, submit: Callable[[int, Any], Any]) -> list[Any]:
        """One call a worker. Threads take turns to submit: the workers' collectives must meet in one order."""
        with self._turn:
            calls = [submit(rank, worker) for rank, worker in enumerate(self.workers)]
        try:
            answers: list[Any] = fetch(calls)
        except RayTaskError:
            _raise_first_death(calls)
            raise
        return answers

    def close(self) -> None:
        for worker in self.workers:
            ray.kill(worker)
        ray.util.remove_placement_group(self.placement)


def _raise_first_death(calls: Sequence[Any]) -> None:
    """A worker that dies breaks the connections of the others, whose complaints come before the news of its death.

    Raises:
        TrainingError: one of them died.
    """
    ray.wait(list(calls), num_returns=len(calls), timeout=_DEATH_NOTICE_S)
    for call in calls:
        with suppress(RayTaskError, GetTimeoutError):
            fetch(call, timeout_s=0)


def start_engines(
    config: ClusterConfig, max_calls: int, places: EnginePlaces, factories: Iterator[Any], count: int
) -> list[Any]:
    """`count` engine actors, each in a process of its own that takes `max_calls` completions at once, made by the next
    of `factories`. They may not be ready yet."""

    def start(place: Place) -> Any:
        return EngineWorker.options(  # type: ignore[attr-defined]
            num_cpus=1 if place.gpus else 0,
            num_gpus=place.gpus,
            memory=None if place.gpus else 1,  # a byte: Ray heeds no soft wish of what needs nothing
            max_concurrency=2 * max_calls + _CONTROL_CALLS,  # routing may lean to one engine
            scheduling_strategy=place.strategy,
            runtime_env={"env_vars": worker_environment(config.cpus_per_worker)},
        ).remote(next(factories), place.shared_gpus)

    return [places.take(start) for _ in range(count)]
