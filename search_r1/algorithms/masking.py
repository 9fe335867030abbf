"""Reductions over masked tokens. Whatever stands outside the mask, even NaN, changes neither value nor gradient."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here before `exp`: e^20 = 5e8 is far beyond any ratio that still carries information."""


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of `x` where `mask` is True, a scalar."""
    return x.where(mask, 0.0).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` where `mask` is True, a scalar; 0 where the mask is empty."""
    return masked_sum(x, mask) / mask.sum().clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale `x` to mean 0 and (population) variance 1 over the masked tokens.

    The statistics are those of the tensor that is given, so a batch is whitened whole, before it is cut into
    mini-batches and micro-batches.

    Returns:
        Of the shape and dtype of `x`, 0 outside the mask.
    """
    exact = x.double()
    centered = exact - masked_mean(exact, mask)
    variance = masked_mean(centered**2, mask)
    return (centered * (variance + eps).rsqrt()).where(mask, 0.0).to(x.dtype)


def masked_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """exp(log_probs - old_log_probs) where `mask` is True, 1 elsewhere.

    The exponent is cut at `MAX_LOG_RATIO`, so value and gradient (0 beyond the cut) are always finite.
    """
    return (log_probs - old_log_probs).where(mask, 0.0).clamp(max=MAX_LOG_RATIO).exp()
