"""Stopping before a broken run wastes a night: non-finite losses, and an engine that disagrees with the trainer."""

from __future__ import annotations

from collections.abc import Callable

from search_r1.errors import TrainingError
from search_r1.protocols import Metrics


class HealthCheck:
    """Looks at every step's metrics."""

    def __init__(
        self,
        max_bad_steps: int,
        max_parity_error: float,
        save_batch: Callable[[], str],
        explain: Callable[[], str] = lambda: "stale weights or another precision",
    ) -> None:
        """
        Args:
            save_batch: writes the present batch for a post-mortem and returns its path.
            explain: why engine and trainer differ.
        """
        self._explain = explain
        self._max_bad_steps = max_bad_steps
        self._max_parity_error = max_parity_error
        self._save_batch = save_batch
        self._bad_in_a_row = 0

    def __call__(self, metrics: Metrics, step: int) -> None:
        """
        Raises:
            TrainingError: `max_bad_steps` steps in a row had a non-finite loss or gradient, or engine and trainer
                log-probs of the same tokens differ by more than `max_parity_error` on average.
        """
        bad = metrics.get("actor/bad_steps", 0.0) + metrics.get("critic/bad_steps", 0.0)
        self._bad_in_a_row = self._bad_in_a_row + 1 if bad else 0
        if self._bad_in_a_row >= self._max_bad_steps:
            raise TrainingError(
                f"step {step}: loss or gradient was not finite in {self._bad_in_a_row} steps in a row; the batch is in "
                f"{self._save_batch()}; lower the learning rate or look at the rewards"
            )
        gap = metrics.get("actor/rollout_log_prob_gap", 0.0)
        if gap > self._max_parity_error:
            raise TrainingError(
                f"step {step}: engine and trainer log-probs of the tokens it sampled differ by {gap:.3g} on average, "
                f"above engine.max_parity_error={self._max_parity_error}: {self._explain()}; batch in "
                f"{self._save_batch()}"
            )
