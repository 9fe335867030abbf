"""A run of non-finite steps ends with its batch saved; a single one does not."""

from __future__ import annotations

import pytest

from search_r1.errors import TrainingError
from search_r1.trainer.health import HealthCheck


def health(saved: list[str]) -> HealthCheck:
    def save() -> str:
        saved.append("batch.pt")
        return saved[-1]

    return HealthCheck(max_bad_steps=3, max_parity_error=1.0, save_batch=save)


def test_several_bad_steps_in_a_row_stop_the_run_with_the_batch_saved() -> None:
    saved: list[str] = []
    check = health(saved)
    check({"actor/bad_steps": 1.0}, 1)
    check({"critic/bad_steps": 1.0}, 2)
    assert not saved
    with pytest.raises(TrainingError, match=r"step 3: .* 3 steps in a row; the batch is in batch.pt"):
        check({"actor/bad_steps": 2.0}, 3)
    assert saved == ["batch.pt"]


def test_a_good_step_between_bad_ones_lets_the_run_go_on() -> None:
    saved: list[str] = []
    check = health(saved)
    for step in range(1, 20):
        check({"actor/bad_steps": float(step % 3 != 0)}, step)
    assert not saved
