from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from examples.tools import build as example


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools")
    example.build(path, num_demonstrations=300)
    return path


def test_bridges_of_the_test_are_in_no_training_question_and_no_demonstration(folder: Path) -> None:
    questions = " ".join(pq.read_table(folder / "train.parquet")["question"].to_pylist())
    demonstrations = (folder / "demonstrations.jsonl").read_text() + (folder / "demonstrations_val.jsonl").read_text()
    corpus = (json.loads(line)["contents"] for line in (folder / "corpus.jsonl").read_text().splitlines())
    asked = " ".join(pq.read_table(folder / "test.parquet")["question"].to_pylist())
    bridges = [name for name in (text.split("\n")[0] for text in corpus) if name in asked]
    assert len(bridges) > 50
    assert not [name for name in bridges if name in questions or name in demonstrations]


def test_the_saved_tokenizer_splits_as_it_was_trained(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "untrained")
    pieces = [tokenizer.decode(i) for i in tokenizer.encode("<tool_call>1984-08-07 Amber Bell Bridge</tool_call>")]
    assert pieces == ["<tool_call>", "19", "84", "-", "08", "-", "07", " ", "Amber ", "Bell ", "Bridge", "</tool_call>"]


def test_the_tool_prompt_is_a_token_a_line(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "demonstrations.jsonl").read_text().splitlines()]
    prompts = {message["content"] for row in rows for message in row["messages"] if message["role"] == "system"}
    tokenizer = AutoTokenizer.from_pretrained(folder / "untrained")
    (prompt,) = prompts
    assert len(tokenizer.encode(prompt)) == 2 * len(prompt.splitlines()) - 1
