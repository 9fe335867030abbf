"""Training over two Ray nodes (`ray.cluster_utils`): who is placed where, and what happens when a node leaves."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from pathlib import Path

import pytest
import ray

from search_r1.cluster.engine_pool import EnginePool
from search_r1.cluster.placement import Home, engine_places
from search_r1.cluster.worker_group import WorkerGroup, start_engines
from search_r1.config import ClusterConfig, Config, EngineConfig
from search_r1.errors import ConfigError
from search_r1.main import main
from search_r1.types import SamplingConfig
from tests.fakes import encode
from tests.pool_engine import PoolEngine
from tests.serving import metrics_rows, retrieval_server, tiny_run
from tests.two_nodes import GpuEngine, TwoNodes, two_nodes

ROOT = Path(__file__).resolve().parents[2]
TWO_WORKERS = ("cluster.launcher=ray", "cluster.num_workers=2", "policy.optim.lr=1e-4")
A_WHILE_S = 120
"""Longest wait for a cluster to notice that a node left; it takes seconds."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with retrieval_server(tmp_path_factory.mktemp("server")) as address:
        yield address


@pytest.fixture(scope="module")
def one_cluster() -> Iterator[TwoNodes]:
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture
def nodes(one_cluster: TwoNodes) -> TwoNodes:
    one_cluster.complete()
    return one_cluster


