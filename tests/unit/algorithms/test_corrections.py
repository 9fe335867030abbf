from __future__ import annotations

import math

import pytest
import torch

from search_r1.algorithms.corrections import (
    credible_tokens,
    mismatch_kl,
    truncated_importance_weights,
    truncated_share,
)

MASK = torch.tensor([[True, True, False, True]])
ROLLOUT = torch.tensor([[-1.0, -1.0, math.nan, -2.0]])
OLD = ROLLOUT + torch.tensor([[0.5, 1.0, 1.0, 4.0]]).log()
"""Ratios old / rollout of 0.5, 1, (observation), 4."""


def test_weights_are_ratios_cut_at_the_cap_and_zero_on_observations() -> None:
    weights = truncated_importance_weights(OLD, ROLLOUT, MASK, cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([[0.5, 1.0, 0.0, 2.0]]))


def test_the_same_policy_needs_no_correction() -> None:
    weights = truncated_importance_weights(OLD, OLD, MASK, cap=2.0)
    assert weights.tolist() == [[1.0, 1.0, 0.0, 1.0]]
    assert mismatch_kl(OLD, OLD, MASK) == 0
    assert truncated_share(OLD, OLD, MASK, cap=2.0) == 0


@pytest.mark.parametrize("difference", [-300.0, 300.0])
def test_weights_stay_finite_for_any_mismatch_and_carry_no_gradient(difference: float) -> None:
    old = torch.full((1, 4), difference, requires_grad=True)
    weights = truncated_importance_weights(old, torch.zeros(1, 4), MASK, cap=2.0)
    assert weights.isfinite().all()
    assert not weights.requires_grad


def test_extreme_ratios_can_be_masked() -> None:
    assert credible_tokens(OLD, ROLLOUT, MASK, low=0.6, high=5.0).tolist() == [[False, True, False, True]]
    assert credible_tokens(OLD, ROLLOUT, MASK, low=0.4, high=2.0).tolist() == [[True, True, False, False]]


def test_mismatch_metrics_speak_of_sampled_tokens_only() -> None:
    expected = sum(ratio - 1 - math.log(ratio) for ratio in (0.5, 1.0, 4.0)) / 3
    assert mismatch_kl(OLD, ROLLOUT, MASK).item() == pytest.approx(expected, abs=1e-6)
    assert truncated_share(OLD, ROLLOUT, MASK, cap=2.0).item() == pytest.approx(1 / 3)
