"""How a model lies over the workers. Gradients are sums over workers: losses divide by global counts themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from search_r1.config import ShardingConfig
from search_r1.protocols import State, Weights


class _Collective:
    """What both shardings share: small sums over the workers, and full states in one format."""

    def __init__(self) -> None:
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def sum(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Tensor, operation: Any) -> Tensor:
        if self.world_size > 1:
            values = values.clone()
            dist.all_reduce(values, operation)
        return values

    def full_weights(self, model: nn.Module) -> Weights:
        """Every rank must iterate it; each parameter is gathered when it is reached."""
        for name, parameter in model.state_dict().items():
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def full_state(self, model: nn.Module, optimizer: Any) -> State:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return {
            "model": get_model_state_dict(model, options=options),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        }

    def load_full_state(self, model: nn.Module, optimizer: Any, state: State) -> None:
        options = StateDictOptions(full_state_dict=True, strict=True)
        if "model" in state:
            set_model_state_dict(model, state["model"], options=options)
        if "optimizer" in state:
            set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


class Replicated(_Collective):
    """The whole model on every worker; gradients are all-reduced once, after the last micro-batch."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def accumulate(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def finish_gradients(self, model: nn.Module) -> None:
        if self.world_size == 1:
            return
        for parameter in model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> float:
        return float(nn.utils.clip_grad_norm_(model.parameters(), max_norm, error_if_nonfinite=False))


class FSDP2(_Collective):
    """Parameters, gradients and optimizer state split over the workers (torch.distributed.fsdp.fully_shard)."""

    def __init__(self, config: ShardingConfig) -> None:
        super().__init__()
        self.offload: OffloadPolicy = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()

    def wrap(self, model: nn.Module) -> nn.Module:
        for layer in _decoder_layers(model):
            fully_shard(layer, offload_policy=self.offload)
        fully_shard(model, offload_policy=self.offload, reshard_after_forward=False)
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return model

    @contextmanager
    def accumulate(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
        model.set_is_last_backward(last)  # type: ignore[operator]
        yield

    def finish_gradients(self, model: nn.Module) -> None:
        """The last backward reduced them."""

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> float:
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, error_if_nonfinite=False)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList):
            return list(layers)
    return []


def build_sharding(config: ShardingConfig) -> Replicated | FSDP2:
    return FSDP2(config) if config.name == "fsdp2" else Replicated()
