"""Supervised fine-tuning of one worker's policy: the mean negative log-likelihood of what the assistant wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from search_r1.backends.forward import PolicyModule
from search_r1.backends.policy import LocalPolicy
from search_r1.config import Config, ModelConfig, OptimConfig, PolicyConfig
from search_r1.data.micro_batches import micro_batch_rows, packed_rows
from search_r1.data.sft_examples import SFTBatch, SFTExample, SFTShare, collate_examples, share_examples
from search_r1.protocols import Metrics, Sharding


class SupervisedPolicy:
    """The policy of reinforcement learning, with another loss."""

    def __init__(
        self,
        model: ModelConfig,
        optim: OptimConfig,
        sharding: Sharding,
        total_steps: int,
        *,
        pad_token_id: int,
        max_tokens_per_micro_batch: int,
        packing: Literal["auto", "padded", "packed"] = "auto",
    ) -> None:
        policy = PolicyConfig(optim, max_tokens_per_micro_batch=max_tokens_per_micro_batch, packing=packing)
        self.policy = LocalPolicy(Config(model=model, policy=policy), sharding, total_steps)
        self.sharding = sharding
        self.layout = self.policy.layout
        self.pad_token_id = pad_token_id

    @property
    def module(self) -> PolicyModule:
        return self.policy.module

    def update(self, examples: Sequence[SFTExample]) -> Metrics:
        """One optimizer step on all of `examples`."""
        return self.update_share(share_examples(examples, 1)[0])

    def update_share(self, share: SFTShare) -> Metrics:
        """One optimizer step, together with the other workers' shares."""

        def loss(batch: SFTBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return self._negative_log_likelihood(batch) / max(share.num_tokens, 1), {}

        metrics = self.policy.trainable.step(self._micro_batches(share.examples), loss, self._empty)
        return metrics | {"num_tokens": float(share.num_tokens)}

    def loss(self, examples: Sequence[SFTExample]) -> float:
        """Mean negative log-likelihood, in nats a token, without learning from it."""
        return self.loss_share(share_examples(examples, 1)[0])

    def loss_share(self, share: SFTShare) -> float:
        """The mean over all workers' shares."""
        batches = self._micro_batches(share.examples)
        rounds = int(self.sharding.max(torch.tensor(len(batches))))
        batches += [self._empty()] * (rounds - len(batches))
        self.module.eval()
        with torch.no_grad():
            total = sum(float(self._negative_log_likelihood(batch)) for batch in batches)
        return float(self.sharding.sum(torch.tensor(total, dtype=torch.float64))) / max(share.num_tokens, 1)

    def save_pretrained(self, path: str) -> None:
        """Write a plain Hugging Face folder (weights and config); adapters are merged."""
        self.policy.save_pretrained(path)

    def save(self, folder: str) -> None:
        self.policy.save(folder)

    def load(self, folder: str) -> None:
        self.policy.load(folder)

    def _micro_batches(self, examples: Sequence[SFTExample]) -> list[SFTBatch]:
        cut = packed_rows if self.layout.packed else micro_batch_rows
        groups = cut([len(example.token_ids) for example in examples], self.layout.max_tokens)
        return [collate_examples([examples[row] for row in rows], self.pad_token_id) for rows in groups]

    def _negative_log_likelihood(self, batch: SFTBatch) -> Tensor:
        device = self.sharding.device
        lengths = batch.lengths.to(device) if self.layout.packed else None
        log_probs, _ = self.module(batch.input_ids.to(device), batch.loss_mask.to(device), 1.0, lengths)
        return -log_probs.sum()

    def _empty(self) -> SFTBatch:
        return collate_examples([SFTExample((self.pad_token_id,) * 2, (False, False))], self.pad_token_id)
