from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest

from retriever_server import corpus as corpus_module
from retriever_server.corpus import Corpus
from retriever_server.errors import StartError

GOOD = b'{"id": "a", "contents": "\\"T\\"\\ntext"}'


def write(folder: Path, *lines: bytes, name: str = "corpus.jsonl", end: bytes = b"\n") -> Path:
    path = folder / name
    data = b"".join(line + end for line in lines)
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def rows(corpus: Corpus) -> list[bytes]:
    return [corpus.document(row) for row in range(len(corpus))]


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_documents_are_the_bytes_of_their_lines(tmp_path: Path, name: str) -> None:
    lines = [
        GOOD,
        b'{"contents":  "spaces stay",  "id": "b", "url": "http://x"}',
        '{"id": "ü", "contents": "ß"}'.encode(),
    ]
    assert rows(Corpus.open(write(tmp_path, *lines, name=name))) == lines


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n  \n"])
def test_line_ends_and_blank_lines_do_not_matter(tmp_path: Path, end: bytes) -> None:
    other = GOOD.replace(b'"a"', b'"b"')
    assert rows(Corpus.open(write(tmp_path, GOOD, other, end=end))) == [GOOD, other]


def test_the_last_line_needs_no_line_end_and_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD)
    assert rows(Corpus.open(path)) == [GOOD]


def test_title_and_text_become_contents(tmp_path: Path) -> None:
    path = write(
        tmp_path, b'{"id": "1", "title": "Oslo", "text": "a city", "year": 7}', GOOD, b'{"id": "t", "title": "T"}'
    )
    corpus = Corpus.open(path)
    documents = [json.loads(raw) for raw in rows(corpus)]
    assert documents[0] == {"id": "1", "title": "Oslo", "text": "a city", "year": 7, "contents": '"Oslo"\na city'}
    assert documents[1] == json.loads(GOOD)
    assert documents[2]["contents"] == '"T"\n'
    assert list(corpus.texts()) == ['"Oslo"\na city', '"T"\ntext', '"T"\n']


def test_ids_are_opaque_and_never_rows(tmp_path: Path) -> None:
    names = ["10", "2", "-1", "a/b c", "ünïcode"]
    path = write(tmp_path, *(json.dumps({"id": name, "contents": f"text {name}"}).encode() for name in names))
    assert [json.loads(raw)["id"] for raw in rows(Corpus.open(path))] == names


@pytest.mark.parametrize(
    "line, cause",
    [
        (b"{not json", "line 3 is not JSON"),
        (b'{"id": "b", "contents": "cut off', "line 3 is not JSON"),
        (b'{"id": "b", "contents": "\xff"}', "line 3 is not JSON"),
        (b'{"id": "b", "contents": "\\ud800"}', "line 3 is not JSON"),
        (b"[" * 5000 + b"]" * 5000, "line 3 is not JSON"),
        (b'["a", "b"]', "line 3 is a JSON list"),
        (b'{"contents": "text"}', "line 3 has no id"),
        (b'{"id": null, "contents": "text"}', "line 3 has no id"),
        (b'{"id": "", "contents": "text"}', "line 3 has no id"),
        (b'{"id": "b"}', r"line 3 \(id 'b'\) has neither contents nor title and text"),
        (b'{"id": "b", "contents": " "}', r"line 3 \(id 'b'\) has neither"),
        (b'{"id": "b", "contents": 5}', r"line 3 \(id 'b'\) has neither"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: bytes, cause: str) -> None:
    with pytest.raises(StartError, match=cause):
        Corpus.open(write(tmp_path, GOOD, b"", line, GOOD))


@pytest.mark.parametrize("twin", [b'{"id": "a", "contents": "x"}', b'{"id": "\\u0061", "contents": "x"}'])
def test_two_lines_with_one_id_are_both_named(tmp_path: Path, twin: bytes) -> None:
    other = b'{"id": "b", "contents": "x"}'
    with pytest.raises(StartError, match="lines 1 and 4 share the id 'a'"):
        Corpus.open(write(tmp_path, GOOD, b"", other, twin))


def test_naming_a_repeated_id_takes_no_second_copy_of_the_corpus(tmp_path: Path) -> None:
    lines = [b'{"id": "%d", "contents": "%b"}' % (number % 7999, b"x" * 1000) for number in range(8000)]
    path = write(tmp_path, *lines)
    tracemalloc.start()
    with pytest.raises(StartError, match="lines 1 and 8000 share the id '0'"):
        Corpus.open(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3_000_000


def test_a_number_and_its_text_are_one_id(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="share the id '7'"):
        Corpus.open(write(tmp_path, b'{"id": 7, "contents": "x"}', b'{"id": "7", "contents": "y"}'))


@pytest.mark.parametrize("lines", [[], [b"", b"  "]])
def test_an_empty_corpus_is_refused(tmp_path: Path, lines: Sequence[bytes]) -> None:
    with pytest.raises(StartError, match=r"is empty|holds no passage"):
        Corpus.open(write(tmp_path, *lines))


def test_a_missing_corpus_a_folder_and_a_damaged_gzip_are_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="does not exist"):
        Corpus.open(tmp_path / "nowhere.jsonl")
    with pytest.raises(StartError, match="cannot be read"):
        Corpus.open(tmp_path)
    path = write(tmp_path, GOOD, name="corpus.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(StartError, match="damaged gzip"):
        Corpus.open(path)


def test_the_fingerprint_depends_on_the_passages_not_on_the_packing(tmp_path: Path) -> None:
    plain, packed = (Corpus.open(write(tmp_path, GOOD, name=name)) for name in ("c.jsonl", "c.jsonl.gz"))
    other = Corpus.open(write(tmp_path, GOOD.replace(b"text", b"tent"), name="d.jsonl"))
    assert plain.fingerprint == packed.fingerprint != other.fingerprint


def test_the_fingerprint_of_a_huge_file_samples_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(corpus_module, "_SAMPLE_BYTES", 100)
    lines = [json.dumps({"id": str(number), "contents": "text"}).encode() for number in range(100)]
    whole = Corpus.open(write(tmp_path, *lines, name="whole.jsonl"))
    shorter = Corpus.open(write(tmp_path, *lines[:-1], name="shorter.jsonl"))
    changed = Corpus.open(write(tmp_path, *lines[:-1], lines[-1].replace(b"text", b"next"), name="changed.jsonl"))
    assert len({whole.fingerprint, shorter.fingerprint, changed.fingerprint}) == 3
