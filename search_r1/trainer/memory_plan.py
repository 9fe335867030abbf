"""What a run will hold on each GPU, told before it starts, and which setting to change when it will not fit.

Bytes follow from counts of parameters, so they are exact for weights, gradients and AdamW (arXiv:1910.02054, section
3.1) and an estimate for activations (arXiv:2205.05198, section 4.1, with attention that keeps no scores).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from search_r1.config import Config
from search_r1.config_checks import check
from search_r1.data.model_size import ModelSize
from search_r1.errors import ConfigError

GIB = 1 << 30
_RESERVED = 2 * GIB
"""CUDA context, communication buffers, fragments."""
_MASTER = 4
"""Bytes of a float32 weight; as many for its gradient, twice as many for AdamW's two moments."""
_ACTIVATION_FACTOR = 17
"""Numbers kept a token, a layer and a hidden unit for the backward pass."""
_LOGITS_BYTES = 4 * 4 * 2**24
"""A chunk of logits in float32, its softmax and their gradients."""
PHASES = ("training", "sync", "generating")
Sizes = Mapping[str, ModelSize]
"""Of `policy`, and of `reference` and `critic` where they are models of their own."""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    training: float
    """Bytes on one GPU in this phase."""
    sync: float
    generating: float


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    rows: tuple[Row, ...]
    gpu_bytes: float
    engine_weights: float = 0.0
    """vLLM: on each GPU of an engine."""
    engine_cache: float | None = None
    """vLLM: what its share of a GPU leaves for keys and values, about; None with another engine."""

    def total(self, phase: str) -> float:
        return sum(getattr(row, phase) for row in self.rows)

    @property
    def peak(self) -> float:
        return max(self.total(phase) for phase in PHASES) + _RESERVED

    @property
    def fits(self) -> bool:
        return self.peak <= self.gpu_bytes


def memory_plan(config: Config, sizes: Sizes, gpu_bytes: float) -> MemoryPlan:
    """Memory of one GPU that holds one training worker and, where it is shared, one engine."""
    rows = [row for role, size in sizes.items() for row in _role_rows(config, role, size)]
    activations = max(_activations(config, role, size) for role, size in sizes.items() if role != "reference")
    rows.append(Row("activations, about", activations + _LOGITS_BYTES, 0, 0))
    if config.engine.name == "hf":
        held = _MASTER * sizes["policy"].parameters
        return MemoryPlan((*rows, Row("engine: weights", held, held, held)), gpu_bytes)
    engine = config.engine
    weights = _width(config) * sizes["policy"].parameters / engine.tensor_parallel_size
    cache = engine.gpu_memory_utilization * gpu_bytes - weights
    if shares_gpu(config):
        stays = not engine.sleep_while_training
        rows.append(Row("engine: weights", weights * stays, weights, weights))
        rows.append(Row("engine: cache", max(cache, 0) * stays, max(cache, 0) * stays, max(cache, 0)))
    return MemoryPlan(tuple(rows), gpu_bytes, weights, cache)


def _role_rows(config: Config, role: str, size: ModelSize) -> list[Row]:
    sharded = config.sharding.name == "fsdp2"
    shards = config.cluster.num_workers // config.sharding.replicas if sharded else 1
    on_gpu = not (sharded and config.sharding.cpu_offload)
    stays = on_gpu and not config.policy.offload_while_generating

    def row(what: str, count: float, kept: bool = True) -> Row:
        held = _MASTER * count / shards * on_gpu
        return Row(f"{role}: {what}", held, held * kept, held * kept * stays)

    rows = [row("weights", size.parameters + size.adapters)]
    if role != "reference":
        rows += [row("gradients", size.trainable, kept=False), row("optimizer", 2 * size.trainable)]
    if working := _working_copy(config, size, sharded):
        rows.append(Row(f"{role}: working copy", working, 0, 0))
    return rows


def _working_copy(config: Config, size: ModelSize, sharded: bool) -> float:
    """Gathered shards of the outer parameters and two layers, or autocast's half precision copy of all weights."""
    width = 2 if config.model.dtype == "bfloat16" else 4
    if not sharded:
        return 2.0 * size.parameters if width == 2 else 0.0
    return width * (size.embeddings + 2 * (size.parameters - size.embeddings) / max(size.layers, 1))


def _activations(config: Config, role: str, size: ModelSize) -> float:
    width = 2 if config.model.dtype == "bfloat16" else 4
    tokens = getattr(config, role).max_tokens_per_micro_batch
    a_layer = width * size.hidden * tokens
    if config.model.gradient_checkpointing:
        return a_layer * (size.layers + _ACTIVATION_FACTOR)
    return a_layer * size.layers * _ACTIVATION_FACTOR


def _width(config: Config) -> int:
    """Bytes of a weight of the engine."""
    dtype = config.model.dtype if config.engine.dtype == "auto" else config.engine.dtype
    return 2 if dtype == "bfloat16" else 4


