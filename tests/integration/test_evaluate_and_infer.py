"""Evaluation and inference need no trainer and differ from training in nothing but the sampling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from search_r1 import evaluate, infer, main
from tests.model_factory import tiny_model_dir
from tests.serving import retrieval_server, tiny_run, write_questions

LENGTHS = (
    "rollout.max_turns=1",
    "rollout.max_start_length=400",
    "rollout.max_response_length=12",
    "rollout.max_obs_length=60",
    "rollout.max_prompt_length=500",
    "engine=hf",
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with retrieval_server(tmp_path_factory.mktemp("server")) as address:
        yield address


def test_evaluation_equals_the_validation_of_training(tmp_path: Path, url: str) -> None:
    assert main.main(["--config-name", "grpo", *tiny_run(tmp_path, url, "trainer.total_steps=1")]) == 0
    trained = json.loads((tmp_path / "run" / "summary.json").read_text())
    settings = [word for word in tiny_run(tmp_path, url) if word.split("=")[0] not in ("run_dir", "model.path")]
    model = tmp_path / "run" / "checkpoints" / "step_000001" / "policy"
    assert evaluate.main([f"model={model}", *settings, "--output", str(tmp_path / "eval")]) == 0
    found = json.loads((tmp_path / "eval" / "summary.json").read_text())
    assert found["all"] == trained["after"]
    rows = [json.loads(line) for line in (tmp_path / "eval" / "questions.jsonl").read_text().splitlines()]
    after = (tmp_path / "run" / "trajectories" / "val_000001.jsonl").read_text().splitlines()
    assert [row["token_ids"] for row in rows] == [json.loads(line)["token_ids"] for line in after]


def test_evaluation_says_what_is_missing(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main([f"retriever={url}", f"data={tmp_path}/none.parquet", f"model={tmp_path}"]) == 2
    assert "none.parquet" in capsys.readouterr().err
    data = write_questions(tmp_path / "q.parquet")
    tiny_model_dir(tmp_path / "model")
    down = "retriever=http://127.0.0.1:9/retrieve"
    assert evaluate.main([down, f"data={data}", f"model={tmp_path}/model", *LENGTHS, "environment.max_retries=0"]) == 2
    assert "retriever_server" in capsys.readouterr().err
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    assert evaluate.main([f"retriever={url}", f"data={data}", f"model={tmp_path}/model", *LENGTHS]) == 2
    assert "tokenizer" in capsys.readouterr().err


def test_a_question_is_answered_on_the_command_line(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model_dir(tmp_path / "model")
    assert infer.main([f"model={tmp_path}/model", f"retriever={url}", *LENGTHS, "what is the capital of Peru"]) == 0
    shown = capsys.readouterr().out
    assert "what is the capital of Peru?" in shown
    assert "answer:" in shown
