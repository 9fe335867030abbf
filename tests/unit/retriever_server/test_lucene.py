"""Lucene behind the server, and the Java-free BM25 beside it. Skipped where Java or Anserini's jar is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from retriever_server import lucene_build
from retriever_server.analysis import EnglishAnalyzer
from retriever_server.bm25 import BM25Retriever
from retriever_server.corpus import Corpus
from retriever_server.errors import StartError
from retriever_server.lucene import LuceneRetriever, find_jar, find_java, java_environment
from tests.lucene_jar import needs_lucene
from tests.shared_data import json_lines, shared_data

pytestmark = needs_lucene
ROOT = Path(__file__).resolve().parents[3]
ODD_TEXTS = (
    "東京 タワー ひらがな 한국어 데이터", "a_b foo_bar 3.14 1,000 x.y u.s.a. don't O'Neil\u2019s Its' 'quoted'",
    "naïve café ÀÉ ß İstanbul ﬁne ΟΔΟΣ", "ไทย ภาษา",
    "\U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467 A\u266d",
    "מָיִם ١٢٣ שלום", "co-op e-mail@x.com http://a.b/c?d=e", "a" * 600,
    "technology anthropologie assembly revved trekked",
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.open(shared_data("minibench/corpus.jsonl"))


@pytest.fixture(scope="module")
def index(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lucene") / "index"
    lucene_build.build(corpus, folder, threads=1)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    path = tmp_path_factory.mktemp("small") / "corpus.jsonl"
    rows = [{"id": f"p{row}", "title": "Norway", "text": f"Oslo {row}", "url": "u"} for row in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Corpus.open(path)


@pytest.fixture(scope="module")
def small_index(small: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lucene") / "small"
    lucene_build.build(small, folder, threads=2)
    return folder


def ids(passages: list[list[tuple[bytes, float]]]) -> list[list[str]]:
    return [[json.loads(document)["id"] for document, _ in found] for found in passages]


def test_java_free_bm25_agrees_with_lucene_on_the_best_three(corpus: Corpus, index: Path) -> None:
    questions = [question["question"] for question in json_lines("minibench/questions.jsonl")]
    lucene = LuceneRetriever(index, corpus)
    theirs, ours = lucene.search(questions, 3), BM25Retriever.build(corpus).search(questions, 3)
    lucene.close()
    agreeing = sum(a == b for a, b in zip(ids(theirs), ids(ours), strict=True))
    assert agreeing >= 0.98 * len(questions)
    for found, expected in zip(ours, theirs, strict=True):
        if ids([found]) == ids([expected]):
            assert [hit.score for hit in found] == pytest.approx([hit.score for hit in expected], abs=1e-3)


def test_the_analyzer_gives_lucenes_terms_for_every_passage_and_question(corpus: Corpus, tmp_path: Path) -> None:
    texts = [*corpus.texts(), *(row["question"] for row in json_lines("minibench/questions.jsonl")), *ODD_TEXTS]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    code = (
        "import json, sys, jnius_config\n"
        "jnius_config.set_classpath(sys.argv[1])\n"
        "from jnius import autoclass\n"
        "english = autoclass('io.anserini.analysis.DefaultEnglishAnalyzer').newDefaultInstance()\n"
        "analyze = autoclass('io.anserini.analysis.AnalyzerUtils').analyze\n"
        "terms = [list(analyze(english, text).toArray()) for text in json.load(open(sys.argv[2]))]\n"
        "json.dump(terms, open(sys.argv[3], 'w'))\n"
    )
    command = [sys.executable, "-c", code, str(find_jar()), str(tmp_path / "texts.json"), str(tmp_path / "terms.json")]
    subprocess.run(command, env=java_environment(find_java()), check=True, capture_output=True)
    lucenes = json.loads((tmp_path / "terms.json").read_text())
    analyze = EnglishAnalyzer()
    different = [text[:80] for text, terms in zip(texts, lucenes, strict=True) if analyze(text) != terms]
    assert different == []


def test_text_comes_from_the_index_or_from_the_corpus_by_id(small: Corpus, small_index: Path, tmp_path: Path) -> None:
    lucene_build.build(small, tmp_path / "raw", threads=1, store_raw=True)
    from_corpus, from_index = LuceneRetriever(small_index, small), LuceneRetriever(tmp_path / "raw")
    expected = {"id": "p2", "title": "Norway", "text": "Oslo 2", "url": "u", "contents": '"Norway"\nOslo 2'}
    for retriever in (from_corpus, from_index):
        ((best, *rest),) = retriever.search(["oslo 2"], 3)
        assert json.loads(best.document) == expected
        assert len(rest) == 2
        retriever.close()
    with pytest.raises(StartError, match="stores no text: name the corpus"):
        LuceneRetriever(small_index)


def test_java_has_a_process_of_its_own_and_may_die_there(small: Corpus, small_index: Path) -> None:
    retriever = LuceneRetriever(small_index, small)
    assert "libjvm" not in Path("/proc/self/maps").read_text()
    assert retriever._process is not None
    assert "libjvm" in Path(f"/proc/{retriever._process.pid}/maps").read_text()
    retriever._process.kill()
    retriever._process.wait()
    assert len(retriever.search(["oslo"], 3)[0]) == 3
    retriever.close()


def test_an_index_of_another_corpus_or_no_index_is_refused(small_index: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(json.dumps({"id": "1", "contents": "a"}) + "\n")
    with pytest.raises(StartError, match="built for another corpus"):
        LuceneRetriever(small_index, Corpus.open(path))
    with pytest.raises(StartError, match="is no Lucene index"):
        LuceneRetriever(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "segments_1").write_bytes(b"nothing")
    with pytest.raises(StartError, match="Lucene cannot open"):
        LuceneRetriever(tmp_path / "broken")
