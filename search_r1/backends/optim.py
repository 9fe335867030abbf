"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

import math
import re

import torch
from torch import nn

from search_r1.backends.muon import Muon
from search_r1.config import OptimConfig

_OUTER = re.compile(r"embed|lm_head|value_head")
"""Matrices at the model's two ends, which Muon leaves to AdamW."""


def build_optimizer(module: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101), or Muon with AdamW for embeddings and heads; norms and biases are not decayed."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    hidden = [p for name, p in named if config.name == "muon" and p.dim() == 2 and not _OUTER.search(name)]
    taken = {id(p) for p in hidden}
    groups = [
        {"params": hidden, "weight_decay": config.weight_decay, "orthogonalize": True},
        {"params": [p for _, p in named if p.dim() > 1 and id(p) not in taken], "weight_decay": config.weight_decay},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = Muon if config.name == "muon" else torch.optim.AdamW
    return optimizer([g for g in groups if g["params"]], lr=config.lr, betas=tuple(config.betas))


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
