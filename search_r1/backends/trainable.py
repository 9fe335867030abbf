"""A module with its optimizer, schedule and sharding: the one place where weights change."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from search_r1.backends.optim import build_optimizer, build_schedule
from search_r1.backends.residence import Residence
from search_r1.config import OptimConfig
from search_r1.protocols import Metrics, Sharding, State

logger = logging.getLogger(__name__)
MicroBatch = TypeVar("MicroBatch")
LossFunction = Callable[[MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""The micro-batch's part of the mini-batch loss, and the sums its metrics are made of."""


class Trainable:
    """Steps an optimizer over micro-batches, the same way for policy, critic and supervised fine-tuning."""

    def __init__(self, module: nn.Module, config: OptimConfig, total_steps: int, sharding: Sharding) -> None:
        self.sharding = sharding
        wrapped = sharding.wrap(module)
        self.config = config
        self.optimizer = build_optimizer(wrapped, config)
        self.schedule = build_schedule(self.optimizer, config, total_steps)
        self.residence = Residence(wrapped, sharding.home, self.optimizer)

    @property
    def module(self) -> nn.Module:
        return self.residence.module

    @property
    def device(self) -> torch.device:
        return self.sharding.device  # type: ignore[no-any-return]

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_function: LossFunction[MicroBatch],
        empty: Callable[[], MicroBatch],
    ) -> Metrics:
        """One optimizer step over one mini-batch.

        Args:
            micro_batches: this worker's part; workers may have different numbers of them.
            loss_function: its losses must add up, over all micro-batches of all workers, to the mini-batch loss.
            empty: a micro-batch without loss, so that every worker takes part in the same number of collectives.

        Returns:
            `loss`, `grad_norm`, `lr`, `bad_step` (1.0 when loss or gradient was not finite and the step was skipped),
            and the sums over all workers of what `loss_function` reported.
        """
        self.module.train()
        self.optimizer.zero_grad(set_to_none=True)
        rounds = int(self.sharding.max(torch.tensor(len(micro_batches))))
        sums: dict[str, Tensor] = {}
        for i in range(rounds):
            micro_batch = micro_batches[i] if i < len(micro_batches) else empty()
            with self.sharding.accumulate(self.module, last=i == rounds - 1):
                loss, parts = loss_function(micro_batch)
                loss.backward()
            for name, value in {"loss": loss, **parts}.items():
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + value.detach().double().cpu()
        self.sharding.finish_gradients(self.module)
        norm = self.sharding.clip_grad_norm(self.module, self.config.max_grad_norm)
        totals = self._totals(sums)
        finite = math.isfinite(norm) and math.isfinite(totals.get("loss", 0.0))
        lr = self.schedule.get_last_lr()[0]
        if finite:
            self.optimizer.step()
        else:
            logger.warning("loss %s, gradient norm %s: the optimizer step is skipped", totals.get("loss"), norm)
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        return totals | {"grad_norm": norm, "lr": lr, "bad_step": float(not finite)}

    def _totals(self, sums: dict[str, Tensor]) -> Metrics:
        """Summed over the workers, which all report the same names: each runs a micro-batch, if only an empty one."""
        if not sums:
            return {}
        names = sorted(sums)
        values = self.sharding.sum(torch.stack([sums[name] for name in names]))
        return dict(zip(names, values.tolist(), strict=True))

    def state(self) -> State:
        """Optimizer and schedule, unsharded."""
        optimizer = self.sharding.full_optimizer_state(self.module, self.optimizer)
        return {"optimizer": optimizer, "schedule": self.schedule.state_dict()}

    def load_state(self, state: State) -> None:
        """Where optimizer and schedule stood. Learning rate, betas and decay stay those of this run's settings."""
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        base_lrs = self.schedule.base_lrs
        self.sharding.load_full_optimizer_state(self.module, self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.schedule.base_lrs = base_lrs
        factors = [factor(self.schedule.last_epoch) for factor in self.schedule.lr_lambdas]
        rates = [base * factor for base, factor in zip(base_lrs, factors, strict=True)]
        self.schedule._last_lr = rates
        for group, setting, rate in zip(self.optimizer.param_groups, settings, rates, strict=True):
            group.update(setting | {"lr": rate})

    def save(self, file: Path) -> None:
        """Every worker calls it; rank 0 writes."""
        state = self.state()
        if self.sharding.rank == 0:
            torch.save(state, temporary := file.with_suffix(".tmp"))
            temporary.replace(file)  # one that was loaded from here is still mapped

    def load(self, file: Path) -> None:
        """Every worker calls it and reads its shards alone out of the mapped file."""
        self.load_state(torch.load(file, map_location="cpu", weights_only=True, mmap=True))


def mean_metrics(steps: Sequence[Metrics], area: str) -> Metrics:
    """Mean over the optimizer steps of one phase, named `area/name`; `bad_step` becomes the count `bad_steps`."""
    merged = {f"{area}/{name}": sum(s[name] for s in steps) / len(steps) for name in steps[0] if name != "bad_step"}
    return merged | {f"{area}/bad_steps": sum(s["bad_step"] for s in steps)}
