from __future__ import annotations

import gzip
import json
import math
import random
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from retriever_server.analysis import EnglishAnalyzer
from retriever_server.bm25 import BM25Retriever, open_or_build
from retriever_server.corpus import Corpus
from retriever_server.errors import StartError
from tests.shared_data import json_lines, shared_data

TEXT = "paris london river bridge old new king queen war peace music film born died city the of and a"
WORDS = TEXT.split()


def write_corpus(path: Path, texts: list[str]) -> Path:
    rows = [{"id": f"p{row}", "contents": text} for row, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def random_corpus(folder: Path, num_passages: int = 200) -> Path:
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 60))) for _ in range(num_passages)]
    return write_corpus(folder / "corpus.jsonl", texts)


def oracle(texts: list[str], query: str, k1: float, b: float) -> dict[int, float]:
    """Lucene's BM25, one passage and one term at a time."""
    analyze = EnglishAnalyzer()
    passages = [analyze(text) for text in texts]
    mean_length = sum(map(len, passages)) / len(passages)
    scores: dict[int, float] = defaultdict(float)
    for term in analyze(query):
        frequency = sum(term in passage for passage in passages)
        idf = math.log(1 + (len(passages) - frequency + 0.5) / (frequency + 0.5))
        for row, passage in enumerate(passages):
            count = Counter(passage)[term]
            if count:
                scores[row] += idf * count / (count + k1 * (1 - b + b * lucene_length(len(passage)) / mean_length))
    return scores


def lucene_length(length: int) -> int:
    """What is left of a length after Lucene's one-byte encoding: 24 plus four leading bits of the rest."""
    rest = max(length - 24, 0)
    dropped = max(rest.bit_length() - 4, 0)
    return length if length < 24 else 24 + (rest >> dropped << dropped)


@pytest.mark.parametrize("k1, b", [(0.9, 0.4), (1.5, 0.75)])
def test_scores_equal_a_pure_python_oracle(tmp_path: Path, k1: float, b: float) -> None:
    corpus = Corpus.open(random_corpus(tmp_path))
    retriever = BM25Retriever.build(corpus, k1=k1, b=b)
    texts = list(corpus.texts())
    draw = random.Random(1)
    for _ in range(50):
        query = " ".join(draw.choices([*WORDS, "unknown"], k=draw.randint(1, 8)))
        expected = sorted(oracle(texts, query, k1, b).items(), key=lambda hit: (-hit[1], hit[0]))
        found = retriever.rank(query, 1000)
        assert len(found) == len(expected)
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-5)
        scores = dict(expected)
        assert all(score == pytest.approx(scores[row], abs=1e-5) for row, score in found)


def test_equal_scores_stand_in_corpus_order_for_every_top_k(tmp_path: Path) -> None:
    texts = ["other words", *["same words here"] * 9, "same same"]
    retriever = BM25Retriever.build(Corpus.open(write_corpus(tmp_path / "c.jsonl", texts)))
    whole = [row for row, _ in retriever.rank("same", 100)]
    assert whole == [10, *range(1, 10)]
    for top_k in range(1, 12):
        assert [row for row, _ in retriever.rank("same", top_k)] == whole[:top_k]


def test_a_passage_that_shares_no_term_is_never_returned(tmp_path: Path) -> None:
    retriever = BM25Retriever.build(
        Corpus.open(write_corpus(tmp_path / "c.jsonl", ["red fox", "blue whale", "the fox"]))
    )
    assert [row for row, _ in retriever.rank("fox", 3)] == [2, 0]
    assert retriever.search(["zebra", "the of", ""], 3) == [[], [], []]


def test_a_query_leaves_no_trace_in_the_next_one(tmp_path: Path) -> None:
    retriever = BM25Retriever.build(Corpus.open(random_corpus(tmp_path)))
    alone = retriever.rank("river", 50)
    retriever.rank("river bridge river king", 3)
    assert retriever.rank("river", 50) == alone


def test_a_saved_index_gives_the_same_results_without_reading_the_corpus_again(tmp_path: Path) -> None:
    path, folder = random_corpus(tmp_path), tmp_path / "index"
    built = open_or_build(path, folder, k1=1.2)
    loaded = open_or_build(path, folder)
    queries = ["old river", "king of paris", "nothing known"]
    assert loaded.search(queries, 5) == built.search(queries, 5)
    assert loaded.describe() == built.describe()
    assert isinstance(loaded._weights, np.memmap)


def test_a_saved_index_serves_a_gzip_corpus_of_titles_and_texts(tmp_path: Path) -> None:
    rows = [{"id": name, "title": name, "text": f"{name} is a city"} for name in ("Oslo", "Lima")]
    path, folder = tmp_path / "corpus.jsonl.gz", tmp_path / "index"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    for _ in range(2):
        ((passage,),) = open_or_build(path, folder).search(["Lima"], 1)
        assert json.loads(passage.document) == {**rows[1], "contents": '"Lima"\nLima is a city'}


def test_an_index_of_another_corpus_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    open_or_build(random_corpus(tmp_path), folder)
    other = write_corpus(tmp_path / "other.jsonl", ["something else"])
    with pytest.raises(StartError, match="built for another corpus"):
        open_or_build(other, folder)


def test_an_index_with_other_parameters_or_another_analyzer_is_refused(tmp_path: Path) -> None:
    path, folder = random_corpus(tmp_path), tmp_path / "index"
    open_or_build(path, folder)
    with pytest.raises(StartError, match=r"built with b=0\.4, not 0\.75"):
        open_or_build(path, folder, b=0.75)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "analyzer": "whitespace"}))
    with pytest.raises(StartError, match="built by the analyzer 'whitespace'"):
        open_or_build(path, folder)


@pytest.mark.parametrize("name", ["data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy", "offsets.npy"])
@pytest.mark.parametrize("keep", [0, 40, -8])
def test_a_truncated_index_is_refused(tmp_path: Path, name: str, keep: int) -> None:
    path, folder = random_corpus(tmp_path), tmp_path / "index"
    open_or_build(path, folder)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:keep])
    with pytest.raises(StartError, match="is damaged"):
        open_or_build(path, folder)


def test_a_folder_that_is_no_index_is_refused_and_left_alone(tmp_path: Path) -> None:
    path, folder = random_corpus(tmp_path), tmp_path / "documents"
    folder.mkdir()
    (folder / "letter.txt").write_text("keep me")
    with pytest.raises(StartError, match="is no index folder"):
        open_or_build(path, folder)
    assert (folder / "letter.txt").read_text() == "keep me"


def test_a_corpus_of_stop_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"no passage .* holds a word to search for"):
        BM25Retriever.build(Corpus.open(write_corpus(tmp_path / "c.jsonl", ["the of and"])))


def test_recall_on_real_questions_is_what_was_measured() -> None:
    """Share of gold passages in the best three, with the question as the query."""
    questions = json_lines("minibench/questions.jsonl")
    retriever = BM25Retriever.build(Corpus.open(shared_data("minibench/corpus.jsonl")))
    found = retriever.search([question["question"] for question in questions], 3)
    recalls = defaultdict(list)
    for question, passages in zip(questions, found, strict=True):
        ids = {json.loads(passage.document)["id"] for passage in passages}
        gold = set(question["gold_ids"])
        recalls[question["data_source"]].append(len(ids & gold) / len(gold))
    measured = {"nq": 0.835, "hotpotqa": 0.805, "2wikimultihopqa": 0.695, "musique": 0.544}
    for source, expected in measured.items():
        assert sum(recalls[source]) / len(recalls[source]) >= expected - 0.01, source
