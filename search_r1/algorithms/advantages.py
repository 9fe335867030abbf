"""Advantage estimators. All token tensors are (B, T); nothing outside `loss_mask` is read."""

from __future__ import annotations

import torch
from torch import Tensor


def last_token_rewards(rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """Place each trajectory's reward on its last sampled token, wherever observations and padding stand.

    Args:
        rewards: (B,) one outcome reward a trajectory.
        loss_mask: (B, T) True on sampled tokens.

    Returns:
        (B, T) token rewards; a row without any sampled token is all 0.
    """
    positions = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    last = positions.where(loss_mask, -1).amax(dim=1)
    return rewards[:, None].where(positions == last[:, None], 0.0)


def gae(token_rewards: Tensor, values: Tensor, loss_mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16) over the sampled tokens only.

        delta_t = r_t + gamma * V(t') - V(t),   A_t = delta_t + gamma * lam * A(t')

    where t' is the next *sampled* token of the row: observation tokens are no decisions of the policy, so the
    recursion steps over them without decaying. After the last sampled token both V and A are 0.

    Args:
        token_rewards: (B, T), zero outside `loss_mask`.
        values: (B, T), the value of the state before each token.
        loss_mask: (B, T) True on sampled tokens.
        gamma: discount a sampled token.
        lam: 1 is the Monte-Carlo return minus the value, 0 the one-step error.

    Returns:
        advantages (not whitened, see `masking.masked_whiten`) and returns = advantages + values, both (B, T) and 0
        outside `loss_mask`.
    """
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        sampled = loss_mask[:, t]
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * lam * next_advantage).where(sampled, next_advantage)
        next_value = values[:, t].where(sampled, next_value)
        advantages[:, t] = next_advantage.where(sampled, 0.0)
    return advantages, (advantages + values).where(loss_mask, 0.0)


def grpo(
    rewards: Tensor, group_ids: Tensor, loss_mask: Tensor, normalize_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Group-relative advantages (arXiv:2402.03300, sec. 4.1.2), one value a trajectory spread over its sampled tokens.

        A_i = (r_i - mean(group)) / (std(group) + eps)

    with the sample standard deviation (n - 1). A row without any sampled token (a void) takes no part in its group's
    statistics. A group of one, and a group whose rewards differ by no more than rounding (std <= eps), has advantage 0.

    Args:
        rewards: (B,).
        group_ids: (B,) int64; siblings share one, in any order.
        loss_mask: (B, T) True on sampled tokens.
        normalize_by_std: False only centres (arXiv:2503.20783).
        eps: keeps the quotient finite.

    Returns:
        (B, T), 0 outside `loss_mask`.
    """
    counted = loss_mask.any(dim=1)
    _, group = torch.unique(group_ids, return_inverse=True)
    num_groups = int(group.max()) + 1 if group.numel() else 0

    def group_sum(x: Tensor) -> Tensor:
        sums = torch.zeros(num_groups, dtype=torch.float64, device=x.device)
        return sums.index_add(0, group, x.where(counted, 0.0))[group]

    exact = rewards.double()
    size = group_sum(torch.ones_like(exact))
    centered = exact - group_sum(exact) / size.clamp(min=1)
    std = (group_sum(centered**2) / (size - 1).clamp(min=1)).sqrt()
    scaled = centered / (std + eps) if normalize_by_std else centered
    advantages = scaled.where(std > eps, 0.0).to(rewards.dtype)
    return advantages[:, None].where(loss_mask, 0.0)
