"""Real actors that are really killed: what they sampled is sampled elsewhere, and they come back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from pathlib import Path

import pytest
import torch

from search_r1.cluster.engine_pool import EnginePool
from search_r1.cluster.placement import EnginePlaces, Place
from search_r1.cluster.weight_sync import EngineClients
from search_r1.cluster.worker_group import start_engines
from search_r1.config import ClusterConfig, EnvironmentConfig, RolloutConfig
from search_r1.environments.search import SearchEnvironment
from search_r1.errors import ConfigError, EngineError, EngineLostError
from search_r1.rollout.manager import LLMGenerationManager
from search_r1.types import SamplingConfig, Status
from tests.fakes import FakeRetriever, decode, encode, make_prompt
from tests.pool_engine import PoolEngine

pytestmark = pytest.mark.usefixtures("local_ray")
SAMPLING = SamplingConfig(64)
CONFIG = RolloutConfig(
    max_turns=2, max_start_length=64, max_response_length=64, max_obs_length=200, max_prompt_length=900
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


def start_pool(folder: Path, count: int) -> EnginePool:
    places = EnginePlaces([Place()] * count)
    start = partial(start_engines, ClusterConfig(), 64, places, repeat(partial(PoolEngine, folder)))
    return EnginePool(start, count, give_back=places.give_back)


@pytest.fixture(scope="module")
def one_pool(folder: Path) -> Iterator[EnginePool]:
    pool = start_pool(folder, 2)
    yield pool
    pool.close()


@pytest.fixture
def pool(one_pool: EnginePool, folder: Path) -> EnginePool:
    """Two live engines, with weights of version 3."""
    for path in folder.iterdir():
        path.unlink()
    load(one_pool, 3)
    assert versions(one_pool) == {"3"}
    return one_pool


def load(pool: EnginePool, version: float) -> None:
    pool.load_weights([("weight", torch.tensor(version))])


def manager_of(pool: EnginePool) -> LLMGenerationManager:
    environment = SearchEnvironment(FakeRetriever(), encode, decode, EnvironmentConfig(), 200)
    return LLMGenerationManager(pool, environment, CONFIG)


def wait_for(folder: Path, pattern: str, count: int) -> list[Path]:
    while len(found := list(folder.glob(pattern))) < count:
        time.sleep(0.02)
    return found


def kill(path: Path) -> None:
    os.kill(int(path.name.split("-")[1]), signal.SIGKILL)


def versions(pool: EnginePool, num_engines: int = 2) -> set[str]:
    """What all engines answer, once there are so many that answer."""
    answers: dict[str, str] = {}
    number = 0
    while len(answers) < num_engines:
        contexts = [encode(f"{number + i} information") for i in range(4)]
        number += 4
        found = [
            completion.text.strip("<>answer/").split() for completion in pool.generate(contexts, SAMPLING, [0] * 4)
        ]
        answers |= dict(found)
    return set(answers.values())


def test_killing_an_engine_in_mid_rollout_loses_no_trajectory(folder: Path, pool: EnginePool) -> None:
    """Its trajectories go on elsewhere, and the engine that replaces it has the weights of now."""
    manager = manager_of(pool)
    job = manager.start([make_prompt(f"{group} hold", group) for group in range(8)], SAMPLING)
    kill(wait_for(folder, "held-*", 8)[0])
    (folder / "go").touch()
    assert [trajectory.status for trajectory in job.result()] == [Status.ANSWERED] * 8
    manager.close()
    assert versions(pool) == {"3"}
    load(pool, 4)
    assert versions(pool) == {"4"}


def test_killing_an_engine_in_a_lockstep_turn_loses_no_completion(folder: Path, pool: EnginePool) -> None:
    contexts = [encode(f"{row} hold information") for row in range(8)]
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(pool.generate, contexts, SAMPLING, range(8))
        kill(wait_for(folder, "held-*", 2)[0])
        (folder / "go").touch()
        assert len(answer.result()) == 8


def test_an_engine_that_dies_while_it_takes_weights_is_replaced_by_one_that_has_them(
    folder: Path, pool: EnginePool
) -> None:
    (folder / "die-while-loading").touch()
    load(pool, 5)
    assert versions(pool) == {"5"}


def test_a_context_that_kills_every_engine_is_given_up_and_voids_its_trajectory_alone(
    folder: Path, pool: EnginePool
) -> None:
    manager = manager_of(pool)
    found = manager.run_llm_loop([make_prompt(text) for text in ["crash"] + ["good"] * 10], SAMPLING)
    manager.close()
    assert [trajectory.status for trajectory in found] == [Status.VOID] + [Status.ANSWERED] * 10
    assert "engines died over the same completion" in found[0].failure


def test_an_engine_that_replaces_another_one_in_its_sleep_falls_asleep_too(tmp_path: Path) -> None:
    pool = start_pool(tmp_path, 1)
    load(pool, 3)
    pool.sleep(2)
    kill(wait_for(tmp_path, "asleep-*-2", 1)[0])
    while pool.score_each([], [], SAMPLING):  # somebody has to notice
        time.sleep(0.02)
    wait_for(tmp_path, "asleep-*-2", 2)
    pool.wake_up(weights_only=True)
    pool.wake_up()
    assert wait_for(tmp_path, "awake-*", 1)
    assert versions(pool, num_engines=1) == {"3"}
    pool.close()


def send_by_vllms_calls(engines: list[object]) -> None:
    """As vLLM's senders do it, with engines of two GPUs each."""
    client = EngineClients(engines, gpus_per_engine=2)
    client.init_weight_transfer_engine({"rank_offset": 1})
    client.start_weight_update()
    client.update_weights({"version": 8.0})
    client.finish_weight_update()


