"""Supervised fine-tuning over workers: every batch is dealt to all of them, and they step together."""

from __future__ import annotations

from collections.abc import Sequence

from search_r1.cluster.worker_group import WorkerGroup
from search_r1.data.micro_batches import SequenceCost
from search_r1.data.sft_examples import SFTExample, share_examples
from search_r1.protocols import Metrics


class RemoteLearner:
    """The `policy` role of a worker group, a `SupervisedPolicy`, as one learner."""

    def __init__(self, group: WorkerGroup, cost: SequenceCost) -> None:
        self.group = group
        self.cost = cost

    def update(self, examples: Sequence[SFTExample]) -> Metrics:
        shares = share_examples(examples, len(self.group), self.cost)
        metrics: Metrics = self.group.each("policy", "update_share", shares)[0]
        return metrics

    def loss(self, examples: Sequence[SFTExample]) -> float:
        shares = share_examples(examples, len(self.group), self.cost)
        return float(self.group.each("policy", "loss_share", shares)[0])

    def save(self, folder: str) -> None:
        self.group.all("policy", "save", folder)

    def load(self, folder: str) -> None:
        self.group.all("policy", "load", folder)

    def save_pretrained(self, path: str) -> None:
        self.group.all("policy", "save_pretrained", path)
