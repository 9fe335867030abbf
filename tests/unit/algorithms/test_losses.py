from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from search_r1.algorithms.losses import entropy_loss, kl_loss, policy_loss, token_weights, value_loss

AGGREGATIONS = ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"]


@dataclass
class Case:
    """Random token tensors of one mini-batch; `log_probs` doubles as values and entropy."""

    log_probs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor

    def weights(self, aggregation: str) -> Tensor:
        return token_weights(self.mask, aggregation, int(self.mask.sum()), int(self.mask.any(dim=1).sum()))


def make_case(seed: int = 0, rows: int = 6, columns: int = 8) -> Case:
    generator = torch.Generator().manual_seed(seed)
    log_probs, noise, advantages = torch.randn(3, rows, columns, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, columns, generator=generator) > 0.5
    mask[0] = False
    return Case(log_probs, log_probs + 0.4 * noise, advantages, mask)


def policy_loss_oracle(case: Case, weights: Tensor, low: float, high: float, dual: float | None) -> float:
    """The textbook formula, token by token in plain Python."""
    total = 0.0
    for row, column in case.mask.nonzero().tolist():
        advantage = case.advantages[row, column].item()
        ratio = math.exp(case.log_probs[row, column].item() - case.old[row, column].item())
        objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        if dual is not None and advantage < 0:
            objective = max(objective, dual * advantage)
        total -= objective * weights[row, column].item()
    return total


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("low, high, dual", [(0.2, None, None), (0.2, 0.28, None), (0.2, None, 1.5), (0.1, 0.5, 3.0)])
def test_policy_loss_matches_a_loop_over_tokens(
    aggregation: str, low: float, high: float | None, dual: float | None
) -> None:
    case = make_case()
    weights = case.weights(aggregation)
    loss, _ = policy_loss(
        case.log_probs, case.old, case.advantages, case.mask,
        clip_ratio=low, clip_ratio_high=high, dual_clip=dual, weights=weights,
    )  # fmt: skip
    assert loss.item() == pytest.approx(policy_loss_oracle(case, weights, low, high or low, dual), abs=1e-6)


def total_loss(case: Case, log_probs: Tensor, weights: Tensor, rows: slice) -> Tensor:
    """Every loss of this file added up, over some rows of a mini-batch."""
    mask, part = case.mask[rows], weights[rows]
    policy, _ = policy_loss(
        log_probs[rows], case.old[rows], case.advantages[rows], mask, clip_ratio=0.2, dual_clip=3.0, weights=part
    )
    value, _ = value_loss(log_probs[rows], case.old[rows], case.advantages[rows], mask, clip_value=0.3, weights=part)
    kl, _ = kl_loss(log_probs[rows], case.old[rows], mask, weights=part, estimator="k3")
    entropy, _ = entropy_loss(log_probs[rows] ** 2, mask, weights=part)
    return policy + value + kl + entropy


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(max_examples=25)
@given(cuts=st.sets(st.integers(1, 5)), seed=st.integers(0, 100))
def test_losses_and_gradients_do_not_depend_on_micro_batches(aggregation: str, cuts: set[int], seed: int) -> None:
    case = make_case(seed)
    num_tokens, num_sequences = int(case.mask.sum()), int(case.mask.any(dim=1).sum())
    borders = [0, *sorted(cuts), 6]
    parts = [slice(a, b) for a, b in itertools.pairwise(borders)]
    weights = torch.cat([token_weights(case.mask[p], aggregation, num_tokens, num_sequences) for p in parts])

    whole, split = (case.log_probs.clone().requires_grad_() for _ in range(2))
    whole_loss = total_loss(case, whole, weights, slice(None))
    whole_loss.backward()
    losses = [total_loss(case, split, weights, part) for part in parts]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(sum(losses), whole_loss)
    torch.testing.assert_close(split.grad, whole.grad)


def test_metric_sums_add_up_over_micro_batches() -> None:
    case = make_case()

    def sums(rows: slice) -> dict[str, Tensor]:
        return policy_loss(
            case.log_probs[rows], case.old[rows], case.advantages[rows], case.mask[rows],
            clip_ratio=0.2, dual_clip=3.0, weights=case.weights("token-mean")[rows],
        )[1]  # fmt: skip

    whole, first, second = sums(slice(None)), sums(slice(0, 2)), sums(slice(2, 6))
    assert whole.keys() == {"clip_fraction", "approx_kl", "ratio", "dual_clip_fraction"}
    for name, total in whole.items():
        torch.testing.assert_close(first[name] + second[name], total)


def test_token_weights_by_hand() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    assert token_weights(mask, "token-mean", 4, 2).tolist() == [[0.25, 0.25, 0], [0.25, 0, 0], [0, 0, 0]]
    assert token_weights(mask, "sequence-mean-token-mean", 4, 2).tolist() == [[0.25, 0.25, 0], [0.5, 0, 0], [0, 0, 0]]
    assert token_weights(mask, "sequence-mean-token-sum", 4, 2).tolist() == [[0.5, 0.5, 0], [0.5, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_mini_batch_without_any_sampled_token_has_loss_zero_and_not_nan(aggregation: str) -> None:
    case = make_case()
    case.mask[:] = False
    log_probs = case.log_probs.clone().requires_grad_()
    loss = total_loss(case, log_probs, token_weights(case.mask, aggregation, 0, 0), slice(None))
    loss.backward()
    assert loss == 0
    assert log_probs.grad is not None
    assert (log_probs.grad == 0).all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_row_without_sampled_tokens_changes_neither_loss_nor_denominator(aggregation: str) -> None:
    case = make_case()
    without = Case(case.log_probs[1:], case.old[1:], case.advantages[1:], case.mask[1:])
    both = [total_loss(c, c.log_probs, c.weights(aggregation), slice(None)) for c in (case, without)]
    torch.testing.assert_close(both[0], both[1])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e4, -1e4])
