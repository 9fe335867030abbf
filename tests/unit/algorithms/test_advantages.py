from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from search_r1.algorithms.advantages import gae, grpo, last_token_rewards
from search_r1.algorithms.masking import masked_whiten

SPLIT_MASK = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 0]]).bool()
"""Prompt, two sampled tokens, an observation of two, two sampled tokens, padding."""


def gae_oracle(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The definition as a double sum over the sampled tokens of one trajectory."""
    n = len(rewards)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


def test_the_reward_sits_on_the_last_sampled_token_and_never_on_an_observation_or_padding() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 0, 0, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]).bool()
    token_rewards = last_token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)
    assert token_rewards.tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 2], [0, 0, 0, 0, 0], [4, 0, 0, 0, 0]]


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=5))
def test_no_reward_disappears_whatever_the_mask(rows: list[list[bool]]) -> None:
    mask = torch.tensor(rows)
    rewards = torch.arange(1.0, len(rows) + 1)
    placed = last_token_rewards(rewards, mask)
    assert placed.sum(dim=1).tolist() == [r if any(row) else 0.0 for r, row in zip(rewards.tolist(), rows, strict=True)]
    assert (placed[~mask] == 0).all()


@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_gae_matches_the_double_sum_over_sampled_tokens(seed: int, gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, 9, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 9, generator=generator) > 0.4
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    for row in range(3):
        sampled = mask[row]
        expected = gae_oracle(rewards[row][sampled].tolist(), values[row][sampled].tolist(), gamma, lam)
        assert advantages[row][sampled].tolist() == pytest.approx(expected, abs=1e-9)
        assert returns[row][sampled].tolist() == pytest.approx(
            [a + v for a, v in zip(expected, values[row][sampled].tolist(), strict=True)], abs=1e-9
        )
    assert (advantages[~mask] == 0).all()
    assert (returns[~mask] == 0).all()


def test_gae_carries_across_an_observation_without_decaying() -> None:
    """By hand, gamma = lam = 0.5, values 0, reward 1 at the end: 1/4 a step back, and the observation is no step."""
    rewards = last_token_rewards(torch.tensor([1.0]), SPLIT_MASK)
    advantages, returns = gae(rewards, torch.zeros(1, 8), SPLIT_MASK, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0, 1 / 64, 1 / 16, 0, 0, 1 / 4, 1, 0]]
    assert returns.tolist() == advantages.tolist()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e9])
def test_values_of_observation_tokens_change_no_advantage_and_no_return(garbage: float) -> None:
    torch.manual_seed(0)
    values = torch.randn(1, 8)
    rewards = last_token_rewards(torch.tensor([1.0]), SPLIT_MASK)
    clean = gae(rewards, values.where(SPLIT_MASK, 0.0), SPLIT_MASK, 0.9, 0.8)
    dirty = gae(rewards, values.where(SPLIT_MASK, garbage), SPLIT_MASK, 0.9, 0.8)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


def test_lambda_one_gives_the_return_minus_the_value() -> None:
    values = torch.tensor([[0.5, 0.25, 0.75]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    advantages, returns = gae(torch.tensor([[0.0, 0.0, 1.0]]), values, mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(advantages, 1.0 - values)
    assert returns.tolist() == [[1.0, 1.0, 1.0]]


def test_whitened_advantages_do_not_depend_on_padding() -> None:
    torch.manual_seed(0)
    advantages, mask = torch.randn(3, 5), torch.rand(3, 5) > 0.3
    padded = torch.nn.functional.pad(advantages, (0, 4), value=7.0)
    padded_mask = torch.nn.functional.pad(mask, (0, 4))
    assert torch.equal(masked_whiten(padded, padded_mask)[:, :5], masked_whiten(advantages, mask))


def grpo_oracle(rewards: list[float], groups: list[int], voids: list[bool], by_std: bool) -> list[float]:
    found = []
    for reward, group, void in zip(rewards, groups, voids, strict=True):
        siblings = [r for r, g, v in zip(rewards, groups, voids, strict=True) if g == group and not v]
        if void or len(siblings) < 2 or max(siblings) == min(siblings):
            found.append(0.0)
        else:
            scale = statistics.stdev(siblings) + 1e-6 if by_std else 1.0
            found.append((reward - statistics.mean(siblings)) / scale)
    return found


trajectories = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0, 0.1 + 0.2]), st.integers(-2, 3), st.booleans()),
    min_size=1,
    max_size=16,
)


@given(trajectories, st.booleans())
def test_grpo_matches_a_loop_over_groups(rows: list[tuple[float, int, bool]], by_std: bool) -> None:
    rewards, groups, voids = map(list, zip(*rows, strict=True))
    mask = ~torch.tensor(voids)[:, None].expand(-1, 3)
    advantages = grpo(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), mask, normalize_by_std=by_std)
    expected = grpo_oracle(rewards, groups, voids, by_std)
    assert advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-9)
    assert (advantages == advantages[:, :1]).all()


def ones(rows: int) -> Tensor:
    return torch.ones(rows, 2, dtype=torch.bool)


def test_a_group_of_one_has_advantage_zero_and_not_its_raw_reward() -> None:
    advantages = grpo(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([7, 8, 8]), ones(3))
    assert (advantages[0] == 0).all()
    assert advantages.isfinite().all()


def test_a_lone_survivor_of_voids_has_advantage_zero() -> None:
    mask = ones(3)
    mask[1:] = False
    assert (grpo(torch.tensor([1.0, 0.0, math.nan]), torch.tensor([4, 4, 4]), mask) == 0).all()


def test_a_void_leaves_the_statistics_of_its_group() -> None:
    rewards, groups, mask = torch.tensor([1.0, 0.0, 0.0, 99.0]), torch.tensor([4, 4, 4, 4]), ones(4)
    mask[3] = False
    advantages = grpo(rewards, groups, mask)
    torch.testing.assert_close(advantages[:3], grpo(rewards[:3], groups[:3], mask[:3]))
    assert (advantages[3] == 0).all()


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1 + 0.2, 1 / 3, 1e6 + 0.1, -0.7])
@pytest.mark.parametrize("size", [2, 3, 5, 7, 11])
@pytest.mark.parametrize("by_std", [True, False])
def test_all_equal_rewards_give_exactly_zero(reward: float, size: int, by_std: bool) -> None:
    rewards = torch.full((size,), reward)
    assert (grpo(rewards, torch.zeros(size).long(), ones(size), normalize_by_std=by_std) == 0).all()


def test_rewards_equal_up_to_rounding_give_exactly_zero() -> None:
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)
    assert rewards[0] != rewards[1]
    assert (grpo(rewards, torch.zeros(3).long(), ones(3)) == 0).all()


def test_groups_interleave_in_any_order_and_stay_apart() -> None:
    rewards = torch.tensor([1.0, 10.0, 0.0, 30.0, 20.0])
    advantages = grpo(rewards, torch.tensor([5, 2, 5, 2, 2]), ones(5))[:, 0]
    assert advantages.tolist() == pytest.approx([0.5**0.5, -1.0, -(0.5**0.5), 1.0, 0.0], abs=1e-5)


def test_advantages_are_zero_on_observations() -> None:
    advantages = grpo(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), SPLIT_MASK.expand(2, -1))
    assert (advantages[:, [0, 3, 4, 7]] == 0).all()
    assert (advantages[:, [1, 2, 5, 6]] != 0).all()
