"""Going on, going back, and not being gone over: what becomes of a run folder that holds something already."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from search_r1.main import main
from search_r1.trainer.run_folder import RunFolder
from search_r1.types import Trajectory
from tests.serving import metrics_rows, retrieval_server, tiny_run, vowel_share

SETTINGS = ("trainer.total_steps=2", "trainer.save_every_steps=1", "trainer.keep_checkpoints=5")
calls, other_calls = count(1), count(1)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with retrieval_server(tmp_path_factory.mktemp("server")) as address:
        yield address


@pytest.fixture
def finished(tmp_path: Path, url: str) -> Path:
    assert main(["--config-name", "grpo", *tiny_run(tmp_path, url, *SETTINGS)]) == 0
    return tmp_path / "run"


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_going_back_to_a_checkpoint_forgets_what_came_after_it(finished: Path, tmp_path: Path, url: str) -> None:
    back = f"trainer.resume={finished}/checkpoints/step_000001"
    arguments = tiny_run(tmp_path, url, *SETTINGS, back, "policy.optim.lr=0", "trainer.keep_checkpoints=1")
    before = (finished / "checkpoints/step_000002/policy/model.safetensors").read_bytes()
    assert main(["--config-name", "grpo", *arguments]) == 0
    assert checkpoints(finished) == ["step_000002"]
    assert (finished / "checkpoints/step_000002/policy/model.safetensors").read_bytes() != before
    assert [row["step"] for row in metrics_rows(finished)] == [0, 1, 2]


def test_what_was_validated_after_the_checkpoint_goes_too(finished: Path) -> None:
    assert (finished / "trajectories/val_000002.jsonl").exists()
    RunFolder(finished).forget_after(1)
    assert sorted(path.name for path in (finished / "trajectories").iterdir()) == [
        "step_000001.jsonl",
        "val_000000.jsonl",
    ]
    assert not (finished / "summary.json").exists()


def test_starting_anew_where_a_run_lies_is_refused_and_loses_nothing(
    finished: Path, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = tiny_run(tmp_path, url, *SETTINGS, "trainer.resume=never")
    assert main(["--config-name", "grpo", *arguments]) == 2
    assert "another run_dir" in capsys.readouterr().err
    assert checkpoints(finished) == ["step_000001", "step_000002"]
    assert (finished / "summary.json").exists()


def test_a_learning_rate_changed_on_resume_holds_and_every_change_is_told(
    finished: Path, tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    changes = ("trainer.total_steps=3", "policy.optim.lr=0.25", "policy.optim.weight_decay=0.5")
    with caplog.at_level(logging.WARNING):
        assert main(["--config-name", "grpo", *tiny_run(tmp_path, url, *SETTINGS, *changes)]) == 0
    assert metrics_rows(finished)[-1]["actor/lr"] == 0.25
    assert "policy.optim.weight_decay: 0.01 -> 0.5" in caplog.text


def test_a_folder_that_a_living_run_writes_to_is_refused(
    finished: Path, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunFolder(finished).hold():
        assert main(["--config-name", "grpo", *tiny_run(tmp_path, url, *SETTINGS, "trainer.total_steps=3")]) == 2
    assert "another run is writing" in capsys.readouterr().err
    assert len(metrics_rows(finished)) == 3


def fails_after_training(trajectory: Trajectory) -> float:
    """The six trajectories of the one step are scored; the validation after it is not."""
    assert next(calls) <= 6
    return 0.5


def test_training_is_saved_before_the_validation_that_may_fail(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("trainer.total_steps=1", "validation.before_training=false")
    reward = f"reward.function={__name__}:fails_after_training"
    assert main(["--config-name", "grpo", *tiny_run(tmp_path, url, *settings, reward)]) == 2
    assert "fails_after_training" in capsys.readouterr().err
    assert checkpoints(tmp_path / "run") == ["step_000001"]
    assert [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()] == [1]


def fails_in_the_second_validation(trajectory: Trajectory) -> dict[str, float]:
    """Two steps and one validation of six trajectories each come before it."""
    assert next(other_calls) != 19
    return vowel_share(trajectory)


def test_a_run_that_stopped_in_a_validation_makes_it_up_and_ends_like_one_that_did_not(
    tmp_path: Path, url: str
) -> None:
    """To the bit, though the uninterrupted one validated between its steps: what it cached leaves no trace."""
    settings = ["validation.every_steps=1", "validation.before_training=false", "validation.temperature=1"]
    settings += ["data.val_batch_size=6", "rollout.max_turns=2", "trainer.total_steps=3"]
    arguments = ["--config-name", "grpo", *tiny_run(tmp_path, url, *settings)]
    assert main([*arguments, f"run_dir={tmp_path}/whole"]) == 0
    broken = [*arguments, f"reward.function={__name__}:fails_in_the_second_validation"]
    assert main(broken) == 2
    assert not (tmp_path / "run/trajectories/val_000002.jsonl").exists()
    assert main(broken) == 0
    assert metrics_rows(tmp_path / "run") == metrics_rows(tmp_path / "whole")
    assert (tmp_path / "run/trajectories/val_000002.jsonl").exists()
