"""KL(policy || reference) from log-probs of tokens the policy sampled, and what steers its coefficient.

Estimators after J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html, with
r = log_prob - ref_log_prob of one token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from search_r1.algorithms.masking import MAX_LOG_RATIO

KLEstimator = Callable[[Tensor, Tensor], Tensor]
"""(log_probs, ref_log_probs) -> KL of the same shape."""


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """r: unbiased, high variance, may be negative on a single token. As a loss its expected gradient is 0."""
    return log_probs - ref_log_probs


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """r^2 / 2: biased, low variance, never negative; its gradient is an unbiased one of the KL."""
    return 0.5 * (log_probs - ref_log_probs) ** 2


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """exp(-r) - 1 + r: unbiased, low variance, never negative (`low_var_kl` elsewhere).

    -r is clamped before `exp` and in the linear term alike, so that the gradient beyond the clamp is 0 and not one
    of the wrong sign.
    """
    log_ratio = (ref_log_probs - log_probs).clamp(max=MAX_LOG_RATIO)
    return log_ratio.exp() - 1.0 - log_ratio


def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|r|."""
    return (log_probs - ref_log_probs).abs()


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}


def token_kl(log_probs: Tensor, ref_log_probs: Tensor, loss_mask: Tensor, estimator: str) -> Tensor:
    """(B, T) KL of each sampled token, 0 elsewhere. What stands outside the mask never reaches the estimator."""
    return KL_ESTIMATORS[estimator](log_probs.where(loss_mask, 0.0), ref_log_probs.where(loss_mask, 0.0))


def kl_penalty_in_reward(
    token_rewards: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    loss_mask: Tensor,
    coef: float,
    estimator: str,
) -> Tensor:
    """Token rewards minus `coef` times the KL of each sampled token (arXiv:1909.08593, eq. 2).

    Args:
        token_rewards, log_probs, ref_log_probs, loss_mask: (B, T).
        coef: the controller's current value.
        estimator: a key of `KL_ESTIMATORS`.

    Returns:
        (B, T); tokens that were not sampled keep their reward.
    """
    return token_rewards - coef * token_kl(log_probs, ref_log_probs, loss_mask, estimator)


class KLController(Protocol):
    """Holds the KL coefficient."""

    @property
    def value(self) -> float: ...

    def update(self, current_kl: float, num_steps: int) -> None:
        """Tell it the batch's mean KL a trajectory (summed over tokens, in nats) and the number of trajectories."""
        ...

    def state(self) -> dict[str, float]: ...

    def load_state(self, state: dict[str, float]) -> None: ...


class FixedKLController:
    """A constant coefficient."""

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, current_kl: float, num_steps: int) -> None:
        """Nothing moves."""

    def state(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state(self, state: dict[str, float]) -> None:
        """The configured constant stays: a changed setting wins over a checkpoint."""


class AdaptiveKLController:
    """Proportional control in log space (arXiv:1909.08593, sec. 2.2).

    error = clip(KL / target - 1, -0.2, 0.2),   value *= 1 + error * num_steps / horizon

    A KL that is not finite moves nothing: that batch is not learned from either.
    """

    def __init__(self, value: float, target: float, horizon: int) -> None:
        self.value = value
        self.target = target
        self.horizon = horizon

    def update(self, current_kl: float, num_steps: int) -> None:
        if not math.isfinite(current_kl):
            return
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * num_steps / self.horizon

    def state(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state(self, state: dict[str, float]) -> None:
        self.value = state["value"]
