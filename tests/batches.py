"""Random train batches over a tiny model's vocabulary, for tests of the trainer's side."""

from __future__ import annotations

from dataclasses import replace

import torch

from search_r1.config import Config, CriticConfig, ModelConfig, OptimConfig, PolicyConfig, RolloutConfig
from search_r1.types import RolloutBatch, TrainBatch


def random_batch(lengths: tuple[int, ...] = (9, 14, 6, 11), vocab_size: int = 300, seed: int = 0) -> TrainBatch:
    """Rows with a prompt of three tokens, then sampled and observed tokens by turns; optional parts all filled."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, longest = len(lengths), max(lengths)
    attention = torch.arange(longest) < torch.tensor(lengths)[:, None]
    mask = (torch.rand(num_rows, longest, generator=generator) > 0.4) & attention
    mask[:, :3] = False

    def noise(scale: float) -> torch.Tensor:
        return (scale * torch.randn(num_rows, longest, generator=generator)).where(mask, 0.0)

    rollout = RolloutBatch(
        input_ids=torch.randint(3, vocab_size, (num_rows, longest), generator=generator).where(attention, 0),
        attention_mask=attention,
        loss_mask=mask,
        rollout_log_probs=noise(0.1) - 5.0 * mask,
        rewards=torch.rand(num_rows, generator=generator),
        group_ids=torch.arange(num_rows) // 2,
    )
    return TrainBatch(
        rollout,
        advantages=noise(1.0),
        old_log_probs=noise(0.1) - 5.0 * mask,
        ref_log_probs=noise(0.1) - 5.0 * mask,
        values=noise(1.0),
        returns=noise(1.0),
    )


def tiny_training_config(path: str, *, lr: float = 1e-3, max_tokens: int = 10_000, mini_batch_size: int = 8) -> Config:
    optim = OptimConfig(lr=lr)
    return Config(
        model=ModelConfig(path=path),
        rollout=RolloutConfig(temperature=0.7),
        policy=PolicyConfig(
            optim=optim, mini_batch_size=mini_batch_size, max_tokens_per_micro_batch=max_tokens, entropy_coef=0.01
        ),
        critic=CriticConfig(optim=optim, mini_batch_size=mini_batch_size, max_tokens_per_micro_batch=max_tokens),
    )


def with_policy(config: Config, **changes: object) -> Config:
    return replace(config, policy=replace(config.policy, **changes))  # type: ignore[arg-type]
