"""The policy and its frozen reference, in plain PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from search_r1.algorithms.losses import entropy_loss, kl_loss, policy_loss, token_weights
from search_r1.backends.forward import PolicyModule
from search_r1.backends.lora import adapters_off, is_adapter, load_adapter, merged, save_adapter
from search_r1.backends.model import (
    attends_ragged,
    check_fits,
    disable_dropout,
    load_causal_lm,
    load_trainable_lm,
    refuse_adapter,
    save_causal_lm,
    shares_base,
)
from search_r1.backends.residence import Residence
from search_r1.backends.trainable import Trainable, mean_metrics
from search_r1.config import Config, ModelConfig
from search_r1.data.micro_batches import Layout, Share, make_shares, select_rows
from search_r1.errors import ConfigError
from search_r1.protocols import Metrics, Sharding, Weights
from search_r1.types import RolloutBatch, TrainBatch

logger = logging.getLogger(__name__)
_PREFIX = "lm."
"""Of the language model's parameters inside `PolicyModule`."""


def autocast_dtype(config: ModelConfig, sharding: Sharding) -> torch.dtype | None:
    """bfloat16 forward passes over float32 weights; None in float32, or where the sharding lowers the weights."""
    return torch.bfloat16 if config.dtype == "bfloat16" and not sharding.lowers_precision else None


def layout_for(config: Config, lm: PreTrainedModel, max_tokens: int) -> Layout:
    packing = config.policy.packing
    return Layout(max_tokens, packed=packing == "packed" or (packing == "auto" and attends_ragged(lm)))


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
    batch: RolloutBatch, layout: Layout, score: Callable[[RolloutBatch], Tensor], sharding: Sharding
) -> Tensor:
    """Run `score` (micro-batch -> (b, t)) over a batch, without gradients; (B, T) float32 on the CPU."""
    result = torch.zeros(batch.input_ids.shape, dtype=torch.float32)
    groups = layout.rows(batch)
    rounds = int(sharding.max(torch.tensor(len(groups))))
    with torch.no_grad():
        for i in range(rounds):
            rows = groups[i] if i < len(groups) else []
            part = select_rows(batch, rows) if rows else empty_batch().rollout
            values = score(rollout_to_device(part, sharding.device)).float().cpu()
            if rows:
                result[rows, : values.shape[1]] = values
    return result


