"""Articles to passages."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from data_prep import corpus
from data_prep.corpus import Article, Chunker
from search_r1.environments.retriever_client import parse_document
from tests.shared_data import json_lines, shared_data


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("length, sizes", [(0, []), (1, [1]), (100, [100]), (101, [100, 1]), (250, [100, 100, 50])])
def test_an_article_is_cut_every_100_words_and_no_word_is_lost(length: int, sizes: list[int]) -> None:
    words = [f"w{i}" for i in range(length)]
    passages = list(Chunker().passages([Article("T", " \n".join(words))]))
    assert [len(passage.text.split()) for passage in passages] == sizes
    assert " ".join(passage.text for passage in passages).split() == words
    assert {passage.title for passage in passages} <= {"T"}


def test_a_repeated_passage_is_dropped_unless_its_title_differs() -> None:
    chunker = Chunker(words=2)
    passages = chunker.passages([Article("T", "a b c d"), Article("T", "a  b"), Article("U", "a b"), Article("V", " ")])
    assert [(passage.title, passage.text) for passage in passages] == [("T", "a b"), ("T", "c d"), ("U", "a b")]
    assert chunker.counts == {"articles": 4, "passages": 3, "dropped: repeated passage": 1, "dropped: no text": 1}


@pytest.mark.parametrize("output", ["out.jsonl", "out.jsonl.gz"])
def test_both_input_forms_give_quoted_titles_and_running_ids(tmp_path: Path, output: str) -> None:
    first = write(tmp_path / "a.jsonl", {"id": "x", "title": 'The "A" (b)', "text": "one two\nthree"})
    second = tmp_path / "b.jsonl.gz"
    with gzip.open(second, "wt") as file:
        file.write(json.dumps({"id": "y", "contents": '"C"\nfour'}) + "\n")
    assert corpus.main([first, str(second), "--words", "2", "--output", str(tmp_path / output)]) == 0
    assert read(tmp_path / output) == [
        {"id": "0", "contents": '"The "A" (b)"\none two'},
        {"id": "1", "contents": '"The "A" (b)"\nthree'},
        {"id": "2", "contents": '"C"\nfour'},
    ]


def test_a_line_without_a_line_break_is_a_text_as_the_retriever_takes_it(tmp_path: Path) -> None:
    lines = ["A passage about Oslo.", '"Only a title"', "Oslo\nA city.", '"Oslo"\nA town.', "\nNo title.\n"]
    rows = [*({"contents": line} for line in lines), {"contents": "text alone", "title": "Oslo"}]
    given = write(tmp_path / "a.jsonl", *rows)
    out = tmp_path / "out.jsonl"
    assert corpus.main([given, "--output", str(out)]) == 0
    expected = [
        '""\nA passage about Oslo.',
        '"Oslo"\nA city.',
        '"Oslo"\nA town.',
        '""\nNo title.',
        '"Oslo"\ntext alone',
    ]
    assert [row["contents"] for row in read(out)] == expected
    taken = [parse_document(row).text for row in rows]
    assert [parse_document(row).text for row in read(out)] == [text for text in taken if text]


def test_a_title_of_two_lines_stays_a_title(tmp_path: Path) -> None:
    given = write(tmp_path / "a.jsonl", {"id": "1", "title": "A\nB", "text": "three"})
    assert corpus.main([given, "--output", str(tmp_path / "out.jsonl")]) == 0
    assert read(tmp_path / "out.jsonl")[0]["contents"] == '"A B"\nthree'


def test_a_corpus_of_passages_goes_through_unchanged(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options = [str(shared_data("minibench/corpus.jsonl")), "--words", "0", "--keep-ids", "--output", str(out)]
    assert corpus.main(options) == 0
    written, given = read(out), json_lines("minibench/corpus.jsonl")
    assert len(written) in range(4990, 5001)
    by_id = {row["id"]: row["contents"] for row in given}
    for row in written:
        assert row["contents"].split("\n")[0] == by_id[row["id"]].split("\n")[0]
        assert row["contents"].split() == by_id[row["id"]].split()


@pytest.mark.parametrize(
    "line, options, message",
    [
        ("{oops", [], "line 2 is not JSON"),
        ('{"text": "\udcff"}', [], "line 2 is not JSON"),
        ('{"text": "\\ud800"}', [], "line 2 is not JSON"),
        ("[" * 100_000, [], "line 2 is not JSON"),
        ('{"id": null, "title": "T", "text": "y"}', ["--words", "0", "--keep-ids"], "id '' is empty or taken"),
        ('{"id": "1", "title": "only"}', [], "line 2 has neither contents nor title and text"),
        ('{"id": "1", "title": "T", "text": "again"}', ["--words", "0", "--keep-ids"], "id '1' is empty or taken"),
        ('{"id": "2", "title": "T", "text": "x"}', ["--keep-ids"], "--keep-ids needs --words 0"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_left_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, options: list[str], message: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"id": "1", "title": "T", "text": "x"}\n' + line + "\n", encoding="utf-8", errors="surrogateescape"
    )
    assert corpus.main([str(path), "--output", str(tmp_path / "out.jsonl"), *options]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]
