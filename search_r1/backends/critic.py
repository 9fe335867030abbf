"""The critic: a value head on a causal trunk of the policy's architecture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from search_r1.algorithms.losses import token_weights, value_loss
from search_r1.backends.forward import ValueModule
from search_r1.backends.model import disable_dropout, load_causal_lm
from search_r1.backends.policy import autocast_dtype, empty_like, score_rows, to_device
from search_r1.backends.trainable import Trainable, mean_metrics
from search_r1.config import Config
from search_r1.data.micro_batches import Share, lengths_of, make_shares, micro_batch_rows, select_rows
from search_r1.protocols import Metrics, Sharding
from search_r1.types import RolloutBatch, TrainBatch


class LocalCritic:
    """The critic of one worker; with a process group, its part of the data-parallel critic."""

    def __init__(self, config: Config, sharding: Sharding, total_steps: int, device: str = "cpu") -> None:
        lm = load_causal_lm(config.model.critic_path or config.model.path, config.model, device)
        disable_dropout(lm)
        self.config = config
        self.sharding = sharding
        module = ValueModule(lm.base_model, autocast_dtype(config)).to(device)
        self.trainable = Trainable(module, config.critic.optim, total_steps, sharding)
        self.module: ValueModule = self.trainable.module  # type: ignore[assignment]

    @property
    def rows_per_mini_batch(self) -> int:
        return self.config.critic.mini_batch_size * self.config.rollout.group_size

    def values(self, batch: RolloutBatch) -> Tensor:
        self.module.eval()
        return score_rows(
            batch,
            self.config.critic.max_tokens_per_micro_batch,
            lambda part: self.module(part.input_ids, part.loss_mask),
            self.sharding,
            self.trainable.device,
        )

    def update(self, batch: TrainBatch) -> Metrics:
        return self.update_shares(make_shares(batch, self.rows_per_mini_batch, 1)[0])

    def update_shares(self, shares: Sequence[Share]) -> Metrics:
        """One optimizer step a share, `critic.epochs` times over."""
        steps = [self._step(share) for _ in range(self.config.critic.epochs) for share in shares]
        return mean_metrics(steps, "critic")

    def _step(self, share: Share) -> Metrics:
        rows = micro_batch_rows(lengths_of(share.batch.rollout), self.config.critic.max_tokens_per_micro_batch)

        def loss(batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
            batch = to_device(batch, self.trainable.device)
            mask = batch.rollout.loss_mask
            weights = token_weights(mask, "token-mean", share.num_tokens, share.num_sequences)
            values = self.module(batch.rollout.input_ids, mask)
            value, sums = value_loss(
                values, batch.values, batch.returns, mask, clip_value=self.config.critic.clip_value, weights=weights
            )
            return value, {name: total / max(share.num_tokens, 1) for name, total in sums.items()}

        return self.trainable.step([select_rows(share.batch, r) for r in rows], loss, lambda: empty_like(share.batch))

    def save(self, folder: str) -> None:
        state = self.sharding.full_state(self.module, self.trainable.optimizer)
        Path(folder).mkdir(parents=True, exist_ok=True)
        if self.sharding.rank == 0:
            torch.save(state["model"], Path(folder) / "critic.pt")
        self.trainable.save(Path(folder) / "optimizer.pt")

    def load(self, folder: str) -> None:
        model = torch.load(Path(folder) / "critic.pt", map_location="cpu", weights_only=True)
        self.sharding.load_full_state(self.module, self.trainable.optimizer, {"model": model})
        self.trainable.load(Path(folder) / "optimizer.pt")
