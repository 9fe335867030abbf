"""The main job with a real retrieval server, a real model and a real optimizer, in one process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from search_r1.main import main
from tests.serving import metrics_rows, retrieval_server, tiny_run


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with retrieval_server(tmp_path_factory.mktemp("server")) as address:
        yield address


def run(folder: Path, url: str, algorithm: str, *overrides: str) -> Path:
    assert main(["--config-name", algorithm, *tiny_run(folder, url, *overrides)]) == 0
    return folder / "run"


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_same_seed_gives_the_same_metrics_and_another_seed_does_not(tmp_path: Path, url: str, algorithm: str) -> None:
    runs = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(tmp_path, url, algorithm, f"run_dir={tmp_path}/{name}", f"seed={seed}")
        runs.append(metrics_rows(tmp_path / name))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert [row["step"] for row in runs[0]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_resumed_run_has_the_metrics_of_an_uninterrupted_one(tmp_path: Path, url: str, algorithm: str) -> None:
    whole = run(tmp_path, url, algorithm)
    expected = metrics_rows(whole)
    (whole / "summary.json").unlink()
    for step in (3, 4):
        shutil.rmtree(whole / "checkpoints" / f"step_{step:06d}")
    run(tmp_path, url, algorithm)
    assert metrics_rows(whole) == expected
    assert (whole / "summary.json").exists()


def test_adapters_alone_are_trained_saved_and_resumed(tmp_path: Path, url: str) -> None:
    settings = ("model.lora.rank=4", "policy.packing=packed", "policy.offload_while_generating=true")
    whole = run(tmp_path, url, "ppo", *settings)
    expected = metrics_rows(whole)
    saved = whole / "checkpoints" / "step_000004"
    assert (saved / "policy" / "adapter_model.safetensors").is_file()
    assert not (saved / "policy" / "model.safetensors").exists()
    (whole / "summary.json").unlink()
    for step in (3, 4):
        shutil.rmtree(whole / "checkpoints" / f"step_{step:06d}")
    run(tmp_path, url, "ppo", *settings)
    assert metrics_rows(whole) == expected
    assert expected[1]["kl/per_token"] == 0
    assert expected[4]["kl/per_token"] != 0


def test_a_run_killed_in_mid_step_goes_on_by_the_same_command(tmp_path: Path, url: str) -> None:
    arguments = tiny_run(tmp_path, url, "validation.before_training=false")
    command = [sys.executable, "-m", "search_r1.main", "--config-name", "grpo", *arguments]
    process = subprocess.Popen([*command, "trainer.total_steps=500"])
    checkpoints = tmp_path / "run" / "checkpoints"
    while not list(checkpoints.glob("step_000003/trainer.json")):
        assert process.poll() is None
    process.kill()
    process.wait()
    done = len(list(checkpoints.glob("step_*/trainer.json")))
    assert main(["--config-name", "grpo", *arguments, f"trainer.total_steps={done + 2}"]) == 0
    steps = [row["step"] for row in metrics_rows(tmp_path / "run")]
    assert steps == list(range(1, done + 3))


def test_the_run_folder_holds_what_a_person_wants_to_see(tmp_path: Path, url: str) -> None:
    folder = run(tmp_path, url, "grpo", "trainer.total_steps=1")
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "versions.json", "metrics.jsonl", "trajectories", "checkpoints", "summary.json"} <= names
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["algorithm"] == "grpo"
    assert summary["questions"] == 6
    for table in (summary["before"], summary["after"]):
        assert {"em", "f1", "searches_per_question", "valid_action_rate"} <= table.keys()
    rows = [json.loads(line) for line in (folder / "trajectories" / "step_000001.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert {row["group_id"] for row in rows} == {0, 1, 2}
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "step_000001" / "policy")
    assert sum(parameter.numel() for parameter in model.parameters()) > 0


def test_validation_before_and_after_scores_every_question(tmp_path: Path, url: str) -> None:
    folder = run(tmp_path, url, "grpo", "trainer.total_steps=1", "data.val_batch_size=4")
    rows = metrics_rows(folder)
    assert [row["val/questions"] for row in rows] == [6, 6]
    assert rows[0]["val/capitals_a/questions"] == rows[0]["val/capitals_b/questions"] == 3


def test_greedy_validation_is_the_same_twice(tmp_path: Path, url: str) -> None:
    folder = run(tmp_path, url, "grpo", "trainer.total_steps=1", "policy.optim.lr=0", "algorithm.kl_placement=none")
    before, after = (folder / "trajectories" / f"val_{step:06d}.jsonl" for step in (0, 1))

    def tokens(path: Path) -> list[list[int]]:
        return [json.loads(line)["token_ids"] for line in path.read_text().splitlines()]

    assert tokens(before) == tokens(after)


def test_the_optimizer_raises_the_reward(tmp_path: Path, url: str) -> None:
    folder = run(
        tmp_path,
        url,
        "grpo",
        "trainer.total_steps=25",
        "rollout.group_size=8",
        "policy.mini_batch_size=3",
        "policy.optim.lr=5e-3",
        "algorithm.kl_placement=none",
        "trainer.save_every_steps=0",
        "validation.before_training=false",
    )
    rewards = [row["reward/mean"] for row in metrics_rows(folder)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["environment.retriever_urls=[http://127.0.0.1:9/retrieve]", "environment.max_retries=0"], "retriever_server"),
        (["model.path=/nowhere/model"], "/nowhere/model does not exist"),
        (["data.train_files=[/nowhere/train.parquet]"], "/nowhere/train.parquet"),
        (["reward.function=emm"], "did you mean em"),
        (["policy.optimm.lr=1"], "did you mean policy.optim"),
        (["rollout.max_prompt_length=100000"], "positions"),
        (["rollout.group_size=0"], "above 0"),
        (["engine.tensor_parallel_size=3"], "2 attention heads over 1 key/value heads"),
        (["model.lora.rank=4", "model.lora.targets=[q_porj]"], "q_porj names no linear layer"),
    ],
)
def test_bad_input_ends_with_one_sentence_before_anything_is_written(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], overrides: list[str], words: str
) -> None:
    assert main(["--config-name", "grpo", *tiny_run(tmp_path, url, *overrides)]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert "Traceback" not in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("batch", "group", "mini", "val"), [(5, 3, 2, 4), (7, 2, 3, 50), (1, 1, 9, 1)])
def test_no_size_is_refused_for_not_dividing(
    tmp_path: Path, url: str, batch: int, group: int, mini: int, val: int
) -> None:
    sizes = (f"data.train_batch_size={batch}", f"rollout.group_size={group}", f"policy.mini_batch_size={mini}")
    folder = run(tmp_path, url, "ppo", *sizes, f"data.val_batch_size={val}", "trainer.total_steps=1")
    assert metrics_rows(folder)[1]["rollout/num_trajectories"] == batch * group
