"""One token a row out of next-token logits. R rows, V tokens of vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def uniform_draws(seeds: Sequence[int], num_steps: int) -> Tensor:
    """(R, num_steps) float32 in [0, 1): each row's own stream, whatever rows stand beside it."""
    draws = torch.empty(len(seeds), num_steps)
    generator = torch.Generator()
    for row, seed in zip(draws, seeds, strict=True):
        generator.manual_seed(seed)
        torch.rand(num_steps, generator=generator, out=row)
    return draws


def log_probs_at(logits: Tensor, temperature: float) -> Tensor:
    """(R, V) float32 at the sampling temperature; at 1 when greedy."""
    return torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)


def sample(logits: Tensor, temperature: float, top_p: float, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    """Pick a token by inverting the cumulative distribution at `uniforms`; the likeliest one at temperature 0.

    Args:
        logits: (R, V), any floating dtype.
        temperature: Divides the logits; 0 is greedy.
        top_p: Draw among the likeliest tokens that together hold this probability (arXiv:1904.09751).
        uniforms: (R,) in [0, 1); not read when greedy.

    Returns:
        (R,) int64 tokens and (R,) float32 log-probs: of the full distribution (before top-p) at the sampling
        temperature, at temperature 1 when greedy.
    """
    log_probs = log_probs_at(logits, temperature)
    if temperature == 0:
        tokens = log_probs.argmax(dim=-1)
    else:
        assert uniforms is not None, "sampling at a temperature above 0 needs one uniform draw a row"
        tokens = _inverse_cdf(_nucleus(log_probs.exp(), top_p), uniforms)
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """`probs` (R, V) with everything outside the nucleus set to 0; the likeliest token always stays."""
    if top_p >= 1:
        return probs
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    outside = ordered.cumsum(dim=-1) - ordered >= top_p
    outside[:, 0] = False
    return probs.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), 0)


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms[:, None] * total, below_total)
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)