def shares_gpu(config: Config) -> bool:
    """Workers that take part of a GPU leave the rest to an engine."""
    return config.engine.name == "vllm" and config.cluster.gpus_per_worker < 1


Change = tuple[str, Callable[[Config, Sizes], tuple[Config, Sizes]]]


def remedies(config: Config, sizes: Sizes, gpu_bytes: float) -> list[str]:
    """Settings that together make the plan fit and are allowed, the least costly ones first; empty when it fits or
    nothing helps."""

    def peak(changes: Sequence[Change]) -> float:
        changed = config, sizes
        for _, change in changes:
            changed = change(*changed)
        try:
            check(changed[0])
        except ConfigError:
            return math.inf
        return memory_plan(*changed, gpu_bytes).peak

    if peak([]) <= gpu_bytes:
        return []
    chosen: list[Change] = []
    for change in _changes(config):
        if peak([*chosen, change]) < peak(chosen):
            chosen.append(change)
        if peak(chosen) <= gpu_bytes:
            break
    else:
        return []
    for change in tuple(chosen):
        rest = [other for other in chosen if other is not change]
        if peak(rest) <= gpu_bytes:
            chosen = rest
    return [name for name, _ in chosen]


def _changes(config: Config) -> list[Change]:
    """Candidates, from those that cost nothing to those that cost speed or change what is trained."""

    def setting(*sections: str, **values: object) -> Change:
        names = [f"{section}.{key}={str(value).lower()}" for section in sections for key, value in values.items()]

        def apply(config: Config, sizes: Sizes) -> tuple[Config, Sizes]:
            changed = {section: replace(getattr(config, section), **values) for section in sections}
            return replace(config, **changed), sizes

        return " ".join(names), apply

    def lora(config: Config, sizes: Sizes) -> tuple[Config, Sizes]:
        return config, {
            role: replace(size, adapters=size.adapters or size.parameters // 100)
            for role, size in sizes.items()
            if role != "reference"
        }

    changes = []
    if shares_gpu(config):
        changes.append(setting("engine", sleep_while_training=True))
    changes.append(setting("policy", offload_while_generating=True))
    if config.cluster.num_workers > 1 and config.sharding.name == "none":
        changes.append(setting("sharding", name="fsdp2"))
    changes.append(setting("model", gradient_checkpointing=True))
    trained = ("policy", "critic") if config.algorithm.advantage == "gae" else ("policy",)
    limits = {role: getattr(config, role).max_tokens_per_micro_batch for role in trained}
    tokens = max(limits.values())
    while (tokens := tokens // 2) >= config.rollout.max_prompt_length:
        above = [role for role, limit in limits.items() if limit > tokens]
        changes.append(setting(*above, max_tokens_per_micro_batch=tokens))
    if shares_gpu(config) and config.engine.gpu_memory_utilization > 0.3:
        changes.append(setting("engine", gpu_memory_utilization=0.3))
    changes.append(("model.lora.rank=16", lora))
    changes.append(setting("sharding", name="fsdp2", cpu_offload=True))
    return changes


def render(plan: MemoryPlan, advice: Sequence[str], assumed: bool = False) -> str:
    """The plan as a table of GiB, and what to change."""
    width = max(len(row.name) for row in plan.rows)
    lines = [f"GiB on each GPU{'':{max(width - 15, 0)}}" + "".join(f"{phase:>12}" for phase in PHASES)]
    lines += [
        f"{row.name:<{width}}" + "".join(f"{getattr(row, phase) / GIB:12.2f}" for phase in PHASES) for row in plan.rows
    ]
    lines.append(f"{'total':<{width}}" + "".join(f"{plan.total(phase) / GIB:12.2f}" for phase in PHASES))
    size = f"{plan.gpu_bytes / GIB:.0f} GiB{' (assumed)' if assumed else ''}"
    needed = f"peak {plan.peak / GIB:.1f} GiB with {_RESERVED / GIB:.0f} GiB in reserve, on a GPU of {size}"
    if plan.fits:
        lines.append(f"It fits: {needed}.")
    elif advice:
        lines.append(f"It will not fit: {needed}. Set {' '.join(advice)}")
    else:
        lines.append(f"It will not fit: {needed}. No setting is enough: raise cluster.num_workers, or a smaller model")
    if plan.engine_cache is not None:
        lines.append(_engine_line(plan))
    return "\n".join(lines) + "\n"


def _engine_line(plan: MemoryPlan) -> str:
    held = f"{plan.engine_weights / GIB:.2f} GiB of weights on each of its GPUs"
    if plan.engine_cache is not None and plan.engine_cache > 0:
        return f"An engine holds {held} and leaves about {plan.engine_cache / GIB:.2f} GiB for its cache."
    return (
        f"An engine will not start: {held} leave no room for its cache. Raise engine.gpu_memory_utilization or "
        "engine.tensor_parallel_size"
    )
