"""The policy and its frozen reference, in plain PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from search_r1.algorithms.kl import token_kl
from search_r1.algorithms.losses import policy_loss, token_weights
from search_r1.backends.forward import PolicyModule
from search_r1.backends.model import disable_dropout, load_causal_lm, save_causal_lm
from search_r1.backends.trainable import Trainable, mean_metrics
from search_r1.config import Config
from search_r1.data.micro_batches import Share, lengths_of, make_shares, micro_batch_rows, select_rows
from search_r1.protocols import Metrics, Sharding, Weights
from search_r1.types import RolloutBatch, TrainBatch

logger = logging.getLogger(__name__)


def autocast_dtype(config: Config) -> torch.dtype | None:
    """bfloat16 forward passes over float32 weights, or None."""
    return torch.bfloat16 if config.model.dtype == "bfloat16" else None


def to_device(batch: TrainBatch, device: torch.device) -> TrainBatch:
    move = {n: v.to(device) for n in batch.__slots__ if isinstance(v := getattr(batch, n), Tensor)}
    return replace(batch, rollout=rollout_to_device(batch.rollout, device), **move)


def rollout_to_device(batch: RolloutBatch, device: torch.device) -> RolloutBatch:
    return replace(batch, **{name: getattr(batch, name).to(device) for name in batch.__slots__})


def empty_batch() -> TrainBatch:
    """One row without a sampled token: it takes part in collectives and adds nothing."""
    zeros, no = torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool)
    rollout = RolloutBatch(zeros.long(), ~no, no, zeros, zeros[:, 0], zeros[:, 0].long())
    return TrainBatch(rollout, zeros, zeros, zeros, zeros, zeros, zeros)


def score_rows(
    batch: RolloutBatch,
    max_tokens: int,
    score: Callable[[RolloutBatch], Tensor],
    sharding: Sharding,
    device: torch.device,
) -> Tensor:
    """Run `score` (micro-batch -> (b, t)) over a batch, without gradients; (B, T) float32 on the CPU."""
    result = torch.zeros(batch.input_ids.shape, dtype=torch.float32)
    groups = micro_batch_rows(lengths_of(batch), max_tokens)
    rounds = int(sharding.max(torch.tensor(len(groups))))
    with torch.no_grad():
        for i in range(rounds):
            rows = groups[i] if i < len(groups) else []
            part = select_rows(batch, rows) if rows else empty_batch().rollout
            values = score(rollout_to_device(part, device)).float().cpu()
            if rows:
                result[rows, : values.shape[1]] = values
    return result


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """The policy's loss on one micro-batch: clipped surrogate, KL to the reference, entropy bonus."""

    config: Config

    def __call__(
        self, module: PolicyModule, batch: TrainBatch, num_tokens: int, num_sequences: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config, algorithm = self.config.policy, self.config.algorithm
        rollout, mask = batch.rollout, batch.rollout.loss_mask
        log_probs, entropy = module(rollout.input_ids, mask, self.config.rollout.temperature)
        old = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        weights = token_weights(mask, config.loss_aggregation, num_tokens, num_sequences)
        loss, sums = policy_loss(
            log_probs,
            old,
            batch.advantages,
            mask,
            clip_ratio=config.clip_ratio,
            clip_ratio_high=config.clip_ratio_high,
            dual_clip=config.dual_clip,
            weights=weights,
            importance_weights=batch.importance_weights,
        )
        per_token = {name: value / max(num_tokens, 1) for name, value in sums.items()}
        per_token["policy_loss"] = loss
        per_token["entropy"] = entropy.detach().sum() / max(num_tokens, 1)
        gap = (old - rollout.rollout_log_probs).abs().where(mask, 0.0)
        per_token["rollout_log_prob_gap"] = gap.sum() / max(num_tokens, 1)
        if batch.ref_log_probs is not None:
            kl = token_kl(log_probs, batch.ref_log_probs, mask, algorithm.kl_estimator)
            per_token["kl_ref"] = kl.detach().sum() / max(num_tokens, 1)
            if algorithm.kl_placement == "loss":
                loss = loss + algorithm.kl_coef * (kl * weights).sum()
        if config.entropy_coef:
            loss = loss - config.entropy_coef * (entropy * weights).sum()
        return loss, per_token


class LocalPolicy:
    """The trainable actor of one worker; with a process group, its part of the data-parallel actor."""

    def __init__(self, config: Config, sharding: Sharding, total_steps: int, device: str = "cpu") -> None:
        lm = load_causal_lm(config.model.path, config.model, device)
        disable_dropout(lm)
        self.config = config
        self.sharding = sharding
        module = PolicyModule(lm, autocast_dtype(config))
        self.trainable = Trainable(module, config.policy.optim, total_steps, sharding)
        self.module: PolicyModule = self.trainable.module  # type: ignore[assignment]
        self.objective = PolicyObjective(config)

    @property
    def rows_per_mini_batch(self) -> int:
        return self.config.policy.mini_batch_size * self.config.rollout.group_size

    def log_probs(self, batch: RolloutBatch) -> Tensor:
        self.module.eval()
        return score_rows(
            batch,
            self.config.policy.max_tokens_per_micro_batch,
            lambda part: self.module(part.input_ids, part.loss_mask, self.config.rollout.temperature)[0],
            self.sharding,
            self.trainable.device,
        )

    def update(self, batch: TrainBatch) -> Metrics:
        return self.update_shares(make_shares(batch, self.rows_per_mini_batch, 1)[0])

    def update_shares(self, shares: Sequence[Share]) -> Metrics:
        """One optimizer step a share, `policy.epochs` times over."""
        steps = [self._step(share) for _ in range(self.config.policy.epochs) for share in shares]
        return mean_metrics(steps, "actor")

    def _step(self, share: Share) -> Metrics:
        rows = micro_batch_rows(lengths_of(share.batch.rollout), self.config.policy.max_tokens_per_micro_batch)

        def loss(batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
            batch = to_device(batch, self.trainable.device)
            return self.objective(self.module, batch, share.num_tokens, share.num_sequences)

        return self.trainable.step([select_rows(share.batch, r) for r in rows], loss, lambda: empty_like(share.batch))

    def weights(self) -> Weights:
        """Hugging Face names, full tensors."""
        prefix = "lm."
        for name, tensor in self.sharding.full_weights(self.module):
            yield name.removeprefix(prefix), tensor.detach()

    def save_pretrained(self, path: str) -> None:
        weights = {name: tensor.cpu() for name, tensor in self.weights()}
        if self.sharding.rank == 0:
            save_causal_lm(self.module.lm, weights, path)

    def save(self, folder: str) -> None:
        """A Hugging Face folder with the optimizer's state beside the weights."""
        self.save_pretrained(folder)
        self.trainable.save(Path(folder) / "optimizer.pt")

    def load(self, folder: str) -> None:
        lm = load_causal_lm(folder, self.config.model)
        weights = {f"lm.{name}": tensor for name, tensor in lm.state_dict().items()}
        self.sharding.load_full_state(self.module, self.trainable.optimizer, {"model": weights})
        self.trainable.load(Path(folder) / "optimizer.pt")


def empty_like(batch: TrainBatch) -> TrainBatch:
    """An empty micro-batch with the same optional parts as `batch`, so that it reports the same metrics."""
    empty = empty_batch()
    return replace(empty, **{n: None for n in batch.__slots__ if getattr(batch, n) is None})


class ReferencePolicy:
    """A frozen policy that only scores."""

    def __init__(self, config: Config, sharding: Sharding, device: str = "cpu") -> None:
        lm = load_causal_lm(config.model.reference_path or config.model.path, config.model, device)
        disable_dropout(lm)
        lm.requires_grad_(False)
        self.config = config
        self.sharding = sharding
        self.module: PolicyModule = sharding.wrap(PolicyModule(lm, autocast_dtype(config)))  # type: ignore[assignment]
        self.module.eval()

    def log_probs(self, batch: RolloutBatch) -> Tensor:
        return score_rows(
            batch,
            self.config.policy.max_tokens_per_micro_batch,
            lambda part: self.module(part.input_ids, part.loss_mask, self.config.rollout.temperature)[0],
            self.sharding,
            next(self.module.parameters()).device,
        )
