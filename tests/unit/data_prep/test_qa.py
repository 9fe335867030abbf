"""Question sets to parquet, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import merge, qa
from data_prep.readers import Record
from search_r1.data.questions import load_questions
from search_r1.prompts import prompt_messages
from tests.shared_data import shared_data

FORMATS = ["dpr_nq.tsv", "dpr_trivia.tsv", "flashrag_nq_test.jsonl", "hotpot_distractor.json", "hotpot_qa_only.json",
           "musique.json", "nq_open.jsonl", "webquestions.json"]  # fmt: skip


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_what_training_reads(tmp_path: Path, name: str) -> None:
    out = tmp_path / "data" / "out.parquet"
    assert qa.main(["--source", "nq", "--split", "dev", "--input", str(shared_data(f"formats/{name}")),
                    "--output", str(out)]) == 0  # fmt: skip
    rows, questions = rows_of(out), load_questions([str(out)])
    assert list(rows[0]) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert [question.question_id for question in questions] == [row["extra_info"]["id"] for row in rows]
    assert len({question.question_id for question in questions}) == len(questions)
    for question in questions:
        assert question.prompt_messages == prompt_messages("search_r1", question.text)
    assert [path.name for path in out.parent.iterdir()] == ["out.parquet"]


def test_minibench_rows_are_reproduced_from_their_questions(tmp_path: Path) -> None:
    published = rows_of(shared_data("minibench/test.parquet"))
    source = tmp_path / "q.jsonl"
    lines = [json.dumps({key: row[key] for key in ("id", "question", "golden_answers")}) for row in published]
    source.write_text("\n".join(lines))
    out = tmp_path / "out.parquet"
    assert qa.main(["--source", "nq", "--split", "test", "--input", str(source), "--output", str(out)]) == 0
    written = {row["extra_info"]["id"].removeprefix("nq/test/"): row for row in rows_of(out)}
    assert len(written) == len(published)
    for row in published:
        assert written[row["id"]]["prompt"] == row["prompt"]
        assert written[row["id"]]["reward_model"] == row["reward_model"]


def test_what_is_dropped_is_counted_with_its_reason() -> None:
    records = [
        Record("Who wrote it?", ("Ann",), "a"),
        Record("", ("Ann",)),
        Record("?", ("Ann",)),
        Record("why", ()),
        Record("who  wrote IT", ("Ann",)),
        Record("who sang it", ("Cy",), "a"),
        Record("who drew it", ("Di",)),
    ]
    result = qa.convert(records, source="mine", split="dev")
    assert result.counts == {"read": 7, "no question": 2, "no answer": 1, "duplicate question": 1, "kept": 3}
    extra = [row["extra_info"] for row in result.rows]
    assert [(item["id"], item["index"]) for item in extra] == [
        ("mine/dev/a", 0), ("mine/dev/a#5", 5), ("mine/dev/6", 6)
    ]  # fmt: skip
    limited = qa.convert(records, source="mine", split="dev", limit=2)
    assert limited.counts["kept"] == 2


def test_one_text_asked_of_two_things_of_the_same_name_stays_twice() -> None:
    records = [
        Record("Who is the author of Home?", ("Toni Morrison",), "1"),
        Record("Who is the author of Home?", ("Marilynne Robinson", "Robinson"), "2"),
        Record("who is the author of Home", ("Robinson", "Marilynne Robinson"), "3"),
    ]
    result = qa.convert(records, source="popqa", split="test")
    assert (result.counts["kept"], result.counts["duplicate question"]) == (2, 1)
    assert [row["extra_info"]["id"] for row in result.rows] == ["popqa/test/1", "popqa/test/2"]


def test_a_dry_run_counts_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "q.jsonl"
    source.write_text('{"question": "who?", "answer": "Ann"}\n{"question": "why?", "answer": ""}\n')
    out = tmp_path / "out.parquet"
    assert qa.main(["--source", "nq", "--input", str(source), "--output", str(out), "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert "Question: who?" in said
    assert "dry run: nothing was written" in said
    assert not out.exists()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--input", "missing.jsonl"], "missing.jsonl: there is no such file"),
        (["--input", "bad.jsonl"], "bad.jsonl: line 2 is not JSON"),
        (["--input", "unanswered.jsonl"], "no question was kept, so nothing is written"),
        (["--input", "bad.jsonl", "--template", "serach_r1"], "did you mean 'search_r1'"),
        (["--input", "bad.jsonl", "--form", "dqr"], "--form dqr is not known"),
        (["--source", "hotpot"], "did you mean hotpotqa"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_the_old_file_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"question": "who?", "answer": "Ann"}\n{oops\n')
    Path("unanswered.jsonl").write_text('{"question": "who?", "answer": []}\n')
    Path("out.parquet").write_text("old")
    assert qa.main(["--source", "nq", "--output", "out.parquet", *options]) == 2
    assert message in capsys.readouterr().err
    assert Path("out.parquet").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "out.parquet", "unanswered.jsonl"]


def test_the_hub_without_connection_or_cache_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert qa.main(["--source", "nq", "--output", str(tmp_path / "out.parquet")]) == 2
    said = capsys.readouterr().err
    assert "RUC-NLPIR/FlashRAG_datasets (nq, train) cannot be loaded" in said
    assert "name the file or folder with --input" in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["saved", "saved split", "files"])
def test_a_local_folder_dataset_is_read_by_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    row = {"id": "test_0", "question": "who?", "golden_answers": ["Ann"], "metadata": {"a": 1}}
    folder = tmp_path / "folder"
    if kind == "files":
        (folder / "nq").mkdir(parents=True)
        (folder / "nq" / "test.jsonl").write_text(json.dumps(row) + "\n")
    else:
        table = datasets.Dataset.from_list([row])
        (table if kind == "saved split" else datasets.DatasetDict({"test": table})).save_to_disk(str(folder))
    out = tmp_path / "out.parquet"
    options = ["--source", "nq", "--input", str(folder), "--output", str(out)]
    assert qa.main([*options, "--split", "test"]) == 0
    assert [question.question_id for question in load_questions([str(out)])] == ["nq/test/test_0"]
    if kind != "saved split":
        assert qa.main([*options, "--split", "dev"]) == 2
        assert "(nq, dev) cannot be loaded" in capsys.readouterr().err


def test_help_ends_with_commands_to_copy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        qa.main(["--help"])
    assert "python -m data_prep.qa --source nq --split train" in capsys.readouterr().out


def make_file(path: Path, source: str, *questions: str) -> str:
    records = [Record(question, ("Ann",)) for question in questions]
    qa.write_parquet(path, qa.convert(records, source=source, split="train").rows, qa.RL_SCHEMA)
    return str(path)


def test_merged_files_keep_unique_ids_and_drop_rows_given_twice(tmp_path: Path) -> None:
    nq = make_file(tmp_path / "nq.parquet", "nq", "who?", "why?")
    other = make_file(tmp_path / "other.parquet", "nq", "who?", "where?")
    hotpot = make_file(tmp_path / "hotpot.parquet", "hotpotqa", "who?")
    out = tmp_path / "out.parquet"
    assert merge.main([nq, other, hotpot, "--output", str(out)]) == 0
    questions = load_questions([str(out)])
    assert [question.text for question in questions] == ["who?", "why?", "where?", "who?"]
    assert len({question.question_id for question in questions}) == 4


def test_a_merge_is_shuffled_by_its_seed_alone(tmp_path: Path) -> None:
    path = Path(make_file(tmp_path / "a.parquet", "nq", *(f"q{i}?" for i in range(30))))
    orders = [[row["extra_info"]["id"] for row in merge.merge([path], seed)[0]] for seed in (None, 1, 1, 2)]
    assert orders[0] != orders[1] == orders[2] != orders[3]
    assert sorted(orders[1]) == sorted(orders[0])


def test_minibench_files_merge_under_their_own_ids(tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    paths = [str(shared_data(f"minibench/{split}.parquet")) for split in ("train", "test")]
    assert merge.main([*paths, "--output", str(out), "--shuffle"]) == 0
    assert {question.question_id: question for question in load_questions([str(out)])} == {
        question.question_id: question for question in load_questions(paths)
    }


def test_a_merge_keeps_the_tools_of_rows_and_answers_that_stand_in_a_column(tmp_path: Path) -> None:
    plain = make_file(tmp_path / "plain.parquet", "nq", "who?")
    [row] = rows_of(Path(plain))
    row |= {
        "reward_model": {"style": "rule"},
        "golden_answers": "Ann<|answer_split|>Bo",
        "extra_info": "none",
        "split": "dev",
    }
    foreign, out = tmp_path / "foreign.parquet", tmp_path / "out.parquet"
    prompt = [{"role": "user", "content": "why?"}]
    tools = [["search"], [], None]
    rows = [{**row, "id": str(number), "prompt": prompt, "tools": names} for number, names in enumerate(tools)]
    pq.write_table(pa.Table.from_pylist(rows), foreign)
    assert merge.main([plain, str(foreign), "--output", str(out)]) == 0
    first, *others = load_questions([str(out)])
    assert (first.golden_answers, first.tools) == (("Ann",), None)
    assert others == load_questions([str(foreign)])
    assert [question.tools for question in others] == [("search",), (), None]


def test_a_merge_with_a_foreign_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = make_file(tmp_path / "a.parquet", "nq", "who?")
    foreign = tmp_path / "b.parquet"
    qa.write_parquet(foreign, [{"question": "who?"}], qa.RL_SCHEMA.empty_table().schema.remove(0))
    assert merge.main([good, str(foreign), "--output", str(tmp_path / "out.parquet")]) == 2
    assert "b.parquet: the columns data_source are missing" in capsys.readouterr().err
    assert not (tmp_path / "out.parquet").exists()
