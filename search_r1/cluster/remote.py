"""The protocols over workers: scatter, call, gather. With one worker or many, the numbers are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import torch
from torch import Tensor

from search_r1.cluster.partition import gather, pad_to_multiple, scatter, trim
from search_r1.cluster.worker_group import WorkerGroup, fetch
from search_r1.data.micro_batches import balance, lengths_of, make_shares, select_rows
from search_r1.protocols import Metrics, Weights
from search_r1.types import Completion, RolloutBatch, SamplingConfig, TrainBatch


class _Scored:
    """Rows scattered to the workers by length, answers put back in place."""

    def __init__(self, group: WorkerGroup, role: str) -> None:
        self.group = group
        self.role = role

    def _score(self, method: str, batch: RolloutBatch) -> Tensor:
        parts = balance(lengths_of(batch), len(self.group))
        answers = self.group.each(self.role, method, [select_rows(batch, rows) for rows in parts])
        result = torch.zeros(batch.input_ids.shape, dtype=torch.float32)
        for rows, answer in zip(parts, answers, strict=True):
            if rows:
                result[rows, : answer.shape[1]] = answer
        return result


class RemoteReference(_Scored):
    def __init__(self, group: WorkerGroup) -> None:
        super().__init__(group, "reference")

    def log_probs(self, batch: RolloutBatch) -> Tensor:
        return self._score("log_probs", batch)


class _Trained(_Scored):
    def __init__(self, group: WorkerGroup, role: str, rows_per_mini_batch: int) -> None:
        super().__init__(group, role)
        self.rows_per_mini_batch = rows_per_mini_batch

    def update(self, batch: TrainBatch) -> Metrics:
        shares = make_shares(batch, self.rows_per_mini_batch, len(self.group))
        metrics: Metrics = self.group.each(self.role, "update_shares", shares)[0]
        return metrics

    def save(self, folder: str) -> None:
        self.group.all(self.role, "save", folder)

    def load(self, folder: str) -> None:
        self.group.all(self.role, "load", folder)


class RemotePolicy(_Trained):
    def __init__(self, group: WorkerGroup, rows_per_mini_batch: int) -> None:
        super().__init__(group, "policy", rows_per_mini_batch)

    def log_probs(self, batch: RolloutBatch) -> Tensor:
        return self._score("log_probs", batch)

    def save_pretrained(self, path: str) -> None:
        self.group.all("policy", "save_pretrained", path)


class RemoteCritic(_Trained):
    def __init__(self, group: WorkerGroup, rows_per_mini_batch: int) -> None:
        super().__init__(group, "critic", rows_per_mini_batch)

    def values(self, batch: RolloutBatch) -> Tensor:
        return self._score("values", batch)


class WorkerEngines:
    """The HF engines inside the training workers as one engine, in lockstep."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group

    def generate(
        self, contexts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        return _lockstep([w.call for w in self.group.workers], ("engine", "generate"), contexts, sampling, seeds)

    def load_weights(self, weights: Weights) -> None:
        self.group.all("engine", "load_weights", list(weights))

    def close(self) -> None:
        self.group.all("engine", "close")


class ActorEngines:
    """Engines in actors of their own (vLLM) as one engine, in lockstep."""

    def __init__(self, engines: list[Any]) -> None:
        self.engines = engines

    def generate(
        self, contexts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        return _lockstep([engine.generate for engine in self.engines], (), contexts, sampling, seeds)

    def load_weights(self, weights: Weights) -> None:
        bucket = ray.put(list(weights))
        fetch([engine.receive_weights.remote([bucket]) for engine in self.engines])
        fetch([engine.finish_weights.remote() for engine in self.engines])

    def close(self) -> None:
        fetch([engine.close.remote() for engine in self.engines])
        for engine in self.engines:
            ray.kill(engine)


def _lockstep(
    methods: Sequence[Any],
    prefix: tuple[str, ...],
    contexts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    seeds: Sequence[int],
) -> list[Completion]:
    """Pad to a multiple of the engines, scatter, generate, gather, trim."""
    if not contexts:
        return []
    count = len(methods)
    parts = scatter(pad_to_multiple(list(zip(contexts, seeds, strict=True)), count), count)
    calls = [
        method.remote(*prefix, [c for c, _ in part], sampling, [s for _, s in part])
        for method, part in zip(methods, parts, strict=True)
    ]
    return trim(gather(fetch(calls)), len(contexts))


class LocalEngineSync:
    """Policy to the engine of the same worker, on every worker."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group

    def __call__(self) -> Metrics:
        self.group.sync_local_engines()
        return {}


class StreamingSync:
    """Policy to engine actors, in buckets."""

    def __init__(self, group: WorkerGroup, engines: list[Any]) -> None:
        self.group = group
        self.engines = engines

    def __call__(self) -> Metrics:
        self.group.stream_weights(self.engines)
        return {}
