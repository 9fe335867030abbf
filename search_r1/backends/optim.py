"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from search_r1.config import OptimConfig


def build_optimizer(module: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101); vectors (norms, biases) are not decayed."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=tuple(config.betas))


def build_schedule(
    optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up over `warmup_ratio` of all optimizer steps, then constant, cosine or linear decay."""
    warmup = round(config.warmup_ratio * total_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        decay = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * decay[config.schedule]

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
