from __future__ import annotations

from itertools import islice

import pytest

from search_r1.compose import compose_config
from search_r1.config import Config
from search_r1.trainer.build import engine_factories


def test_each_engine_of_a_pool_has_a_seed_of_its_own_and_so_has_one_that_replaces_another() -> None:
    factories = engine_factories(Config(seed=7))
    assert [factory.args[0].seed for factory in islice(factories, 2)] == [7, 8]  # type: ignore[attr-defined]
    assert next(factories).args[0].seed == 9  # type: ignore[attr-defined]


@pytest.mark.parametrize("experiment", ["quickstart", "minibench", "tools"])
def test_an_experiment_leaves_the_schedule_to_the_engine_it_is_run_with(experiment: str) -> None:
    assert compose_config("grpo", [f"experiment={experiment}", "engine=vllm"]).rollout.schedule == "auto"
