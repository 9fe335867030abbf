"""The same run on Ray workers: one or two, replicated or sharded, with the numbers of a run without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from search_r1.main import main
from tests.serving import metrics_rows, retrieval_server, tiny_run

pytestmark = pytest.mark.usefixtures("local_ray")
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with retrieval_server(tmp_path_factory.mktemp("server")) as address:
        yield address


def run(folder: Path, url: str, algorithm: str, *overrides: str) -> list[dict[str, float]]:
    settings = ("trainer.total_steps=2", "trainer.save_every_steps=0", "policy.optim.lr=1e-4", *overrides)
    assert main(["--config-name", algorithm, *tiny_run(folder, url, *settings)]) == 0
    return metrics_rows(folder / "run")


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_one_and_two_workers_and_no_ray_give_the_same_numbers(tmp_path: Path, url: str, algorithm: str) -> None:
    results = []
    for number, settings in enumerate(
        (
            ["cluster.launcher=local"],
            ["cluster.launcher=ray", "cluster.num_workers=1"],
            ["cluster.launcher=ray", "cluster.num_workers=2"],
            ["cluster.launcher=ray", "cluster.num_workers=2", "sharding.name=fsdp2"],
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        results.append(run(folder, url, algorithm, *settings))
    local, one, two, sharded = results
    assert local == one
    for other in (two, sharded):
        for expected, row in zip(local, other, strict=True):
            assert row == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


def test_adapters_train_alike_in_one_process_and_sharded_over_two(tmp_path: Path, url: str) -> None:
    sharded = ("cluster.launcher=ray", "cluster.num_workers=2", "sharding.name=fsdp2")
    results = []
    for name, settings in (("local", ("cluster.launcher=local",)), ("sharded", sharded)):
        (tmp_path / name).mkdir()
        results.append(run(tmp_path / name, url, "grpo", *settings, "model.lora.rank=4", "policy.optim.lr=1e-2"))
    for expected, row in zip(*results, strict=True):
        assert row == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


def test_a_run_resumes_on_another_number_of_workers_and_another_sharding(tmp_path: Path, url: str) -> None:
    common = ["cluster.launcher=ray", "trainer.save_every_steps=1", "validation.before_training=false"]
    run(tmp_path, url, "ppo", *common, "trainer.total_steps=1", "cluster.num_workers=2", "sharding.name=fsdp2")
    rows = run(tmp_path, url, "ppo", *common, "trainer.total_steps=2", "cluster.num_workers=1")
    assert [row["step"] for row in rows] == [1, 2]


def test_more_workers_than_questions_still_train(tmp_path: Path, url: str) -> None:
    rows = run(
        tmp_path,
        url,
        "grpo",
        "cluster.launcher=ray",
        "cluster.num_workers=3",
        "data.train_batch_size=1",
        "rollout.group_size=2",
        "data.val_batch_size=1",
        "data.max_val_questions=2",
    )
    assert rows[1]["rollout/num_trajectories"] == 2


def test_asking_for_more_than_the_cluster_has_says_so(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["cluster.launcher=ray", "cluster.num_workers=64", "cluster.start_timeout_s=2"]
    assert main(["--config-name", "grpo", *tiny_run(tmp_path, url, *settings)]) == 2
    assert "cluster.num_workers" in capsys.readouterr().err