def test_vllms_senders_reach_every_engine_under_ranks_of_its_own(folder: Path, pool: EnginePool) -> None:
    pool.update_weights(send_by_vllms_calls)
    assert {path.name for path in folder.glob("first-rank-*")} == {"first-rank-1", "first-rank-3"}
    assert versions(pool) == {"8"}


def test_vllms_senders_go_on_without_an_engine_that_dies(tmp_path: Path) -> None:
    pool = start_pool(tmp_path, 2)
    (tmp_path / "die-while-loading").touch()
    pool.update_weights(send_by_vllms_calls)
    assert versions(pool) == {"8"}
    pool.close()


def test_every_engine_of_a_pool_scores(pool: EnginePool) -> None:
    assert pool.score_each([[1]], [[2]], SAMPLING) == [[[3.0]]] * 2


def test_without_any_engine_the_error_names_the_cause(tmp_path: Path) -> None:
    def start(count: int) -> list[object]:
        if list(tmp_path.glob("engine-*")):
            raise EngineError("no room for another one")
        return start_engines(ClusterConfig(), 64, EnginePlaces([Place()]), repeat(partial(PoolEngine, tmp_path)), count)

    pool = EnginePool(start, 1)
    with pytest.raises(EngineLostError, match=r"no rollout engine is left: .*no room for another one"):
        pool.generate([encode("crash")], SAMPLING, [0])


def test_engines_that_the_cluster_has_no_room_for_say_so(tmp_path: Path) -> None:
    start = partial(
        start_engines, ClusterConfig(), 64, EnginePlaces([Place(gpus=2.0)] * 2), repeat(partial(PoolEngine, tmp_path))
    )
    with pytest.raises(ConfigError, match=r"2 rollout engines did not start.*engine\.tensor_parallel_size"):
        EnginePool(start, 2, start_timeout_s=1.0)


def test_cancelling_a_rollout_stops_the_sampling_in_the_engines(folder: Path, pool: EnginePool) -> None:
    manager = manager_of(pool)
    job = manager.start([make_prompt(f"{group} hold", group) for group in range(4)], SAMPLING)
    wait_for(folder, "held-*", 4)
    job.cancel()
    wait_for(folder, "cancelled-*", 4)
    manager.close()
