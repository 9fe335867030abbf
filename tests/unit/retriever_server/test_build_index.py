"""`python -m retriever_server.build_index` as a user runs it, and the server's flags for every kind of retriever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retriever_server import bm25_build, loading
from retriever_server.__main__ import main as serve
from retriever_server.app import create_app
from retriever_server.bm25 import BM25Retriever, open_or_build
from retriever_server.build_index import known_items_found, main
from retriever_server.building import Progress, duration
from retriever_server.command import make_parser
from retriever_server.corpus import Corpus
from tests.live_server import live_server
from tests.lucene_jar import needs_lucene
from tests.tiny_encoder import tiny_encoder_dir

WORDS = "norway peru japan kenya chile nepal spain egypt rivers mountains high capital lies the of on"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    path = tmp_path / "corpus.jsonl"
    rows = [{"id": f"p{row}", "contents": " ".join(draw.choice(WORDS.split(), 12))} for row in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_encoder_dir(tmp_path_factory.mktemp("encoder") / "tiny"))


def load(*arguments: str) -> Any:
    return loading.load(make_parser().parse_args(arguments))[0]


def ids(retriever: Any, query: str, top_k: int = 5) -> list[str]:
    (found,) = retriever.search([query], top_k)
    return [json.loads(passage.document)["id"] for passage in found]


@pytest.mark.parametrize("kind", ["bm25", "dense", pytest.param("lucene", marks=needs_lucene)])
def test_every_kind_is_built_verified_inspected_and_served(
    kind: str, corpus: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    caplog.set_level("INFO")
    index = tmp_path / "index"
    encoder = ["--encoder", model, "--profile", "minilm"] if kind == "dense" else []
    assert main(["--retriever", kind, "--corpus", str(corpus), "--index", str(index), *encoder]) == 0
    assert "100% of the sampled passages are found by their own first 32 words" in caplog.text
    assert main(["verify", str(index), "--corpus", str(corpus), *encoder[:2]]) == 0
    assert main(["inspect", str(index)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["retriever"], facts["rows"]) == (kind, 40)
    assert facts["bytes"] > 0
    retriever = load("--retriever", kind, "--corpus", str(corpus), "--index", str(index), *encoder[:2])
    assert ids(retriever, json.loads(corpus.read_text().splitlines()[7])["contents"])[0] == "p7"


def test_parts_are_imported_by_the_command(corpus: Path, model: str, tmp_path: Path) -> None:
    encoder = ["--encoder", model, "--profile", "minilm"]
    build = ["--retriever", "dense", "--corpus", str(corpus), "--index", str(tmp_path / "built"), *encoder]
    assert main([*build, "--factory", "Flat"]) == 0
    data = (tmp_path / "built" / "index.faiss").read_bytes()
    (tmp_path / "part_aa").write_bytes(data[:1000])
    (tmp_path / "part_ab").write_bytes(data[1000:])
    parts = [str(tmp_path / "part_aa"), str(tmp_path / "part_ab")]
    assert main(["import", "--corpus", str(corpus), "--index", str(tmp_path / "taken"), *encoder, *parts]) == 0
    serve = ["--retriever", "dense", "--corpus", str(corpus), "--encoder", model]
    built, taken = (load(*serve, "--index", str(tmp_path / name)) for name in ("built", "taken"))
    assert ids(built, "rivers of peru") == ids(taken, "rivers of peru")


@needs_lucene
def test_a_lucene_folder_of_others_is_taken_in_where_it_lies_and_the_corpus_not_read_again(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    assert main(["--retriever", "lucene", "--corpus", str(corpus), "--index", str(theirs), "--no-verify"]) == 0
    for name in ("manifest.json", "offsets.npy"):
        (theirs / name).unlink()
    assert main(["import", "--corpus", str(corpus), "--index", str(ours), str(theirs)]) == 0
    assert all(path.is_symlink() for path in ours.glob("segments_*"))
    monkeypatch.setattr(Corpus, "open", lambda path: pytest.fail("the whole corpus was read"))
    retriever = load("--retriever", "lucene", "--corpus", str(corpus), "--index", str(ours))
    assert ids(retriever, json.loads(corpus.read_text().splitlines()[3])["contents"])[0] == "p3"
    retriever.close()
    monkeypatch.undo()
    assert main(["import", "--corpus", str(corpus), "--index", str(tmp_path / "x"), str(tmp_path)]) == 2
    assert "is no Lucene index" in caplog.text


def test_blocks_and_processes_change_nothing_and_an_interrupted_build_goes_on(corpus: Path, tmp_path: Path) -> None:
    opened = Corpus.open(corpus)
    bm25_build.build(opened, tmp_path / "whole")
    bm25_build.build(opened, tmp_path / "blocks", block_rows=7, workers=2)
    partial = tmp_path / "resumed.partial"
    with pytest.raises(StopIteration):
        bm25_build.build(_Stopping(opened, at=21), tmp_path / "resumed", block_rows=7, workers=1)  # type: ignore[arg-type]
    done = {path.name: path.stat().st_mtime_ns for path in (partial / "blocks").glob("*.npz")}
    assert len(done) == 3
    bm25_build.build(opened, tmp_path / "resumed", block_rows=7, workers=1)
    answers = [
        BM25Retriever.load(tmp_path / name, corpus).search(["rivers of peru", "egypt", "capital high"], 40)
        for name in ("whole", "blocks", "resumed")
    ]
    assert answers[0] == answers[1] == answers[2]


class _Stopping:
    """A corpus whose reader is interrupted."""

    def __init__(self, corpus: Corpus, at: int) -> None:
        self._corpus, self._at = corpus, at

    def texts(self, start: int = 0, stop: int | None = None) -> Any:
        if start >= self._at:
            raise StopIteration
        return self._corpus.texts(start, stop)

    def __len__(self) -> int:
        return len(self._corpus)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._corpus, name)


def test_an_index_of_shuffled_passages_fails_its_known_items(corpus: Path, tmp_path: Path) -> None:
    lines = corpus.read_text().splitlines()
    shuffled = tmp_path / "shuffled.jsonl"
    texts = [json.loads(line)["contents"] for line in lines]
    rows = [{"id": f"p{row}", "contents": text} for row, text in enumerate([*texts[20:], *texts[:20]])]
    shuffled.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert known_items_found(open_or_build(corpus, None), Corpus.open(corpus)) == 1
    assert known_items_found(open_or_build(shuffled, None), Corpus.open(corpus)) < 0.5


@pytest.mark.parametrize(
    "arguments, cause",
    [
        (["--retriever", "bm25"], "--corpus and --index are needed"),
        (["--retriever", "dense", "--corpus", "CORPUS", "--index", "new"], "--encoder and --profile are needed"),
        (["--retriever", "noise", "--corpus", "CORPUS", "--index", "new"], "there is no index to build for noise"),
        (["--corpus", "CORPUS", "--index", "FOLDER"], "exists already"),
        (["inspect", "FOLDER"], "is no index folder"),
        (["inspect", "CUT"], "has no readable manifest.json"),
        (["verify", "CUT", "--corpus", "CORPUS"], "has no readable manifest.json"),
        (["--corpus", "/nowhere", "--index", "new"], "the corpus /nowhere does not exist"),
        (["--retriever", "qdrant", "--corpus", "CORPUS"], "--corpus, --url and --collection are needed"),
    ],
)
def test_a_wrong_build_is_told_in_a_sentence(
    arguments: list[str], cause: str, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "manifest.json").write_text('{"retriever": "bm25", ')
    names = {"CORPUS": str(corpus), "FOLDER": str(tmp_path), "CUT": str(tmp_path / "cut")}
    assert main([names.get(argument, argument) for argument in arguments]) == 2
    assert cause in caplog.text


@pytest.mark.parametrize(
    "arguments, cause",
    [
        (["lucene"], "--index is missing: lucene opens one"),
        (["dense", "--index", "x", "--corpus", "y"], "--encoder is missing"),
        (["hybrid"], "--parts is missing"),
        (["hybrid", "--parts", "web=x", "bm25=y"], "expected one of bm25, lucene, dense, remote"),
        (["remote"], "--url is missing: where the remote server answers"),
        (["opensearch", "--url", "http://127.0.0.1:9"], "--collection is missing"),
        (["qdrant", "--url", "x", "--collection", "y"], "--profile is missing"),
        (["remote", "--url", "http://127.0.0.1:9"], "gave no answer"),
        (["web"], "needs the environment variable SERPER_API_KEY"),
        (["noise", "--rerank", "/nowhere"], "the reranker /nowhere cannot be loaded"),
        (["noise", "--rerank", "/nowhere", "--device", "gpu"], "--device gpu cannot be used here"),
        (["noise", "--rerank", "/nowhere", "--device", "cuda:99"], "--device cuda:99 cannot be used here"),
    ],
)
def test_a_wrong_start_of_any_kind_is_told_in_a_sentence(
    arguments: list[str], cause: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    monkeypatch.setattr("retriever_server.upstream.time.sleep", lambda seconds: None)
    assert serve(["--port", "0", "--retriever", *arguments]) == 2
    assert cause in caplog.text


def test_a_hybrid_is_put_together_and_reranked_from_flags(corpus: Path, model: str, tmp_path: Path) -> None:
    bm25, dense = str(tmp_path / "bm25"), str(tmp_path / "dense")
    encoder = ["--encoder", model, "--profile", "minilm"]
    assert main(["--corpus", str(corpus), "--index", bm25]) == 0
    assert main(["--retriever", "dense", "--corpus", str(corpus), "--index", dense, *encoder]) == 0
    judge = str(tiny_encoder_dir(tmp_path / "judge", classifier=True))
    flags = ["--retriever", "hybrid", "--parts", f"bm25={bm25}", f"dense={dense}", "--corpus", str(corpus)]
    facts = load(*flags, *encoder[:2], "--rerank", judge, "--rerank-depth", "7").describe()
    assert [part["retriever"] for part in facts["parts"]] == ["bm25", "dense"]
    assert (facts["reranker"], facts["rerank_depth"]) == ("judge", 7)
    with live_server(create_app(load("--corpus", str(corpus), "--index", bm25))) as url:
        hybrid = load("--retriever", "hybrid", "--parts", f"bm25={bm25}", f"remote={url}", "--corpus", str(corpus))
        assert [part["retriever"] for part in hybrid.describe()["parts"]] == ["bm25", "remote"]
        assert len(hybrid.search(["norway"], 2)[0]) == 2


def test_progress_tells_rate_and_remaining_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    now = [100.0]
    monkeypatch.setattr("retriever_server.building.time.monotonic", lambda: now[0])
    progress = Progress("encoding", 10_000)
    progress.skip(4_000)
    now[0] += 5
    progress.advance(500)
    assert caplog.messages == []
    now[0] += 15
    progress.advance(1_500)
    assert caplog.messages == ["encoding: 6,000 of 10,000 (60.0 %), 100 a second, 40 s left"]
    assert [duration(seconds) for seconds in (0, 59, 61, 3_599, 8_000)] == [
        "0 s",
        "59 s",
        "1 min 1 s",
        "59 min 59 s",
        "2 h 13 min",
    ]
