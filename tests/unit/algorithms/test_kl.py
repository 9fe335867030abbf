from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from search_r1.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    kl_penalty_in_reward,
    token_kl,
)

NAMES = sorted(KL_ESTIMATORS)


@pytest.mark.parametrize("name, value", [("k1", -0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1.0 - 0.5), ("abs", 0.5)])
def test_estimators_by_hand(name: str, value: float) -> None:
    found = KL_ESTIMATORS[name](torch.tensor([-1.0]), torch.tensor([-0.5]))
    assert found.item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
@given(difference=st.floats(-300, 300, width=32))
def test_value_and_gradient_are_finite_for_any_log_ratio(name: str, difference: float) -> None:
    log_probs = torch.tensor([difference], requires_grad=True)
    kl = KL_ESTIMATORS[name](log_probs, torch.zeros(1))
    kl.sum().backward()
    assert log_probs.grad is not None
    assert kl.isfinite().all()
    assert log_probs.grad.isfinite().all()


def test_k3_gradient_is_finite_at_a_log_ratio_of_minus_100() -> None:
    log_probs = torch.tensor([-100.0, 100.0], requires_grad=True)
    KL_ESTIMATORS["k3"](log_probs, torch.zeros(2)).sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("name", ["k2", "k3", "abs"])
def test_estimators_are_zero_at_equality_and_never_negative(name: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 1000)
    assert (KL_ESTIMATORS[name](x, y) >= 0).all()
    assert (KL_ESTIMATORS[name](x, x) == 0).all()


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_kl_of_two_distributions(name: str) -> None:
    """Exact expectation over a small vocabulary instead of sampling."""
    torch.manual_seed(0)
    policy, reference = torch.randn(2, 12, dtype=torch.float64).log_softmax(dim=-1)
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * KL_ESTIMATORS[name](policy, reference)).sum(), exact)


def test_k2_has_the_gradient_of_the_kl_when_sampled_from_the_policy() -> None:
    torch.manual_seed(0)
    reference = torch.randn(12, dtype=torch.float64).log_softmax(dim=-1)
    logits = torch.randn(12, dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(dim=-1)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (k2,) = torch.autograd.grad((policy.exp().detach() * KL_ESTIMATORS["k2"](policy, reference)).sum(), logits)
    torch.testing.assert_close(k2, exact)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, -1e4])
def test_kl_of_observation_tokens_leaks_into_nothing(name: str, garbage: float) -> None:
    mask = torch.tensor([[False, True, False, True]])
    log_probs = torch.tensor([[garbage, -1.0, garbage, -2.0]], requires_grad=True)
    kl = token_kl(log_probs, torch.tensor([[0.0, -1.5, garbage, -1.0]]), mask, name)
    kl.sum().backward()
    assert log_probs.grad is not None
    assert kl[~mask].tolist() == [0.0, 0.0]
    assert log_probs.grad[~mask].tolist() == [0.0, 0.0]
    assert kl.isfinite().all()
    assert log_probs.grad.isfinite().all()


def test_kl_in_the_reward_sits_on_sampled_tokens_only() -> None:
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    mask = torch.tensor([[False, True, False, True]])
    log_probs, ref = torch.tensor([[9.0, -1.0, 9.0, -2.0]]), torch.tensor([[0.0, -1.5, 0.0, -1.0]])
    penalised = kl_penalty_in_reward(rewards, log_probs, ref, mask, coef=0.1, estimator="k1")
    torch.testing.assert_close(penalised, torch.tensor([[0.0, -0.05, 0.0, 1.1]]))


def test_the_adaptive_controller_follows_the_published_rule() -> None:
    controller = AdaptiveKLController(0.2, target=6.0, horizon=1000)
    controller.update(current_kl=6.6, num_steps=100)
    assert controller.value == pytest.approx(0.2 * (1 + 0.1 * 0.1))
    controller.update(current_kl=600.0, num_steps=100)
    assert controller.value == pytest.approx(0.2 * 1.01 * (1 + 0.2 * 0.1))
    controller.update(current_kl=0.0, num_steps=100)
    assert controller.value == pytest.approx(0.2 * 1.01 * 1.02 * (1 - 0.2 * 0.1))


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_one_kl_that_is_not_finite_leaves_the_adaptive_coefficient_as_it_is(broken: float) -> None:
    controller = AdaptiveKLController(0.2, target=6.0, horizon=1000)
    controller.update(broken, 100)
    assert controller.value == 0.2


def test_a_resumed_controller_goes_on_where_it_stood() -> None:
    controller = AdaptiveKLController(0.2, target=6.0, horizon=100)
    controller.update(12.0, 10)
    resumed = AdaptiveKLController(0.2, target=6.0, horizon=100)
    resumed.load_state(controller.state())
    for one in (controller, resumed):
        one.update(3.0, 10)
    assert resumed.value == controller.value != 0.2


def test_the_fixed_controller_stays() -> None:
    controller = FixedKLController(0.001)
    controller.update(100.0, 1000)
    controller.load_state({"value": 5.0})
    assert controller.value == 0.001