def score_roles(roles: Mapping[str, Any], batch: RolloutBatch, names: Sequence[str]) -> dict[str, Tensor]:
    """What each of these roles says of a batch: log-probs of policy and reference, values of the critic; (B, T)."""
    return {name: roles[name].values(batch) if name == "critic" else roles[name].log_probs(batch) for name in names}


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """The policy's loss on one micro-batch: clipped surrogate, KL to the reference, entropy bonus."""

    config: Config
    layout: Layout

    def __call__(
        self, module: PolicyModule, batch: TrainBatch, num_tokens: int, num_sequences: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config, algorithm = self.config.policy, self.config.algorithm
        rollout, mask = batch.rollout, batch.rollout.loss_mask
        log_probs, entropy = module(
            rollout.input_ids, mask, self.config.rollout.temperature, self.layout.lengths(rollout)
        )
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
        total = loss
        if batch.ref_log_probs is not None:
            kl, kl_sums = kl_loss(
                log_probs, batch.ref_log_probs, mask, weights=weights, estimator=algorithm.kl_estimator
            )
            total = total + algorithm.kl_coef * kl if algorithm.kl_placement == "loss" else total
            sums |= kl_sums
        bonus, entropy_sums = entropy_loss(entropy, mask, weights=weights)
        total = total + config.entropy_coef * bonus if config.entropy_coef else total
        sums |= entropy_sums
        sums["rollout_log_prob_gap"] = (old - rollout.rollout_log_probs).abs().where(mask, 0.0).sum()
        means = {name: value / max(num_tokens, 1) for name, value in sums.items()}
        return total, means | {"policy_loss": loss}


class LocalPolicy:
    """The trainable actor of one worker; with a process group, its part of the data-parallel actor."""

    def __init__(self, config: Config, sharding: Sharding, total_steps: int) -> None:
        empty = not sharding.reads_weights
        lm = load_trainable_lm(config.model.path, config.model, sharding.device.type, empty=empty)
        self.config = config
        self.sharding = sharding
        self.layout = layout_for(config, lm, config.policy.max_tokens_per_micro_batch)
        module = PolicyModule(lm, autocast_dtype(config.model, sharding))
        self.trainable = Trainable(module, config.policy.optim, total_steps, sharding)
        self.objective = PolicyObjective(config, self.layout)

    @property
    def module(self) -> PolicyModule:
        return self.trainable.module  # type: ignore[return-value]

    @property
    def rows_per_mini_batch(self) -> int:
        return self.config.policy.mini_batch_size * self.config.rollout.group_size

    def log_probs(self, batch: RolloutBatch) -> Tensor:
        return policy_log_probs(self.module, batch, self.layout, self.config.rollout.temperature, self.sharding)

    def update(self, batch: TrainBatch) -> Metrics:
        return self.update_shares(make_shares(batch, self.rows_per_mini_batch, 1)[0])

    def update_shares(self, shares: Sequence[Share]) -> Metrics:
        """One optimizer step a share, `policy.epochs` times over."""
        steps = [self._step(share) for _ in range(self.config.policy.epochs) for share in shares]
        return mean_metrics(steps, "actor")

    def _step(self, share: Share) -> Metrics:
        rows = self.layout.rows(share.batch.rollout)

        def loss(batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
            batch = to_device(batch, self.trainable.device)
            return self.objective(self.module, batch, share.num_tokens, share.num_sequences)

        return self.trainable.step([select_rows(share.batch, r) for r in rows], loss, lambda: empty_like(share.batch))

    def weights(self) -> Weights:
        """Hugging Face names, full tensors; adapters are merged in while streaming."""
        full = self._full_weights()
        yield from merged(full, self.config.model.lora) if self.config.model.lora.rank else full

    def _full_weights(self, names: Container[str] | None = None) -> Weights:
        for name, tensor in self.sharding.full_weights(self.module, names):
            yield name.removeprefix(_PREFIX), tensor.detach()

    def offload(self) -> None:
        self.trainable.residence.leave()

    def save_pretrained(self, path: str) -> None:
        weights = held_by_first(self.weights(), self.sharding)
        if self.sharding.rank == 0:
            save_causal_lm(self.module.lm, weights, path)

    def save(self, folder: str) -> None:
        """A Hugging Face folder, or a peft one with LoRA; the optimizer's state stands beside the weights."""
        if self.config.model.lora.rank:
            adapter = held_by_first(self._full_weights(self._adapter_names()), self.sharding)
            if self.sharding.rank == 0:
                save_adapter(folder, adapter, self.config.model)
        else:
            self.save_pretrained(folder)
        self.trainable.save(Path(folder) / "optimizer.pt")

    def load(self, folder: str) -> None:
        """
        Raises:
            ConfigError: a checkpoint of another model, or of other adapters.
        """
        own = self.module.state_dict()
        weights = self.sharding.read(lambda: self._read(folder, own))
        self.sharding.load_full_weights(self.module, weights)
        self.trainable.load(Path(folder) / "optimizer.pt")

    def _read(self, folder: str, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The weights of a checkpoint, which must be those that are trained here."""
        model = self.config.model
        if model.lora.rank:
            found = load_adapter(folder, model.lora)
            own = {name: own[name] for name in self._adapter_names()}
        else:
            refuse_adapter(folder)
            found = load_causal_lm(folder, model).state_dict()
        weights = {_PREFIX + name: tensor for name, tensor in found.items()}
        check_fits(own, weights, folder, model.path)
        return weights

    def _adapter_names(self) -> list[str]:
        return [name for name, _ in self.module.named_parameters() if is_adapter(name)]


def held_by_first(weights: Weights, sharding: Sharding) -> dict[str, Tensor]:
    """All weights in host memory of rank 0; the other ranks help to gather them and keep none."""
    return {name: tensor.cpu() for name, tensor in weights if sharding.rank == 0}


def empty_like(batch: TrainBatch) -> TrainBatch:
    """An empty micro-batch with the same optional parts as `batch`, so that it reports the same metrics."""
    empty = empty_batch()
    return replace(empty, **{n: None for n in batch.__slots__ if getattr(batch, n) is None})


def policy_log_probs(
    module: PolicyModule, batch: RolloutBatch, layout: Layout, temperature: float, sharding: Sharding
) -> Tensor:
    """(B, T), 0 outside the loss mask."""
    module.eval()

    def score(part: RolloutBatch) -> Tensor:
        log_probs: Tensor = module(part.input_ids, part.loss_mask, temperature, layout.lengths(part))[0]
        return log_probs

    return score_rows(batch, layout, score, sharding)


class RecastPolicy:
    """The policy with its forward pass in another dtype: what rounding alone does to log-probs."""

    def __init__(self, policy: LocalPolicy, dtype: str) -> None:
        self.policy = policy
        self.autocast_dtype = torch.bfloat16 if dtype == "bfloat16" else None

    def log_probs(self, batch: RolloutBatch) -> Tensor:
        """
        Raises:
            ConfigError: shards are gathered in bfloat16, so there is no float32 to compute in.
        """
        if self.autocast_dtype is None and self.policy.sharding.lowers_precision:
            raise ConfigError(
                "sharding.name=fsdp2 under model.dtype=bfloat16 cannot compute in float32, the engine's dtype, so what "
                "rounding does is not known: set engine.dtype and model.dtype to the same"
            )
        module = self.policy.module
        usual, module.autocast_dtype = module.autocast_dtype, self.autocast_dtype
        try:
            return self.policy.log_probs(batch)
        finally:
            module.autocast_dtype = usual

    def offload(self) -> None:
        """The policy's weights go when the policy goes."""


class ReferencePolicy:
    """A frozen policy that only scores."""

    def __init__(self, config: Config, sharding: Sharding) -> None:
        path = config.model.reference_path or config.model.path
        lm = load_causal_lm(path, config.model, sharding.device.type, empty=not sharding.reads_weights)
        disable_dropout(lm)
        lm.requires_grad_(False)
        self.config = config
        self.sharding = sharding
        self.layout = layout_for(config, lm, config.policy.max_tokens_per_micro_batch)
        module = sharding.wrap(PolicyModule(lm, autocast_dtype(config.model, sharding)))
        self.residence = Residence(module, sharding.home)

    @property
    def module(self) -> PolicyModule:
        return self.residence.module  # type: ignore[return-value]

    def log_probs(self, batch: RolloutBatch) -> Tensor:
        return policy_log_probs(self.module, batch, self.layout, self.config.rollout.temperature, self.sharding)

    def offload(self) -> None:
        self.residence.leave()


class BaseReference:
    """The weights under a policy's adapters as its reference: no second model."""

    def __init__(self, policy: LocalPolicy) -> None:
        self.policy = policy

    def log_probs(self, batch: RolloutBatch) -> Tensor:
        with adapters_off(self.policy.module):
            return self.policy.log_probs(batch)

    def offload(self) -> None:
        """The policy's weights go when the policy goes."""


def build_reference(config: Config, sharding: Sharding, policy: LocalPolicy) -> ReferencePolicy | BaseReference:
    """The policy as it was at the start, or the model at `model.reference_path`."""
    return BaseReference(policy) if shares_base(config.model) else ReferencePolicy(config, sharding)