def test_observation_tokens_change_no_loss_no_gradient_and_no_metric(garbage: float) -> None:
    case = make_case()
    weights = case.weights("token-mean")

    def results(fill: float) -> list[Tensor]:
        x, old, advantages = (t.where(case.mask, fill) for t in (case.log_probs, case.old, case.advantages))
        x = x.requires_grad_()
        importance = torch.full_like(x, fill).where(~case.mask, 0.5)
        pairs = [
            policy_loss(
                x, old, advantages, case.mask,
                clip_ratio=0.2, dual_clip=3.0, weights=weights, importance_weights=importance,
            ),
            value_loss(x, old, advantages, case.mask, clip_value=0.3, weights=weights),
            kl_loss(x, old, case.mask, weights=weights),
            entropy_loss(x, case.mask, weights=weights),
        ]  # fmt: skip
        loss = torch.stack([loss for loss, _ in pairs]).sum()
        loss.backward()
        assert x.grad is not None
        return [loss.detach(), x.grad, *(total for _, sums in pairs for total in sums.values())]

    clean, dirty = results(0.0), results(garbage)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert all(t.isfinite().all() for t in dirty)


@pytest.mark.parametrize("log_ratio", [-100.0, 100.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_policy_loss_and_gradient_are_finite_at_extreme_ratios(log_ratio: float, advantage: float) -> None:
    log_probs = torch.tensor([[log_ratio]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, sums = policy_loss(
        log_probs, torch.zeros(1, 1), torch.tensor([[advantage]]), mask, clip_ratio=0.2, weights=mask.float()
    )
    loss.backward()
    assert log_probs.grad is not None
    assert all(t.isfinite().all() for t in (loss, log_probs.grad, *sums.values()))


def test_on_policy_gradient_is_minus_the_advantage() -> None:
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    mask, advantages = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[3.0, -0.5]])
    loss, sums = policy_loss(
        log_probs, log_probs.detach(), advantages, mask, clip_ratio=0.2, weights=token_weights(mask, "token-mean", 2, 1)
    )
    loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[-1.5, 0.25]]
    assert {name: total.item() for name, total in sums.items()} == {"clip_fraction": 0, "approx_kl": 0, "ratio": 2}


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    arguments = (torch.tensor([[2.0]]), torch.zeros(1, 1), torch.tensor([[-1.0]]), mask)
    free, _ = policy_loss(*arguments, clip_ratio=0.2, weights=mask.float())
    bounded, sums = policy_loss(*arguments, clip_ratio=0.2, dual_clip=3.0, weights=mask.float())
    assert free.item() == pytest.approx(math.exp(2.0))
    assert bounded.item() == 3.0
    assert sums["dual_clip_fraction"] == 1


def test_importance_weights_scale_each_token() -> None:
    case = make_case()
    weights = case.weights("token-mean")
    arguments = (case.log_probs, case.old, case.advantages, case.mask)
    importance = torch.rand(case.mask.shape)
    weighted, _ = policy_loss(*arguments, clip_ratio=0.2, weights=weights, importance_weights=importance)
    folded, _ = policy_loss(*arguments, clip_ratio=0.2, weights=weights * importance)
    torch.testing.assert_close(weighted, folded)


def test_value_loss_takes_the_worse_of_clipped_and_unclipped_errors() -> None:
    """By hand with c = 0.5, old value 0, return 2: 0.5 * 2.25 for V = 1 (clipped to 0.5), 0.5 * 9 for V = -1."""
    mask, weights = torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 2)
    values = torch.tensor([[1.0, -1.0]], requires_grad=True)
    loss, sums = value_loss(values, torch.zeros(1, 2), torch.full((1, 2), 2.0), mask, clip_value=0.5, weights=weights)
    loss.backward()
    assert loss.item() == 0.5 * 2.25 + 0.5 * 9.0
    assert values.grad is not None
    assert values.grad.tolist() == [[0.0, -3.0]]
    assert sums["value_clip_fraction"] == 1


def test_adding_the_entropy_loss_raises_entropy_on_descent() -> None:
    entropy = torch.tensor([[1.0, 2.0]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, sums = entropy_loss(entropy, mask, weights=mask / 2)
    loss.backward()
    assert loss.item() == -1.5
    assert sums["entropy"] == 3.0
    assert entropy.grad is not None
    assert (entropy.grad < 0).all()


def test_an_unknown_aggregation_is_refused() -> None:
    with pytest.raises(ValueError, match="median"):
        token_weights(torch.ones(1, 1, dtype=torch.bool), "median", 1, 1)
