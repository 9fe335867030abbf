"""How a batch is cut: mini-batches (one optimizer step), shares (one worker), micro-batches (one forward pass).

Every cut carries the counts of the whole mini-batch, so that the gradient does not depend on how it was cut.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from search_r1.types import RolloutBatch, TrainBatch

logger = logging.getLogger(__name__)
BatchT = TypeVar("BatchT", RolloutBatch, TrainBatch)


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's rows of one mini-batch, with the counts of the whole mini-batch over all workers."""

    batch: TrainBatch
    num_tokens: int
    """Sampled tokens of the mini-batch."""
    num_sequences: int
    """Trajectories of the mini-batch with at least one sampled token."""


def select_rows(batch: BatchT, rows: Sequence[int]) -> BatchT:
    """The given rows, cut to their effective length: no column remains that is padding for every row."""
    index = torch.as_tensor(rows, dtype=torch.long)
    rollout = batch if isinstance(batch, RolloutBatch) else batch.rollout
    length = int(rollout.attention_mask[index].sum(dim=1).max()) if len(rows) else 0

    def cut(value: Any) -> Any:
        if isinstance(value, RolloutBatch):
            return select_rows(value, rows)
        if not isinstance(value, Tensor):
            return value
        return value[index, :length] if value.dim() == 2 else value[index]

    return replace(batch, **{f.name: cut(getattr(batch, f.name)) for f in fields(batch)})


def lengths_of(batch: RolloutBatch) -> list[int]:
    """Tokens of each row, padding left out."""
    lengths: list[int] = batch.attention_mask.sum(dim=1).tolist()
    return lengths


def mini_batch_rows(num_rows: int, rows_per_mini_batch: int) -> list[list[int]]:
    """Consecutive runs of at most `rows_per_mini_batch` rows, as even as can be; nothing is dropped.

    >>> mini_batch_rows(5, 2)
    [[0, 1], [2, 3], [4]]
    """
    count = -(-num_rows // rows_per_mini_batch)
    bounds = [-(-num_rows * i // count) for i in range(count + 1)] if count else [0]
    return [list(range(a, b)) for a, b in itertools.pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """What one pass over a sequence costs, up to a factor: every token meets every weight, and half of the others.

    cost(L) = linear * L + quadratic * L^2
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def __call__(self, length: int) -> float:
        return self.linear * length + self.quadratic * length**2


def balance(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Rows dealt to `num_parts` parts of nearly equal total cost (largest first to the lightest part).

    Parts may be empty when there are fewer rows than parts; each part keeps its rows in ascending order.
    """
    heap = [(0.0, part) for part in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for row in sorted(range(len(costs)), key=lambda r: (-costs[r], r)):
        total, part = heapq.heappop(heap)
        parts[part].append(row)
        heapq.heappush(heap, (total + costs[row], part))
    return [sorted(part) for part in parts]


def make_shares(
    batch: TrainBatch, rows_per_mini_batch: int, num_workers: int, cost: SequenceCost | None = None
) -> list[list[Share]]:
    """Cut a batch into mini-batches and deal each to the workers by cost (by length where none is given).

    Returns:
        One list a worker, one share a mini-batch.
    """
    costs = [(cost or SequenceCost())(length) for length in lengths_of(batch.rollout)]
    sampled = batch.rollout.loss_mask.sum(dim=1)
    shares: list[list[Share]] = [[] for _ in range(num_workers)]
    for rows in mini_batch_rows(len(costs), rows_per_mini_batch):
        num_tokens = int(sampled[rows].sum())
        num_sequences = int((sampled[rows] > 0).sum())
        for worker, part in enumerate(balance([costs[r] for r in rows], num_workers)):
            share = select_rows(batch, [rows[i] for i in part])
            shares[worker].append(Share(share, num_tokens, num_sequences))
    return shares


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows share a forward pass: padded to the longest, or packed end to end; at most `max_tokens` either way."""

    max_tokens: int
    packed: bool = False

    def rows(self, batch: RolloutBatch) -> list[list[int]]:
        """The rows of each micro-batch."""
        cut = packed_rows if self.packed else micro_batch_rows
        return cut(lengths_of(batch), self.max_tokens)

    def lengths(self, batch: RolloutBatch) -> Tensor | None:
        """(B,) int64 for a packed forward pass, None for a padded one."""
        return batch.attention_mask.sum(dim=1) if self.packed else None


def packed_rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows into micro-batches of at most `max_tokens` tokens, longest first into the first that has room
    (first-fit decreasing: never more than 11/9 of the fewest possible, plus one).

    The cap is hard, as in `micro_batch_rows`.
    """
    groups: list[list[int]] = []
    free: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        place = next((i for i, room in enumerate(free) if lengths[row] <= room), None)
        if place is None:
            _warn_above_cap(lengths[row], max_tokens)
            place = len(groups)
            groups.append([])
            free.append(max_tokens)
        groups[place].append(row)
        free[place] -= lengths[row]
    return groups


def micro_batch_rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows sorted by length into micro-batches whose padded size (rows x longest) stays within `max_tokens`.

    The cap is hard: a row longer than it goes alone, with a warning. No rows: no micro-batches.
    """
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        if groups and (len(groups[-1]) + 1) * longest <= max_tokens:
            groups[-1].append(row)
            continue
        longest = max(lengths[row], 1)
        _warn_above_cap(longest, max_tokens)
        groups.append([row])
    return groups


def _warn_above_cap(length: int, max_tokens: int) -> None:
    if length > max_tokens:
        logger.warning(
            "a sequence of %d tokens exceeds max_tokens_per_micro_batch=%d and goes alone", length, max_tokens
        )
