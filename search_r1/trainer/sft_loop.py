"""The loop of supervised fine-tuning: a fixed plan of batches, one optimizer step each."""

from __future__ import annotations

import logging
import math
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

    def save(self, folder: str) -> None:
        """What going on exactly needs, as `Policy.save`."""
        ...

    def load(self, folder: str) -> None: ...

    def save_pretrained(self, path: str) -> None:
        """A plain Hugging Face folder."""
        ...


def plan_batches(lengths: Sequence[int], config: SFTTrainingConfig, seed: int) -> list[list[int]]:
    """The rows of every optimizer step of the run, epoch after epoch; the same for the same seed.

    Rows are shuffled and cut into batches of `batch_size`. Without it they are sorted by length within large chunks and
    cut into batches of at most `batch_tokens` padded tokens, which are shuffled again: little padding, and no order by
    length over time. An epoch shows each row once; a last part of an epoch is that part of its batches.
    """
    rng = random.Random(seed)
    plan: list[list[int]] = []
    for epoch in count():
        if len(plan) >= config.total_steps if config.total_steps is not None else epoch >= config.epochs:
            break
        order = list(range(len(lengths)))
        rng.shuffle(order)
        batches = _cut(order, lengths, config, rng)
        part = 1.0 if config.total_steps is not None else min(1.0, config.epochs - epoch)
        plan += batches[: math.ceil(part * len(batches))]
    return plan if config.total_steps is None else plan[: config.total_steps]


def _cut(order: list[int], lengths: Sequence[int], config: SFTTrainingConfig, rng: random.Random) -> list[list[int]]:
    if config.batch_size is not None:
        return [order[start : start + config.batch_size] for start in range(0, len(order), config.batch_size)]
    batches = []
    for start in range(0, len(order), _ROWS_SORTED_TOGETHER):
        rows = order[start : start + _ROWS_SORTED_TOGETHER]
        groups = micro_batch_rows([lengths[row] for row in rows], config.batch_tokens)
        batches += [[rows[i] for i in group] for group in groups]
    rng.shuffle(batches)
    return batches


def run_sft(
    learner: Learner,
    examples: Sequence[SFTExample],
    validation: Sequence[SFTExample],
    plan: Sequence[Sequence[int]],
    config: SFTTrainingConfig,
    report: Callable[[Metrics, int], None],
    first_step: int = 1,
) -> None:
    """Take every step of `plan`; `report` receives `sft/…` and `validation/loss` with the step's number (from 1).

    `first_step` is above 1 where a run goes on.

    Raises:
        TrainingError: `max_bad_steps` non-finite steps in a row.
    """
    bad_in_a_row = 0
    for step, rows in enumerate(plan[first_step - 1 :], start=first_step):
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
