"""The protocols over workers: scatter, call, gather. With one worker or many, the numbers are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from search_r1.cluster.engine_pool import EnginePool
from search_r1.cluster.partition import gather, pad_to_multiple, scatter, trim
from search_r1.cluster.worker_group import WorkerGroup, fetch
from search_r1.data.micro_batches import SequenceCost, balance, lengths_of, make_shares, select_rows
from search_r1.protocols import Metrics, Weights
from search_r1.types import Completion, RolloutBatch, SamplingConfig, TrainBatch


class RemoteScorer:
    """Rows dealt to the workers by cost, once for all roles; answers put back in place."""

    def __init__(self, group: WorkerGroup, cost: SequenceCost) -> None:
        self.group = group
        self.cost = cost

    def __call__(self, batch: RolloutBatch, roles: Sequence[str]) -> dict[str, Tensor]:
        parts = balance([self.cost(length) for length in lengths_of(batch)], len(self.group))
        answers = self.group.score([select_rows(batch, rows) for rows in parts], roles)
        scores = {name: torch.zeros(batch.input_ids.shape, dtype=torch.float32) for name in roles}
        for rows, answer in zip(parts, answers, strict=True):
            for name, values in answer.items():
                scores[name][rows, : values.shape[1]] = values
        return scores


class RemoteReference:
    def __init__(self, scorer: RemoteScorer) -> None:
        self.scorer = scorer

    def log_probs(self, batch: RolloutBatch) -> Tensor:
        return self.scorer(batch, ["reference"])["reference"]


class _Trained:
    def __init__(self, scorer: RemoteScorer, role: str, rows_per_mini_batch: int) -> None:
        self.scorer = scorer
        self.group = scorer.group
        self.role = role
        self.rows_per_mini_batch = rows_per_mini_batch

    def update(self, batch: TrainBatch) -> Metrics:
        shares = make_shares(batch, self.rows_per_mini_batch, len(self.group), self.scorer.cost)
        metrics: Metrics = self.group.each(self.role, "update_shares", shares)[0]
        return metrics

    def save(self, folder: str) -> None:
        self.group.all(self.role, "save", folder)

    def load(self, folder: str) -> None:
        self.group.all(self.role, "load", folder)


class RemotePolicy(_Trained):
    def __init__(self, scorer: RemoteScorer, rows_per_mini_batch: int) -> None:
        super().__init__(scorer, "policy", rows_per_mini_batch)

    def log_probs(self, batch: RolloutBatch) -> Tensor:
        return self.scorer(batch, ["policy"])["policy"]

    def save_pretrained(self, path: str) -> None:
        self.group.all("policy", "save_pretrained", path)


class RemoteCritic(_Trained):
    def __init__(self, scorer: RemoteScorer, rows_per_mini_batch: int) -> None:
        super().__init__(scorer, "critic", rows_per_mini_batch)

    def values(self, batch: RolloutBatch) -> Tensor:
        return self.scorer(batch, ["critic"])["critic"]


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

    def score_each(self, *args: Any) -> list[list[list[float]]]:
        """What every worker's engine scores."""
        return self.group.all("engine", "score", *args)

    def forget(self) -> None:
        self.group.all("engine", "forget")

    def close(self) -> None:
        self.group.all("engine", "close")


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

    def __call__(self, edit: str = "") -> Metrics:
        self.group.all("sender", "send", [], edit)
        return {}


class StreamingSync:
    """Policy to engine actors, in buckets."""

    def __init__(self, group: WorkerGroup, pool: EnginePool) -> None:
        self.group = group
        self.pool = pool

    def __call__(self, edit: str = "") -> Metrics:
        self.pool.update_weights(lambda engines: self.group.all("sender", "send", engines, edit))
        return {}
