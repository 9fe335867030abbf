"""The loop of supervised fine-tuning: a fixed plan of batches, one optimizer step each."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from search_r1.data.micro_batches import micro_batch_rows
from search_r1.data.sft_examples import SFTExample
from search_r1.errors import TrainingError
from search_r1.protocols import Metrics
from search_r1.sft_config import SFTTrainingConfig

logger = logging.getLogger(__name__)
_ROWS_SORTED_TOGETHER = 1024


class Learner(Protocol):
    def update(self, examples: Sequence[SFTExample]) -> Metrics:
        """One optimizer step."""
        ...

    def loss(self, examples: Sequence[SFTExample]) -> float:
        """Mean negative log-likelihood, nothing learned."""
        ...


def plan_batches(lengths: Sequence[int], config: SFTTrainingConfig, seed: int) -> list[list[int]]:
    """The rows of every optimizer step of the run, epoch after epoch; the same for the same seed.

    Rows are shuffled, sorted by length within large chunks and cut into batches of at most `batch_tokens` padded
    tokens, which are shuffled again: little padding, and no order by length over time. An epoch shows each row once.
    """
    rng = random.Random(seed)
    plan: list[list[int]] = []
    for epoch in count():
        if len(plan) >= config.total_steps if config.total_steps is not None else epoch >= config.epochs:
            break
        order = list(range(len(lengths)))
        rng.shuffle(order)
        batches = []
        for start in range(0, len(order), _ROWS_SORTED_TOGETHER):
            rows = order[start : start + _ROWS_SORTED_TOGETHER]
            groups = micro_batch_rows([lengths[row] for row in rows], config.batch_tokens)
            batches += [[rows[i] for i in group] for group in groups]
        rng.shuffle(batches)
        plan += batches
    return plan if config.total_steps is None else plan[: config.total_steps]


def run_sft(
    learner: Learner,
    examples: Sequence[SFTExample],
    validation: Sequence[SFTExample],
    plan: Sequence[Sequence[int]],
    config: SFTTrainingConfig,
    report: Callable[[Metrics, int], None],
) -> None:
    """Take every step of `plan`; `report` receives `sft/…` and `validation/loss` with the step's number (from 1).

    Raises:
        TrainingError: `max_bad_steps` non-finite steps in a row.
    """
    bad_in_a_row = 0
    for step, rows in enumerate(plan, start=1):
        metrics = learner.update([examples[row] for row in rows])
        bad_in_a_row = bad_in_a_row + 1 if metrics["bad_step"] else 0
        if bad_in_a_row >= config.max_bad_steps:
            raise TrainingError(
                f"step {step}: {bad_in_a_row} non-finite losses or gradients in a row: is optim.lr too high?"
            )
        named = {f"sft/{name}": value for name, value in metrics.items()}
        every = config.validate_every_steps
        if validation and (step == len(plan) or (every and step % every == 0)):
            named["validation/loss"] = learner.loss(validation)
        report(named, step)
