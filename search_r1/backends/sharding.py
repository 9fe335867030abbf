"""How a model lies over the workers. Gradients are sums over workers: losses divide by global counts themselves."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from search_r1.config import ShardingConfig
from search_r1.errors import SearchR1Error
from search_r1.protocols import State, Weights

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class _Collective:
    """What both shardings share: small sums over the workers, and full states in one format."""

    def __init__(self, device: str) -> None:
        self.device = self.home = torch.device(device)
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

    def full_weights(self, model: nn.Module, names: Container[str] | None = None) -> Weights:
        for name, parameter in model.state_dict().items():
            if names is None or name in names:
                yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def full_optimizer_state(self, model: nn.Module, optimizer: Any) -> State:
        """Empty before the first step: torch would make one up, with zero gradients, which then counts as taken."""
        if not optimizer.state:
            return {}
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_optimizer_state_dict(model, optimizer, options=options)

    def load_full_optimizer_state(self, model: nn.Module, optimizer: Any, state: State) -> None:
        optimizer.state.clear()
        if state:
            set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))


class Replicated(_Collective):
    """The whole model on every worker; gradients are all-reduced once, after the last micro-batch."""

    lowers_precision = False
    reads_weights = True

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)

    def read(self, work: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        return work()

    def load_full_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        model.load_state_dict(weights, strict=False)

    def wrap(self, model: nn.Module) -> nn.Module:
        return model.to(self.device)

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
    """Parameters, gradients and optimizer state split over the workers (torch.distributed.fsdp.fully_shard).

    With `replicas` above 1 the workers form that many groups of neighbours, each of which holds the whole model once:
    parameters are gathered inside a group, gradients summed over all. In bfloat16 the float32 shards are gathered in
    half precision and gradients are reduced in float32.

    Rank 0 alone reads weights. The other ranks make their models on the meta device, give room to one layer at a time
    when it is split, and get their shards' contents from rank 0, tensor by tensor.
    """

    def __init__(self, config: ShardingConfig, dtype: str = "float32", device: str = "cpu") -> None:
        if not dist.is_initialized():
            dist.init_process_group(_BACKENDS[device], store=dist.HashStore(), rank=0, world_size=1)
        super().__init__(device)
        self.home = torch.device("cpu") if config.cpu_offload else self.device
        mesh = init_device_mesh(
            device, (config.replicas, self.world_size // config.replicas), mesh_dim_names=("replicate", "shard")
        )
        self.options: dict[str, Any] = {
            "mesh": mesh if config.replicas > 1 else mesh["shard"],
            "offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda") if config.cpu_offload else OffloadPolicy(),
        }
        self.lowers_precision = dtype == "bfloat16"
        self.precision = MixedPrecisionPolicy()
        if self.lowers_precision:
            self.precision = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        self.reads_weights = self.rank == 0

    def read(self, work: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        found: Mapping[str, Tensor] = {}
        failure: list[SearchR1Error | None] = [None]
        if self.reads_weights:
            try:
                found = work()
            except SearchR1Error as error:
                failure = [error]
        dist.broadcast_object_list(failure, src=0)
        if failure[0] is not None:
            raise failure[0]
        return found

    def wrap(self, model: nn.Module) -> nn.Module:
        full = {name: tensor.detach() for name, tensor in _tensors(model).items()} if self.reads_weights else {}
        for layer in _decoder_layers(model):
            give_room(layer, self.device)
            fully_shard(layer, mp_policy=self.precision, **self.options)
        if hasattr(model, "value_head"):
            fully_shard(model.value_head, **self.options)  # type: ignore[arg-type]
        give_room(model, self.device)
        fully_shard(model, mp_policy=self.precision, reshard_after_forward=False, **self.options)
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        if self.world_size > 1:
            self.load_full_weights(model, full)
        return model

    @torch.no_grad()
    def load_full_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Rank 0's `weights`, which may name buffers too, into the shards of every rank."""
        targets = _tensors(model)
        names = [sorted(weights.keys() & targets.keys())]
        dist.broadcast_object_list(names, src=0)
        for name in names[0]:
            target = targets[name]
            if self.reads_weights:
                tensor = weights[name].to(self.device, target.dtype).contiguous()
            else:
                tensor = torch.empty(target.shape, dtype=target.dtype, device=self.device)
            dist.broadcast(tensor, src=0)
            if isinstance(target, DTensor):
                tensor = distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None).to_local()
                target = target.to_local()
            target.copy_(tensor)

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


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, those that are tied once, and all buffers: also those that no checkpoint holds."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def give_room(model: nn.Module, device: torch.device) -> None:
    """Replace tensors on the meta device by uninitialised ones; what was tied stays tied."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                if parameter not in made:
                    room = torch.empty_like(parameter, device=device)
                    made[parameter] = nn.Parameter(room, requires_grad=parameter.requires_grad)
                setattr(module, name, made[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=device))


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList):
            return list(layers)
    return []


def build_sharding(config: ShardingConfig, dtype: str = "float32", device: str = "cpu") -> Replicated | FSDP2:
    return FSDP2(config, dtype, device) if config.name == "fsdp2" else Replicated(device)
