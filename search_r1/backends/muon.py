"""Muon for the hidden matrices, AdamW for everything else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
_MATCH_ADAM = 0.2


class Muon(torch.optim.AdamW):
    """AdamW whose groups marked `orthogonalize` are stepped by Muon instead.

    Momentum of a matrix's gradient, made nearly orthogonal by a Newton-Schulz iteration (kellerjordan.github.io/
    posts/muon), and scaled so that its root mean square is that of an AdamW step (arXiv:2502.16982, eq. 4): one
    learning rate serves both.
    """

    def __init__(self, params: Any, *, momentum: float = 0.95, **adamw: Any) -> None:
        super().__init__(params, **adamw)
        self.momentum = momentum
        for group in self.param_groups:
            group.setdefault("orthogonalize", False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Matrices first; then AdamW takes whatever still has a gradient."""
        assert closure is None, "Muon takes no closure"
        for group in self.param_groups:
            if group["orthogonalize"]:
                self._step_matrices(group)
        return super().step()

    def _step_matrices(self, group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_shape.setdefault(parameter.shape, []).append((parameter, self._momentum_of(parameter)))
                parameter.grad = None
        for shape, pairs in by_shape.items():
            updates = orthogonalize(torch.stack([update for _, update in pairs]))
            scale = _MATCH_ADAM * max(shape) ** 0.5
            for (parameter, _), update in zip(pairs, updates, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)

    def _momentum_of(self, parameter: Tensor) -> Tensor:
        """Nesterov's look-ahead of the running mean of gradients, which is kept under AdamW's names."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
        state["step"] += 1
        state["exp_avg"].lerp_(parameter.grad, 1 - self.momentum)
        return parameter.grad.lerp(state["exp_avg"], self.momentum)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Matrices (N, m, n) with nearly the same singular vectors, and singular values near 1 (0.7 to 1.2)."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT
