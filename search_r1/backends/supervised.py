"""Supervised fine-tuning of one worker's policy: the mean negative log-likelihood of what the assistant wrote."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from search_r1.backends.forward import PolicyModule
from search_r1.backends.lora import merged
from search_r1.backends.model import load_trainable_lm, save_causal_lm
from search_r1.backends.policy import autocast_dtype
from search_r1.backends.trainable import Trainable
from search_r1.config import ModelConfig, OptimConfig
from search_r1.data.micro_batches import micro_batch_rows
from search_r1.data.sft_examples import SFTBatch, SFTExample, collate_examples
from search_r1.protocols import Metrics, Sharding


class SupervisedPolicy:
    """A causal language model that learns from demonstrations."""

    def __init__(
        self,
        model: ModelConfig,
        optim: OptimConfig,
        sharding: Sharding,
        total_steps: int,
        *,
        pad_token_id: int,
        max_tokens_per_micro_batch: int,
    ) -> None:
        lm = load_trainable_lm(model.path, model, sharding.device.type)
        self.lora = model.lora
        self.sharding = sharding
        module = PolicyModule(lm, autocast_dtype(model, sharding))
        self.trainable = Trainable(module, optim, total_steps, sharding)
        self.module: PolicyModule = self.trainable.module  # type: ignore[assignment]
        self.pad_token_id = pad_token_id
        self.max_tokens = max_tokens_per_micro_batch

    def update(self, examples: Sequence[SFTExample]) -> Metrics:
        """One optimizer step on all of `examples`."""
        num_tokens = sum(sum(example.loss_mask) for example in examples)

        def loss(batch: SFTBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return self._negative_log_likelihood(batch) / max(num_tokens, 1), {}

        metrics = self.trainable.step(self._micro_batches(examples), loss, self._empty)
        return metrics | {"num_tokens": float(num_tokens)}

    def loss(self, examples: Sequence[SFTExample]) -> float:
        """Mean negative log-likelihood, in nats a token, without learning from it."""
        self.module.eval()
        with torch.no_grad():
            total = sum(float(self._negative_log_likelihood(batch)) for batch in self._micro_batches(examples))
        return total / max(sum(sum(example.loss_mask) for example in examples), 1)

    def save_pretrained(self, path: str) -> None:
        """Write a plain Hugging Face folder (weights and config); adapters are merged."""
        full = self.sharding.full_weights(self.module)
        full = merged(full, self.lora) if self.lora.rank else full
        weights = {name.removeprefix("lm."): tensor.detach().cpu() for name, tensor in full}
        if self.sharding.rank == 0:
            save_causal_lm(self.module.lm, weights, path)

    def _micro_batches(self, examples: Sequence[SFTExample]) -> list[SFTBatch]:
        groups = micro_batch_rows([len(example.token_ids) for example in examples], self.max_tokens)
        return [collate_examples([examples[row] for row in rows], self.pad_token_id) for rows in groups]

    def _negative_log_likelihood(self, batch: SFTBatch) -> Tensor:
        device = self.trainable.device
        log_probs, _ = self.module(batch.input_ids.to(device), batch.loss_mask.to(device), 1.0)
        return -log_probs.sum()

    def _empty(self) -> SFTBatch:
        return collate_examples([SFTExample((self.pad_token_id,) * 2, (False, False))], self.pad_token_id)
