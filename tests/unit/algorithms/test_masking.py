from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from search_r1.algorithms.masking import MAX_LOG_RATIO, masked_mean, masked_ratio, masked_sum, masked_whiten


def test_masked_mean_counts_only_what_the_mask_holds() -> None:
    x = torch.tensor([[1.0, 100.0, 3.0], [5.0, 100.0, 100.0]])
    mask = torch.tensor([[1, 0, 1], [1, 0, 0]]).bool()
    assert masked_sum(x, mask) == 9.0
    assert masked_mean(x, mask) == 3.0


def test_mean_without_any_sampled_token_is_zero_and_not_nan() -> None:
    x = torch.full((2, 3), math.nan, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mean = masked_mean(x, mask)
    mean.backward()
    assert mean == 0.0
    assert x.grad is not None
    assert (x.grad == 0).all()
    assert (masked_whiten(x.detach(), mask) == 0).all()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_whitening_never_sees_observation_tokens(garbage: float) -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(4, 7), torch.rand(4, 7) > 0.5
    whitened = masked_whiten(x.where(mask, garbage), mask)
    sampled = x[mask].double()
    expected = (sampled - sampled.mean()) / sampled.var(correction=0).sqrt()
    torch.testing.assert_close(whitened[mask], expected.float(), rtol=1e-5, atol=1e-6)
    assert (whitened[~mask] == 0).all()


def test_whitening_equal_values_gives_zero() -> None:
    x = torch.full((3, 5), 0.1 + 0.2)
    assert masked_whiten(x, torch.ones(3, 5, dtype=torch.bool)).abs().max() < 1e-6


@given(st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=20))
def test_ratio_and_its_gradient_are_finite_for_any_pair_of_log_probs(log_ratios: list[float]) -> None:
    log_probs = torch.tensor(log_ratios, requires_grad=True)
    mask = torch.ones(len(log_ratios), dtype=torch.bool)
    ratio = masked_ratio(log_probs, torch.zeros(len(log_ratios)), mask)
    ratio.sum().backward()
    assert log_probs.grad is not None
    assert ratio.isfinite().all()
    assert log_probs.grad.isfinite().all()
    expected = [math.exp(min(r, MAX_LOG_RATIO)) for r in log_ratios]
    torch.testing.assert_close(ratio.detach(), torch.tensor(expected), rtol=1e-4, atol=1e-30)
