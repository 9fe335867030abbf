"""Reading question files, in the shapes that are about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from search_r1.data.questions import golden_answers, load_questions, spread
from search_r1.errors import ConfigError, DataError
from search_r1.prompts import prompt_messages
from tests.fakes import make_question
from tests.shared_data import json_lines, shared_data


def make_row(question: str = "who wrote it?", **changes: Any) -> dict[str, Any]:
    row = {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": f"Answer. Question: {question}\n"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Ann"]}},
        "extra_info": {"split": "train", "index": 0},
    }
    return {name: value for name, value in {**row, **changes}.items() if value is not None}


def write(path: Path, *rows: dict[str, Any]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "ground_truth, column",
    [
        ({"target": ["a", "b"]}, None),
        ({"target": "a<|answer_split|>b"}, None),
        ("a<|answer_split|>b", None),
        (["a", " b "], None),
        (None, ["a", "", None, "b"]),
        (None, "a<|answer_split|>b"),
        ({"target": []}, ["a", "b"]),
    ],
)
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_golden_answers_are_read_in_every_shape(tmp_path: Path, ground_truth: Any, column: Any, suffix: str) -> None:
    row = make_row(reward_model={"style": "rule", "ground_truth": ground_truth}, golden_answers=column)
    (question,) = load_questions(write(tmp_path / f"q.{suffix}", row))
    assert question.golden_answers == ("a", "b")


@pytest.mark.parametrize(
    "value, answers",
    [
        (np.array(["a", " b"], dtype=object), ("a", "b")),
        ({"target": np.array(["a"])}, ("a",)),
        (1969, ("1969",)),
        (["", "  ", None], ()),
        ("", ()),
        (None, ()),
    ],
)
def test_golden_answers_of_numpy_numbers_and_nothing(value: Any, answers: tuple[str, ...]) -> None:
    assert golden_answers(value) == answers


@pytest.mark.parametrize("split, count", [("train", 750), ("test", 450)])
def test_the_minibench_files_are_read_whole(split: str, count: int) -> None:
    expected = {row["id"]: row for row in json_lines("minibench/questions.jsonl") if row["split"] == split}
    questions = load_questions([str(shared_data(f"minibench/{split}.parquet"))])
    assert len(questions) == len({question.question_id for question in questions}) == count
    for question in questions:
        row = expected[question.question_id]
        assert (question.data_source, list(question.golden_answers)) == (row["data_source"], row["golden_answers"])
        assert question.prompt_messages == prompt_messages("search_r1", row["question"])
        assert question.text.rstrip("?") == row["question"].strip().rstrip("?")


def test_index_numbers_that_restart_in_every_source_still_give_unique_ids(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", make_row(), make_row("who sang it?", data_source="hotpotqa"))
    (tmp_path / "other").mkdir()
    second = write(tmp_path / "other" / "a.parquet", make_row("who drew it?"), make_row("who?", id="nq/train/0"))
    ids = [question.question_id for question in load_questions([first, second])]
    assert ids[:2] == ["nq/train/0", "hotpotqa/train/0"]
    assert len(set(ids)) == 4


def test_a_row_without_extra_info_gets_an_id_of_its_file_and_row(tmp_path: Path) -> None:
    rows = [make_row(extra_info=None), make_row("who sang it?", extra_info=None)]
    questions = load_questions(write(tmp_path / "dev.parquet", *rows))
    assert [question.question_id for question in questions] == ["nq/dev/0", "nq/dev/1"]


@pytest.mark.parametrize(
    "row, text",
    [
        (make_row(extra_info={"question": "from extra?"}, question="from column?"), "from extra?"),
        (make_row(question="from prompt?", extra_info=None), "from prompt?"),
        ({**make_row(), "question": "from column?"}, "from column?"),
        (
            make_row(prompt=[{"role": "system", "content": "s"}, {"role": "user", "content": " bare words "}]),
            "bare words",
        ),
        (make_row(prompt="Question: as a string?"), "as a string?"),
    ],
)
def test_the_bare_question_is_found_wherever_it_stands(tmp_path: Path, row: dict[str, Any], text: str) -> None:
    (question,) = load_questions(write(tmp_path / "q.jsonl", row))
    assert question.text == text


def test_a_named_template_renders_the_bare_question_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "q.parquet", make_row())
    assert load_questions(path)[0].prompt_messages[0]["content"] == "Answer. Question: who wrote it?\n"
    assert load_questions(path, template="short")[0].prompt_messages == prompt_messages("short", "who wrote it?")
    with pytest.raises(ConfigError, match="did you mean 'dataset'"):
        load_questions(path, template="datset")


def test_leftover_columns_are_ignored_and_tools_are_kept(tmp_path: Path) -> None:
    row = make_row(metadata={"deep": [1]}, context="long", tools=["search", "calculator"])
    (question,) = load_questions(write(tmp_path / "q.parquet", row))
    assert question.tools == ("search", "calculator")


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_row_names_each_of_its_tools_once_and_no_tool_is_not_every_tool(tmp_path: Path, suffix: str) -> None:
    rows = [make_row(tools=["add", "search", "add"]), make_row(tools=[]), make_row()]
    named = [question.tools for question in load_questions(write(tmp_path / f"q.{suffix}", *rows))]
    assert named == [("add", "search"), (), None]


def test_globs_name_files_and_a_file_matched_twice_is_read_once(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", make_row("second?"))
    path = write(tmp_path / "a.parquet", make_row("first?"))
    questions = load_questions([path, str(tmp_path / "*.parquet")])
    assert [question.text for question in questions] == ["first?", "second?"]
    assert [question.text for question in load_questions([path, str(tmp_path / "b*")], limit=1)] == ["first?"]


@pytest.mark.parametrize(
    "row, message",
    [
        (make_row(prompt=None), "row 2 has neither a prompt nor a question"),
        (make_row(prompt=[]), "row 2 has neither a prompt nor a question"),
        ({**make_row(prompt=None), "question": "who?"}, "row 2 has a question but no prompt: set data.template"),
        (make_row(reward_model=None), "row 2 has no golden answers"),
        (make_row(reward_model={"ground_truth": {"target": [" ", ""]}}), "row 2 has no golden answers"),
        (make_row(prompt=[{"role": "<|im_end|>", "content": "x"}]), "row 2: a prompt message needs"),
        (make_row(tools=[{"type": "function"}]), "row 2: the tools column holds the names"),
        (make_row(tools=5), "row 2: the tools column holds the names"),
    ],
)
def test_a_bad_row_is_named_with_its_file(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "q.jsonl", make_row(), row)
    with pytest.raises(DataError, match=message) as caught:
        load_questions(path)
    assert path in str(caught.value)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.parquet"
    empty.touch()
    no_rows = tmp_path / "no_rows.parquet"
    pq.write_table(pa.Table.from_pylist([make_row()]).slice(0, 0), no_rows)
    garbage = tmp_path / "garbage.parquet"
    garbage.write_text("not parquet")
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps(make_row()) + "\n{oops\n")
    csv = tmp_path / "q.csv"
    csv.write_text("a,b\n")
    cases = [
        (str(tmp_path / "missing*.parquet"), "missing.*: there is no such file"),
        (str(empty), "empty.parquet: the file is empty"),
        (str(no_rows), "no_rows.parquet: the file holds no questions"),
        (str(garbage), "garbage.parquet: this is no readable parquet file"),
        (str(broken), "broken.jsonl: line 2 is not JSON"),
        (str(csv), "q.csv: questions are read from .parquet and .jsonl"),
        (str(tmp_path), "this is a folder"),
    ]
    for path, message in cases:
        with pytest.raises(DataError, match=message):
            load_questions([path])
    with pytest.raises(DataError, match="no data files"):
        load_questions([])


def test_a_limited_validation_keeps_the_proportions_of_the_sources() -> None:
    questions = [make_question(str(i), data_source="a" if i < 60 else "b") for i in range(90)]
    sources = [question.data_source for question in spread(questions, 9)]
    assert sources == ["a"] * 6 + ["b"] * 3
    in_turn = [make_question(str(i), data_source="abcd"[i % 4]) for i in range(200)]
    few = spread(in_turn, 20)
    assert {source: sum(q.data_source == source for q in few) for source in "abcd"} == dict.fromkeys("abcd", 5)
    assert few == sorted(few, key=lambda question: int(question.text))
    assert spread(questions, None) == spread(questions, 1000) == questions
