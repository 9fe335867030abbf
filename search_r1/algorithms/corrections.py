"""Correction for tokens sampled under other log-probs than the trainer's: stale weights, or another engine's kernels.

`rollout_log_probs` are the engine's when it sampled, `old_log_probs` the trainer's before the update. All (B, T).
"""

from __future__ import annotations

from torch import Tensor

from search_r1.algorithms.kl import token_kl
from search_r1.algorithms.masking import masked_mean, masked_ratio


def truncated_importance_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor, cap: float
) -> Tensor:
    """min(exp(old - rollout), cap) a token: biased, of bounded variance (Ionides 2008; arXiv:1802.01561, sec. 4.1).

    Args:
        old_log_probs, rollout_log_probs, loss_mask: (B, T).
        cap: above 0, usually 2.

    Returns:
        (B, T) without gradient, 0 outside `loss_mask`.
    """
    ratio = masked_ratio(old_log_probs.detach(), rollout_log_probs.detach(), loss_mask)
    return ratio.clamp(max=cap).where(loss_mask, 0.0)


def credible_tokens(
    old_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor, low: float, high: float
) -> Tensor:
    """(B, T) bool: sampled tokens whose ratio exp(old - rollout) lies in [low, high].

    Multiply the importance weights by it to leave extreme tokens out of the loss; the counts that the loss divides
    by stay those of all sampled tokens.
    """
    ratio = masked_ratio(old_log_probs, rollout_log_probs, loss_mask)
    return loss_mask & (ratio >= low) & (ratio <= high)


def mismatch_kl(old_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor) -> Tensor:
    """Scalar: mean k3 estimate of KL(rollout || old) over the sampled tokens, 0 where the two agree."""
    return masked_mean(token_kl(rollout_log_probs, old_log_probs, loss_mask, "k3"), loss_mask)


def truncated_share(old_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor, cap: float) -> Tensor:
    """Scalar: share of sampled tokens whose ratio exceeds `cap`."""
    ratio = masked_ratio(old_log_probs, rollout_log_probs, loss_mask)
    return masked_mean((ratio > cap).float(), loss_mask)