def launch(nodes: TwoNodes, arguments: Sequence[str]) -> subprocess.Popen[str]:
    """The launch script, on a machine of the cluster that RAY_ADDRESS names."""
    environment = {**os.environ, "RAY_ADDRESS": nodes.address, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = ["./train_grpo.sh", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def train(nodes: TwoNodes, arguments: Sequence[str]) -> list[set[str]]:
    """Train to the end; which actors ran on each node meanwhile."""
    process = launch(nodes, arguments)
    seen: list[set[str]] = [set(), set()]
    with ThreadPoolExecutor() as threads:
        errors = threads.submit(process.communicate)
        while process.poll() is None:
            seen = [before | now for before, now in zip(seen, nodes.actors(), strict=True)]
            time.sleep(0.2)
        assert process.returncode == 0, errors.result()[1]
    return seen


def test_a_trainer_and_an_engine_on_each_node_take_two_steps_with_the_numbers_of_one_process(
    nodes: TwoNodes, tmp_path: Path, url: str
) -> None:
    """Here each worker has its own Hugging Face engine."""
    settings = ("trainer.total_steps=2", "trainer.save_every_steps=0", "policy.optim.lr=1e-4")
    seen = train(nodes, tiny_run(tmp_path, url, *settings, *TWO_WORKERS))
    assert all("Worker" in actors for actors in seen)
    rows = metrics_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    alone = tmp_path / "alone"
    assert main(["--config-name", "grpo", *tiny_run(tmp_path, url, *settings, f"run_dir={alone}")]) == 0
    for row, expected in zip(rows, metrics_rows(alone), strict=True):
        assert row == pytest.approx(expected, rel=2e-4, abs=2e-4)


@pytest.mark.vllm
def test_a_trainer_and_a_vllm_engine_on_each_node_take_two_steps_that_agree(
    nodes: TwoNodes, tmp_path: Path, url: str
) -> None:
    vllm = ("engine.name=vllm", "engine.num_engines=2", "engine.cpu_cache_gib=0.25", "engine.max_batch_size=8")
    settings = ("trainer.total_steps=2", "validation.before_training=false", "sharding.name=fsdp2")
    seen = train(nodes, tiny_run(tmp_path, url, *vllm, *settings, *TWO_WORKERS))
    assert all({"Worker", "EngineWorker"} <= actors for actors in seen)
    rows = metrics_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/rollout_log_prob_gap"] < 1e-4 for row in rows)
    assert all(row["rollout/num_void"] == 0 for row in rows)


def test_a_node_that_leaves_ends_the_run_with_its_cause_and_the_run_goes_on_without_it(
    nodes: TwoNodes, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = tiny_run(tmp_path, url, "validation.before_training=false", *TWO_WORKERS)
    process = launch(nodes, [*arguments, "trainer.total_steps=1000"])
    checkpoints = tmp_path / "run" / "checkpoints"
    while not list(checkpoints.glob("step_000001/trainer.json")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    nodes.other_leaves()
    _, errors = process.communicate(timeout=A_WHILE_S)
    assert process.returncode == 2
    assert "a worker process died" in errors
    assert "the same command" in errors
    assert "Traceback" not in errors
    done = len(metrics_rows(tmp_path / "run"))
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    fewer = ["cluster.num_workers=1", f"trainer.total_steps={done + 1}"]
    assert main(["--config-name", "grpo", *arguments, *fewer]) == 0
    assert [row["step"] for row in metrics_rows(tmp_path / "run")] == list(range(1, done + 2))


@pytest.fixture
def joined(nodes: TwoNodes) -> Iterator[TwoNodes]:
    """This process is the driver."""
    ray.init(address=nodes.address, logging_level="ERROR")
    yield nodes
    ray.shutdown()


def test_what_the_engine_of_a_node_that_left_was_sampling_is_sampled_elsewhere(
    joined: TwoNodes, tmp_path: Path
) -> None:
    homes = [Home(node["NodeID"]) for node in ray.nodes() if node["Alive"]]
    config = Config(engine=EngineConfig(num_engines=2))
    places = engine_places(config, homes)
    start = partial(start_engines, config.cluster, 64, places, repeat(partial(PoolEngine, tmp_path)))
    pool = EnginePool(start, 2, give_back=places.give_back)
    joined.wait_for("EngineWorker")
    contexts = [encode(f"{row} hold information") for row in range(8)]
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(pool.generate, contexts, SamplingConfig(64), range(8))
        while len(list(tmp_path.glob("held-*"))) < 2:
            time.sleep(0.02)
        joined.other_leaves()
        (tmp_path / "go").touch()
        assert len(answer.result(timeout=A_WHILE_S)) == 8
    pool.close()


def test_each_worker_gets_a_gpu_and_an_engine_shares_it_where_a_part_is_left(joined: TwoNodes, tmp_path: Path) -> None:
    shared = ClusterConfig(num_workers=2, gpus_per_worker=0.5)
    group = WorkerGroup(shared, dict)
    assert len({home.node_id for home in group.homes}) == 2
    assert [home.gpu_ids for home in group.homes] == [("0",), ("0",)]
    places = engine_places(Config(cluster=shared, engine=EngineConfig(num_engines=2)), group.homes)
    engines = start_engines(shared, 1, places, repeat(partial(GpuEngine, tmp_path)), 2)
    assert ray.get([engine.call.remote("home") for engine in engines]) == [
        (home.node_id, home.gpu_ids[0]) for home in group.homes
    ]
    group.close()


def test_engines_with_gpus_of_their_own_that_do_not_fit_say_what_to_lower(joined: TwoNodes) -> None:
    alone = ClusterConfig(gpus_per_worker=1.0, start_timeout_s=1)
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size=2 does not fit: .* the largest node has 1"):
        engine_places(Config(cluster=alone, engine=EngineConfig(tensor_parallel_size=2)), [])
    with pytest.raises(ConfigError, match=r"cannot place 3 processes .*'GPU': 2.*lower engine\.num_engines"):
        engine_places(Config(cluster=alone, engine=EngineConfig(num_engines=3)), [])


def test_a_run_folder_that_a_node_does_not_see_is_refused(tmp_path: Path) -> None:
    group = object.__new__(WorkerGroup)
    group.homes = [Home("first"), Home("second")]
    group._call = lambda submit: [True, False]  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=rf"nodes second do not see {tmp_path}, .*set run_dir"):
        group.check_shared(tmp_path / "runs" / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_that_is_not_there_is_named_with_the_remedy(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(["--config-name", "grpo", *tiny_run(tmp_path, url, "cluster.launcher=ray")]) == 2
    message = capsys.readouterr().err
    assert "127.0.0.1:1" in message
    assert "unset RAY_ADDRESS" in message
