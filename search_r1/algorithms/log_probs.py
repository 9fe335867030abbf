"""Log-probs and entropy of chosen tokens without holding the logits of the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def chunked_log_probs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_elements: int = 2**24,
    head_bias: Tensor | None = None,
    with_entropy: bool = False,
    logit_softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature)[target] and the entropy of the same distribution, in float32.

        logits = hidden @ head_weight.T + head_bias, softened to cap * tanh(logits / cap) where a cap is given

    Rows are taken in chunks of at most `chunk_elements` logits (one row at least). With more than one chunk and
    gradients on, each chunk is recomputed in the backward pass, so that neither pass holds an (N, V) tensor.

    Args:
        hidden: (N, d) states before the tokens to score.
        head_weight: (V, d), of the dtype of `hidden` (the product is made in it, then turned into float32).
        targets: (N,) int64 token ids.
        temperature: above 0; the one the tokens were sampled with.
        chunk_elements: largest number of logits at a time.
        head_bias: (V,).
        with_entropy: also return the entropy, in nats.
        logit_softcap: the model's final logit soft cap.

    Returns:
        log_probs (N,) and entropy (N,) or None, float32.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be above 0: log-probs of greedy samples are taken at 1")

    def score(hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        logits = functional.linear(hidden, weight, bias).float()
        if logit_softcap is not None:
            logits = logit_softcap * (logits / logit_softcap).tanh()
        if temperature != 1.0:
            logits = logits / temperature
        log_normalizer = logits.logsumexp(dim=-1)
        log_probs = logits.gather(-1, targets[:, None]).squeeze(-1) - log_normalizer
        if not with_entropy:
            return log_probs, None
        return log_probs, log_normalizer - (logits.softmax(dim=-1) * logits).sum(dim=-1)

    rows = max(chunk_elements // head_weight.shape[0], 1)
    chunks = list(zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True))
    if len(chunks) == 1:
        return score(hidden, targets, head_weight, head_bias)
    scored = [
        checkpoint(score, h, t, head_weight, head_bias, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled()
        else score(h, t, head_weight, head_bias)
        for h, t in chunks
    ]
    log_probs, entropies = zip(*scored, strict=True)
    return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None
