"""What a step scores before it learns: each role that something needs, in one call, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from search_r1.algorithms.kl import FixedKLController
from search_r1.compose import compose_config
from search_r1.trainer.step import Stopwatch, prepare
from search_r1.types import RolloutBatch
from tests.batches import random_batch


@pytest.mark.parametrize(
    ("algorithm", "settings", "expected"),
    [
        ("grpo", ["algorithm.kl_placement=none"], []),
        ("grpo", ["algorithm.kl_coef=0"], []),
        ("grpo", [], [["reference"]]),
        ("grpo", ["policy.epochs=2"], [["policy", "reference"]]),
        ("grpo", ["policy.mini_batch_size=1"], [["policy", "reference"]]),
        ("grpo", ["algorithm.kl_placement=none", "algorithm.importance_cap=2"], [["policy"]]),
        ("grpo", ["algorithm.kl_placement=reward"], [["policy", "reference"]]),
        ("ppo", ["algorithm.kl_placement=none"], [["critic"]]),
        ("ppo", ["algorithm.kl_placement=reward"], [["policy", "reference", "critic"]]),
        ("ppo", ["algorithm.kl_placement=loss", "policy.epochs=3"], [["policy", "reference", "critic"]]),
    ],
)
def test_only_what_is_needed_is_scored_and_all_of_it_at_once(
    algorithm: str, settings: list[str], expected: list[list[str]]
) -> None:
    sizes = ["rollout.group_size=2", "policy.mini_batch_size=2", "engine.name=vllm"]
    config = compose_config(algorithm, [*sizes, *settings])
    asked: list[list[str]] = []

    def score(rollout: RolloutBatch, names: Sequence[str]) -> dict[str, Tensor]:
        asked.append(list(names))
        return {name: torch.zeros_like(rollout.rollout_log_probs) for name in names}

    has_reference = config.algorithm.kl_placement != "none" and config.algorithm.kl_coef > 0
    critic = object() if algorithm == "ppo" else None
    roles: Any = SimpleNamespace(score=score, reference=object() if has_reference else None, critic=critic)
    batch, _ = prepare(roles, random_batch().rollout, config, FixedKLController(0.1), Stopwatch())
    assert asked == expected
    scored = set(expected[0]) if expected else set()
    given = {"policy": batch.old_log_probs, "reference": batch.ref_log_probs, "critic": batch.values}
    assert {name for name, values in given.items() if values is not None} == scored
