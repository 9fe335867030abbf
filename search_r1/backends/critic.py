"""The critic: a value head on a causal trunk of the policy's architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from search_r1.algorithms.losses import token_weights, value_loss
from search_r1.backends.forward import ValueModule
from search_r1.backends.model import check_fits, load_trainable_lm
from search_r1.backends.policy import autocast_dtype, empty_like, held_by_first, layout_for, score_rows, to_device
from search_r1.backends.trainable import Trainable, mean_metrics
from search_r1.config import Config
from search_r1.data.micro_batches import Share, make_shares, select_rows
from search_r1.protocols import Metrics, Sharding
from search_r1.types import RolloutBatch, TrainBatch


class LocalCritic:
    """The critic of one worker; with a process group, its part of the data-parallel critic."""

    def __init__(self, config: Config, sharding: Sharding, total_steps: int) -> None:
        path, empty = config.model.critic_path or config.model.path, not sharding.reads_weights
        lm = load_trainable_lm(path, config.model, sharding.device.type, empty=empty)
        self.config = config
        self.sharding = sharding
        self.layout = layout_for(config, lm, config.critic.max_tokens_per_micro_batch)
        module = ValueModule(lm.base_model, autocast_dtype(config.model, sharding))
        self.trainable = Trainable(module, config.critic.optim, total_steps, sharding)

    @property
    def module(self) -> ValueModule:
        return self.trainable.module  # type: ignore[return-value]

    @property
    def rows_per_mini_batch(self) -> int:
        return self.config.critic.mini_batch_size * self.config.rollout.group_size

    def values(self, batch: RolloutBatch) -> Tensor:
        module = self.module.eval()

        def score(part: RolloutBatch) -> Tensor:
            values: Tensor = module(part.input_ids, part.loss_mask, self.layout.lengths(part))
            return values

        return score_rows(batch, self.layout, score, self.sharding)

    def update(self, batch: TrainBatch) -> Metrics:
        return self.update_shares(make_shares(batch, self.rows_per_mini_batch, 1)[0])

    def update_shares(self, shares: Sequence[Share]) -> Metrics:
        """One optimizer step a share, `critic.epochs` times over."""
        steps = [self._step(share) for _ in range(self.config.critic.epochs) for share in shares]
        return mean_metrics(steps, "critic")

    def _step(self, share: Share) -> Metrics:
        rows = self.layout.rows(share.batch.rollout)

        def loss(batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
            batch = to_device(batch, self.trainable.device)
            mask = batch.rollout.loss_mask
            weights = token_weights(mask, "token-mean", share.num_tokens, share.num_sequences)
            values = self.module(batch.rollout.input_ids, mask, self.layout.lengths(batch.rollout))
            value, sums = value_loss(
                values, batch.values, batch.returns, mask, clip_value=self.config.critic.clip_value, weights=weights
            )
            return value, {name: total / max(share.num_tokens, 1) for name, total in sums.items()}

        return self.trainable.step([select_rows(share.batch, r) for r in rows], loss, lambda: empty_like(share.batch))

    def offload(self) -> None:
        self.trainable.residence.leave()

    def save(self, folder: str) -> None:
        """The weights that are trained, and the optimizer's state."""
        weights = held_by_first(self.sharding.full_weights(self.module, self._trained()), self.sharding)
        Path(folder).mkdir(parents=True, exist_ok=True)
        if self.sharding.rank == 0:
            torch.save(weights, Path(folder) / "critic.pt")
        self.trainable.save(Path(folder) / "optimizer.pt")

    def load(self, folder: str) -> None:
        """
        Raises:
            ConfigError: a checkpoint of another model, or of other adapters.
        """
        own = {name: tensor for name, tensor in self.module.state_dict().items() if name in self._trained()}

        def read() -> Mapping[str, Tensor]:
            weights: dict[str, Tensor] = torch.load(Path(folder) / "critic.pt", map_location="cpu", weights_only=True)
            check_fits(own, weights, folder, self.config.model.critic_path or self.config.model.path)
            return weights

        self.sharding.load_full_weights(self.module, self.sharding.read(read))
        self.trainable.load(Path(folder) / "optimizer.pt")

    def _trained(self) -> set[str]:
        return {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
