"""Every form that question sets are published in."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from data_prep.readers import FORMS, Record, read_records
from search_r1.errors import DataError
from tests.shared_data import json_lines, shared_data

ONE = {
    "nq_open.jsonl": '{"question": "who?", "answer": ["Ann", " Bo "]}\n{"question": "why?", "answer": "so"}\n',
    "flashrag.jsonl": '{"id": "7", "question": "who?", "golden_answers": ["Ann", "Bo"], "metadata": {}}\n',
    "hotpot.json": '[{"_id": "7", "question": "who?", "answer": "Ann", "context": [], "type": "bridge"}]',
    "pretty.json": '[\n  {"id": 7, "question": "who?", "answer": "Ann"}\n]',
    "musique.jsonl": '{"id": "7", "question": "who?", "answer": "Ann", "answer_aliases": ["Bo"], "answerable": true}\n'
    '{"id": "8", "question": "why?", "answer": "x", "answer_aliases": [], "answerable": false}\n',
    "web.json": '[{"qId": "7", "answers": ["Ann"], "qText": "who?"}]',
    "web_hub.jsonl": '{"url": "u", "question": "who?", "answers": ["Ann", "Bo"]}\n',
    "web_original.json": json.dumps(
        [{"utterance": "who?", "targetValue": '(list (description "Ann A.") (description Bo))', "url": "u"}]
    ),
    "trivia.json": '{"Data": [{"Question": "who?", "QuestionId": "7", "Answer": {"Value": "Ann", "Aliases": ["Bo"]}}]}',
    "trivia_hub.jsonl": '{"question": "who?", "question_id": "7", "answer": {"value": "Ann", "aliases": ["Bo"]}}\n',
    "2wiki.json": '[{"_id": "7", "question": "who?", "answer": "Ann", "evidences": [["a", "b", "c"]]}]',
    "strategy.json": '[{"qid": "7", "question": "who?", "answer": true}]',
    "bamboogle.csv": 'Question,Answer\n"who, then?",Ann\n',
    "popqa.tsv": 'id\tsubj\tquestion\tpossible_answers\n7\tx\twho?\t"[""Ann"", ""O\'Bo""]"\n',
    "dpr.tsv": "who?\t['Ann', \"O'Bo\"]\n",
    "dpr.qa.csv": "who?\t\"['Ann', 'a \u2028 b']\"\r\n",
}
EXPECTED = {
    "nq_open.jsonl": [Record("who?", ("Ann", "Bo")), Record("why?", ("so",))],
    "flashrag.jsonl": [Record("who?", ("Ann", "Bo"), "7")],
    "hotpot.json": [Record("who?", ("Ann",), "7")],
    "pretty.json": [Record("who?", ("Ann",), "7")],
    "musique.jsonl": [Record("who?", ("Ann", "Bo"), "7"), Record("why?", (), "8")],
    "web.json": [Record("who?", ("Ann",), "7")],
    "web_hub.jsonl": [Record("who?", ("Ann", "Bo"))],
    "web_original.json": [Record("who?", ("Ann A.", "Bo"))],
    "trivia.json": [Record("who?", ("Ann", "Bo"), "7")],
    "trivia_hub.jsonl": [Record("who?", ("Ann", "Bo"), "7")],
    "2wiki.json": [Record("who?", ("Ann",), "7")],
    "strategy.json": [Record("who?", ("yes",))],
    "bamboogle.csv": [Record("who, then?", ("Ann",))],
    "popqa.tsv": [Record("who?", ("Ann", "O'Bo"), "7")],
    "dpr.tsv": [Record("who?", ("Ann", "O'Bo"))],
    "dpr.qa.csv": [Record("who?", ("Ann", "a \u2028 b"))],
}


@pytest.mark.parametrize("name", ONE)
def test_each_published_form_is_recognised_and_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(ONE[name], encoding="utf-8", newline="")
    assert list(read_records(path)) == EXPECTED[name]
    with gzip.open(tmp_path / f"{name}.gz", "wt", encoding="utf-8", newline="") as file:
        file.write(ONE[name])
    assert list(read_records(tmp_path / f"{name}.gz")) == EXPECTED[name]


REAL = {
    "dpr_nq.tsv": (200, Record("who sings does he love me with reba", ("Linda Davis",))),
    "dpr_trivia.tsv": (100, None),
    "flashrag_nq_test.jsonl": (
        17,
        Record("who got the first nobel prize in physics", ("Wilhelm Conrad Röntgen",), "test_0"),
    ),
    "hotpot_distractor.json": (
        50,
        Record(
            "VIVA Media AG changed it's name in 2004. What does their new acronym stand for?",
            ("Gesellschaft mit beschränkter Haftung",),
            "5a7613c15542994ccc9186bf",
        ),
    ),
    "hotpot_qa_only.json": (
        400,
        Record("Were Scott Derrickson and Ed Wood of the same nationality?", ("yes",)),
    ),
    "musique.json": (20, None),
    "nq_open.jsonl": (
        400,
        Record("when was the last time anyone was on the moon", ("14 December 1972 UTC", "December 1972")),
    ),
    "webquestions.json": (
        100,
        Record("what kind of money to take to bahamas?", ("Bahamian dollar",), "wqr000004"),
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_files_as_people_really_have_them_are_read_whole(name: str) -> None:
    count, first = REAL[name]
    records = list(read_records(shared_data(f"formats/{name}")))
    assert len(records) == count
    assert all(record.question and record.answers for record in records)
    assert first is None or records[0] == first


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0c", "\x1c", "\r"])
@pytest.mark.parametrize("suffix", ["tsv", "jsonl"])
def test_only_a_newline_ends_a_row(tmp_path: Path, separator: str, suffix: str) -> None:
    answer = f"a{separator}b"
    row = f"who?\t{[answer]!r}" if suffix == "tsv" else json.dumps({"question": "who?", "answer": answer})
    raw = row.replace(repr(answer)[1:-1], answer) if separator > "\x80" else row
    path = tmp_path / f"q.{suffix}"
    path.write_text(f"{raw}\n{raw}\n", encoding="utf-8", newline="")
    assert list(read_records(path)) == [Record("who?", (answer,))] * 2


def test_a_list_of_answers_may_be_long(tmp_path: Path) -> None:
    answers = tuple(f"answer {number}" for number in range(20_000))
    path = tmp_path / "q.tsv"
    path.write_text(f"who?\t{list(answers)!r}\n")
    assert list(read_records(path)) == [Record("who?", answers)]


def test_musique_aliases_count_as_answers() -> None:
    raw = json.loads(shared_data("formats/musique.json").read_text(encoding="utf-8"))
    for row, record in zip(raw, read_records(shared_data("formats/musique.json")), strict=True):
        assert set(record.answers) == {row["answer"].strip(), *(alias.strip() for alias in row["answer_aliases"])}
        assert record.native_id == row["id"]


def test_the_minibench_question_file_is_a_known_form_too() -> None:
    rows = json_lines("minibench/questions.jsonl")
    records = list(read_records(shared_data("minibench/questions.jsonl")))
    assert [(record.native_id, list(record.answers)) for record in records] == [
        (row["id"], list(dict.fromkeys(answer.strip() for answer in row["golden_answers"]))) for row in rows
    ]


def test_a_form_can_be_forced_and_a_row_that_does_not_fit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "who?", "golden_answers": ["Ann"], "answer": "Bo"}\n{"question": "why?"}\n')
    assert next(read_records(path)).answers == ("Ann",)
    assert next(read_records(path, "question_answer")).answers == ("Bo",)
    with pytest.raises(DataError, match="row 2 is not of the form flashrag"):
        list(read_records(path))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("q.jsonl", "", "the file is empty"),
        ("q.jsonl", "\n\n", "holds no questions"),
        ("q.json", "[]", "holds no questions"),
        ("q.jsonl", '{"question": "who?", "answer": "Ann"}\n{"question"', "line 2 is not JSON"),
        ("q.json", '[{"question": "who?"', "this is not JSON"),
        ("q.json", '{"rows": 1\n}', "expected a list of questions"),
        ("q.jsonl", "[1, 2]\n", "row 1 is not a JSON object"),
        ("q.jsonl", '{"title": "x", "text": "y"}\n', "no known form has the columns title, text"),
        ("q.tsv", "who?\t['Ann']\nwhy?\n", "line 2 has 1 columns instead of 2"),
        ("q.tsv", f"who?\t{'-' * 100_000}1\n", "row 1 is not of the form dpr"),
        ("q.tsv", 'who?\t["\\ud800"]\n', "row 1 is not of the form dpr .*surrogates not allowed"),
        ("q.jsonl", '{"question": "\\ud800?", "answer": "Ann"}\n', "row 1 .*surrogates not allowed"),
        ("q.jsonl", '{"question": ' + "[" * 100_000, "line 1 is not JSON"),
        ("q.json", '{"question": ' + "[" * 100_000, "this is not JSON"),
        ("q.tsv", "who?\t__import__('os')\n", "row 1 is not of the form dpr"),
        ("q.parquet", "garbage", "no readable parquet"),
        ("q.docx", "x", "question files end in"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        list(read_records(path))
    assert name in str(caught.value)


def test_every_form_names_the_columns_that_tell_it_apart() -> None:
    keys = [form.keys for form in FORMS.values()]
    assert len(keys) == len(set(keys))


def test_a_file_cut_short_or_of_another_encoding_is_told(tmp_path: Path) -> None:
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"question": "qué?", "answer": "é"}\n'.encode("latin-1"))
    short = tmp_path / "short.jsonl.gz"
    short.write_bytes(gzip.compress(ONE["nq_open.jsonl"].encode() * 50)[:-20])
    for path in (latin, short):
        with pytest.raises(DataError, match=f"{path.name}: the file is cut short or not UTF-8"):
            list(read_records(path))


def test_a_question_that_its_file_escapes_twice_is_read_as_it_was_asked(tmp_path: Path) -> None:
    questions = [record.question for record in read_records(shared_data("formats/dpr_trivia.tsv"))]
    assert 'What was the name of the "girl with kaleidoscope eyes" in a Beatles song?' in questions
    file = tmp_path / "dpr.tsv"
    file.write_text('"""Ann"" met whom, ""Bo""?"\t[\'x\']\n"""Ann"" or ""Bo"""\t[\'x\']\n')
    assert [record.question for record in read_records(file)] == ['"Ann" met whom, "Bo"?', '"Ann" or "Bo"']
