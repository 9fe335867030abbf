"""Supervised fine-tuning from the command line: what it leaves behind, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from search_r1 import sft
from tests.model_factory import tiny_model_dir


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    row = {
        "messages": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "<answer> abc </answer>"}]
    }
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 6)
    return [
        f"model.path={tiny_model_dir(tmp_path / 'start')}",
        f"data.train_files=[{tmp_path}/rows.jsonl]",
        f"data.val_files=[{tmp_path}/rows.jsonl]",
        f"output_dir={tmp_path}/tuned",
        "training.total_steps=4",
        "training.validate_every_steps=2",
        "optim.lr=1e-3",
    ]


def test_it_writes_a_model_that_loads_with_its_tokenizer_and_its_losses(arguments: list[str], tmp_path: Path) -> None:
    assert sft.main(arguments) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    AutoTokenizer.from_pretrained(tmp_path / "tuned")
    rows = [json.loads(line) for line in (tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "validation/loss" in row] == [2, 4]
    assert rows[-1]["validation/loss"] < rows[0]["sft/loss"]


def test_the_same_seed_gives_the_same_metrics(arguments: list[str], tmp_path: Path) -> None:
    assert sft.main(arguments) == 0
    assert sft.main([*arguments, f"output_dir={tmp_path}/again"]) == 0
    assert (tmp_path / "tuned" / "metrics.jsonl").read_text() == (tmp_path / "again" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("output_dir=", "output_dir is not set"),
        ("model.path=nowhere", "nowhere does not exist"),
        ("data.train_files=[nothing.jsonl]", "nothing.jsonl does not exist"),
        ("optim.lr=0", "optim.lr=0.0 must be above 0"),
        ("training.batch_token=5", "did you mean training.batch_tokens?"),
    ],
)
def test_a_mistake_is_told_in_a_sentence_and_leaves_nothing_behind(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, says: str
) -> None:
    assert sft.main([*arguments, override]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "tuned").exists()


def test_a_folder_with_something_in_it_is_not_overwritten(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "mine.txt").write_text("keep")
    assert sft.main(arguments) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "tuned").iterdir()] == ["mine.txt"]
