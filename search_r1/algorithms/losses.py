"""Losses as weighted sums over sampled tokens.

The weights (`token_weights`) hold the *global* counts of a mini-batch, so the losses of its micro-batches, on however
many workers, add up to the loss of the mini-batch, and so do their gradients. Each loss comes with a dict of metric
sums over the sampled tokens: add them up over micro-batches, then divide once by the global number of tokens. Losses
are minimised; a caller adds them with positive coefficients. Nothing outside `loss_mask` is read, not even a NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from search_r1.algorithms.kl import token_kl
from search_r1.algorithms.masking import masked_ratio, masked_sum

LossAndSums = tuple[Tensor, dict[str, Tensor]]
"""The scalar loss, and detached scalar sums over the sampled tokens."""


def token_weights(loss_mask: Tensor, aggregation: str, num_tokens: int | Tensor, num_sequences: int | Tensor) -> Tensor:
    """What each sampled token counts in the loss of its mini-batch.

        token-mean                 1 / num_tokens                                  (arXiv:2503.14476)
        sequence-mean-token-mean   1 / (tokens of its row * num_sequences)         (arXiv:2402.03300)
        sequence-mean-token-sum    1 / num_sequences

    Args:
        loss_mask: (B, T) of one micro-batch.
        aggregation: one of the three names above.
        num_tokens: sampled tokens of the whole mini-batch over all workers.
        num_sequences: trajectories of the whole mini-batch over all workers that have at least one sampled token;
            a row without any (a void, a padding row) weighs nothing and is not counted.

    Returns:
        (B, T) float32, 0 outside the mask. Over a mini-batch the first two sum to 1.
    """
    mask = loss_mask.float()
    if aggregation == "token-mean":
        return mask / max(num_tokens, 1)
    if aggregation == "sequence-mean-token-mean":
        return mask / mask.sum(dim=1, keepdim=True).clamp(min=1) / max(num_sequences, 1)
    if aggregation == "sequence-mean-token-sum":
        return mask / max(num_sequences, 1)
    raise ValueError(f"unknown loss aggregation {aggregation!r}")


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_ratio: float,
    clip_ratio_high: float | None = None,
    dual_clip: float | None = None,
    weights: Tensor,
    importance_weights: Tensor | None = None,
) -> LossAndSums:
    """Clipped surrogate of PPO, negated (arXiv:1707.06347, eq. 7).

        -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A),   ratio = exp(log_prob - old_log_prob)

    Args:
        log_probs, old_log_probs, advantages, loss_mask: (B, T); only `log_probs` carries gradient.
        clip_ratio: `low`, and `high` too unless `clip_ratio_high` is given (clip-higher, arXiv:2503.14476).
        dual_clip: c > 1 bounds the loss at -c * A where A < 0 (arXiv:1912.09729, eq. 5).
        weights: (B, T) from `token_weights`.
        importance_weights: (B, T) constants that multiply each token's loss (see `corrections`).

    Returns:
        The loss and the sums `clip_fraction`, `approx_kl` (k3 estimate of KL(old || new)), `ratio` and, with
        `dual_clip`, `dual_clip_fraction`.
    """
    advantages = advantages.where(loss_mask, 0.0)
    ratio = masked_ratio(log_probs, old_log_probs, loss_mask)
    high = clip_ratio if clip_ratio_high is None else clip_ratio_high
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio, 1.0 + high)
    loss = torch.maximum(unclipped, clipped)
    sums = {
        "clip_fraction": (clipped > unclipped).float().sum(),
        "approx_kl": token_kl(old_log_probs, log_probs.detach(), loss_mask, "k3").sum(),
        "ratio": masked_sum(ratio.detach(), loss_mask),
    }
    if dual_clip is not None:
        bound = -dual_clip * advantages
        bounded = (advantages < 0) & (loss > bound)
        loss = bound.where(bounded, loss)
        sums["dual_clip_fraction"] = bounded.float().sum()
    if importance_weights is not None:
        loss = loss * importance_weights.where(loss_mask, 0.0)
    return (loss * weights).sum(), sums


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, *, clip_value: float, weights: Tensor
) -> LossAndSums:
    """Half the squared error, the prediction kept within `clip_value` of the old one; the worse of the two counts.

        0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

    Args:
        values, old_values, returns, loss_mask: (B, T); only `values` carries gradient.
        weights: (B, T) from `token_weights`.

    Returns:
        The loss and the sums `value_clip_fraction` and `value`.
    """
    values, old_values, returns = (x.where(loss_mask, 0.0) for x in (values, old_values, returns))
    clipped = torch.clamp(values, old_values - clip_value, old_values + clip_value)
    error, clipped_error = (values - returns) ** 2, (clipped - returns) ** 2
    loss = 0.5 * torch.maximum(error, clipped_error)
    sums = {"value_clip_fraction": (clipped_error > error).float().sum(), "value": values.detach().sum()}
    return (loss * weights).sum(), sums


def entropy_loss(entropy: Tensor, loss_mask: Tensor, *, weights: Tensor) -> LossAndSums:
    """Minus the weighted entropy, so that adding it with a positive coefficient keeps the policy exploring.

    Args:
        entropy, loss_mask, weights: (B, T).

    Returns:
        The loss and the sum `entropy`.
    """
    entropy = entropy.where(loss_mask, 0.0)
    return -(entropy * weights).sum(), {"entropy": entropy.detach().sum()}


def kl_loss(
    log_probs: Tensor, ref_log_probs: Tensor, loss_mask: Tensor, *, weights: Tensor, estimator: str = "k3"
) -> LossAndSums:
    """Weighted KL to the reference, added to the policy loss times its coefficient (arXiv:2402.03300, eq. 3 and 4).

    Args:
        log_probs, ref_log_probs, loss_mask, weights: (B, T); only `log_probs` carries gradient.
        estimator: a key of `kl.KL_ESTIMATORS`.

    Returns:
        The loss and the sum `kl_ref`.
    """
    kl = token_kl(log_probs, ref_log_probs, loss_mask, estimator)
    return (kl * weights).sum(), {"kl_ref": kl.detach().sum()}
