"""The training workers as one thing: built together, called together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from search_r1.cluster.placement import reserve, worker_environment
from search_r1.cluster.worker import EngineWorker, Factory, Worker
from search_r1.config import ClusterConfig
from search_r1.errors import SearchR1Error, TrainingError
from search_r1.types import RolloutBatch

logger = logging.getLogger(__name__)
_CONTROL_CALLS = 8
"""Room for weights and health beside the completions of an engine."""


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
        bundle: dict[str, float] = {"CPU": config.cpus_per_worker}
        if config.gpus_per_worker:
            bundle["GPU"] = config.gpus_per_worker
        self.placement = reserve([bundle] * config.num_workers, config.start_timeout_s)
        self._turn = threading.Lock()
        self.workers = [self._start(config, bundle, rank) for rank in range(config.num_workers)]
        address, port = fetch(self.workers[0].rendezvous.remote())
        fetch([worker.build.remote(address, port, factory) for worker in self.workers])

    def _start(self, config: ClusterConfig, bundle: dict[str, float], rank: int) -> Any:
        return Worker.options(  # type: ignore[attr-defined]
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.placement, placement_group_bundle_index=rank),
            runtime_env={"env_vars": worker_environment(config.cpus_per_worker)},
        ).remote(rank, config.num_workers)

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

    def sync_local_engines(self) -> None:
        self._call(lambda rank, worker: worker.sync_local_engine.remote())

    def stream_weights(self, engines: list[Any]) -> None:
        self._call(lambda rank, worker: worker.stream_weights.remote(engines))

    def _call(self, submit: Callable[[int, Any], Any]) -> list[Any]:
        """One call a worker. Threads take turns to submit: the workers' collectives must meet in one order."""
        with self._turn:
            calls = [submit(rank, worker) for rank, worker in enumerate(self.workers)]
        answers: list[Any] = fetch(calls)
        return answers

    def close(self) -> None:
        for worker in self.workers:
            ray.kill(worker)
        ray.util.remove_placement_group(self.placement)


def start_engines(config: ClusterConfig, max_calls: int, gpus: float, factory: Any, count: int) -> list[Any]:
    """`count` engine actors, each in a process of its own that takes `max_calls` completions at once. They may not be
    ready yet."""
    return [
        EngineWorker.options(  # type: ignore[attr-defined]
            num_cpus=1 if gpus else 0,
            num_gpus=gpus,
            max_concurrency=2 * max_calls + _CONTROL_CALLS,  # routing may lean to one engine
            runtime_env={"env_vars": worker_environment(config.cpus_per_worker)},
        ).remote(factory)
        for _ in range(count)
    ]
