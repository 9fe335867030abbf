"""FSDP2 over four processes, full and hybrid, against one process that holds everything."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

from search_r1.backends.critic import LocalCritic
from search_r1.backends.policy import LocalPolicy, build_reference
from search_r1.backends.sharding import Replicated, build_sharding
from search_r1.config import Config, LoraConfig, ShardingConfig
from search_r1.data.micro_batches import make_shares
from tests.batches import random_batch, tiny_training_config, with_policy
from tests.model_factory import tiny_model_dir

WORLD = 4
BATCHES = [random_batch((9, 14, 6, 11, 5, 8, 13), seed=seed) for seed in (1, 2)]
Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    sharding: ShardingConfig
    rank: int = 0
    packing: str = "auto"
    dtype: str = "float32"
    model: str = "tied"


FULL = ShardingConfig(name="fsdp2")
CASES = {
    "replicated": Case(ShardingConfig()),
    "full": Case(FULL),
    "hybrid": Case(replace(FULL, replicas=2)),
    "replicas only": Case(replace(FULL, replicas=4)),
    "offloaded": Case(replace(FULL, cpu_offload=True)),
    "untied packed": Case(FULL, packing="packed", model="untied"),
    "lora": Case(FULL, rank=4),
    "untied hybrid lora": Case(replace(FULL, replicas=2), rank=4, model="untied"),
    "half": Case(FULL, dtype="bfloat16"),
}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Frequencies that only the loaded buffers or the configuration can tell."""


def config_of(folder: str, case: Case, rank: int = 0) -> Config:
    """Ranks that need no weights find none."""
    path = f"{folder}/{case.model}" + ("-bare" if rank and case.sharding.name == "fsdp2" else "")
    config = with_policy(tiny_training_config(path, lr=1e-3, max_tokens=30), packing=case.packing)
    return replace(config, model=replace(config.model, dtype=case.dtype, lora=LoraConfig(rank=case.rank)))


def train(config: Config, sharding: Any, world: int, rank: int, folder: str) -> dict[str, Any]:
    """Two updates of policy and critic, then everything a worker is asked for."""
    torch.manual_seed(0)
    policy, critic = LocalPolicy(config, sharding, 10), LocalCritic(config, sharding, 10)
    reference = build_reference(config, sharding, policy)
    metrics = {}
    for batch in BATCHES:
        shares = make_shares(batch, 100, world)[rank]
        metrics = policy.update_shares(shares) | critic.update_shares(shares)
    rollout = BATCHES[0].rollout
    results = {
        "metrics": metrics,
        "weights": {name: tensor.cpu() for name, tensor in policy.weights()},
        "scores": [policy.log_probs(rollout), reference.log_probs(rollout), critic.values(rollout)],
        "master": {p.dtype for group in policy.trainable.optimizer.param_groups for p in group["params"]},
    }
    policy.save(f"{folder}/policy")
    critic.save(f"{folder}/critic")
    return results


class Traffic(TorchDispatchMode):
    """Writes down every operation between processes."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def worker(rank: int, path: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    results: Results = {}
    for name, case in CASES.items():
        sharding = build_sharding(case.sharding, case.dtype)
        results[name] = train(config_of(path, case, rank), sharding, WORLD, rank, f"{folder}/{name}")
    small = with_policy(config_of(path, CASES["hybrid"], rank), max_tokens_per_micro_batch=14)
    resumed = LocalPolicy(small, build_sharding(CASES["hybrid"].sharding), 10)
    (share,) = make_shares(BATCHES[0], 100, WORLD)[rank]
    with Traffic() as traffic:
        resumed.update_shares([share])
    results["traffic"] = {
        "reductions": sum("reduce_scatter" in name for name in traffic.operations),
        "micro-batches": len(resumed.layout.rows(share.batch.rollout)),
    }
    dist.barrier()
    resumed.load(f"{folder}/full/policy")
    results["resumed"] = {"weights": dict(resumed.weights())}
    torch.save(results, f"{folder}/results_{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of models, each also without its weights."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model_dir(folder / "tied")
    tiny_model_dir(folder / "untied", "llama", tied=False, rope_parameters=ROPE)
    for name in ("tied", "untied"):
        shutil.copytree(folder / name, folder / f"{name}-bare", ignore=shutil.ignore_patterns("*.safetensors"))
    return str(folder)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, model: str) -> tuple[list[Results], Path]:
    """What every rank saw, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("sharded")
    mp.spawn(worker, (model, str(folder)), nprocs=WORLD)
    return [torch.load(folder / f"results_{rank}.pt", weights_only=False) for rank in range(WORLD)], folder


def distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("name", [name for name in CASES if name != "half"])
def test_numbers_do_not_depend_on_how_the_model_is_split(
    sharded: tuple[list[Results], Path], model: str, tmp_path: Path, name: str
) -> None:
    expected = train(config_of(model, CASES[name]), Replicated(), 1, 0, str(tmp_path))
    for results in sharded[0]:
        result = results[name]
        assert result["metrics"] == pytest.approx(expected["metrics"], rel=2e-4, abs=2e-4)
        assert distance(result["weights"], expected["weights"]) < 2e-4
        for score, other in zip(result["scores"], expected["scores"], strict=True):
            torch.testing.assert_close(score, other, atol=5e-4, rtol=1e-3)


def test_half_precision_keeps_float32_master_weights_and_comes_close(
    sharded: tuple[list[Results], Path], model: str, tmp_path: Path
) -> None:
    expected = train(config_of(model, CASES["full"]), Replicated(), 1, 0, str(tmp_path))
    for results in sharded[0]:
        assert results["half"]["master"] == {torch.float32}
        assert {tensor.dtype for tensor in results["half"]["weights"].values()} == {torch.float32}
        assert results["half"]["metrics"]["actor/entropy"] == pytest.approx(
            expected["metrics"]["actor/entropy"], rel=0.02
        )
        torch.testing.assert_close(results["half"]["scores"][1], expected["scores"][1], atol=0.2, rtol=0.05)
        assert not torch.equal(results["half"]["scores"][1], expected["scores"][1])


def test_a_sharded_checkpoint_loads_into_another_sharding_and_into_one_process(
    sharded: tuple[list[Results], Path], model: str
) -> None:
    results, folder = sharded
    for result in results:
        assert distance(result["resumed"]["weights"], result["full"]["weights"]) == 0
    for name in ("full", "untied hybrid lora"):
        alone = LocalPolicy(config_of(model, CASES[name]), Replicated(), 10)
        alone.load(f"{folder}/{name}/policy")
        assert distance(dict(alone.weights()), results[0][name]["weights"]) < 1e-6
        assert alone.update(BATCHES[0])["actor/grad_norm"] > 0


def test_gradients_are_reduced_once_a_step_however_many_micro_batches_there_are(
    sharded: tuple[list[Results], Path],
) -> None:
    traffic = [results["traffic"] for results in sharded[0]]
    assert max(counts["micro-batches"] for counts in traffic) > 1
    units = 3  # two layers, and what lies around them
    assert [counts["reductions"] for counts in traffic] == [units] * WORLD


def test_fsdp2_on_a_single_worker_needs_no_process_group(model: str, tmp_path: Path) -> None:
    config = config_of(model, CASES["full"])
    expected = train(config, Replicated(), 1, 0, str(tmp_path / "a"))
    try:
        result = train(config, build_sharding(FULL), 1, 0, str(tmp_path / "b"))
    finally:
        dist.destroy_process_group()
    assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-5)
    assert distance(result["weights"], expected["weights"]) < 1e-5
