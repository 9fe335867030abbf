"""Encoders and dense indexes: built, interrupted, imported, refused. With a tiny random model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from retriever_server import dense, dense_build
from retriever_server.corpus import Corpus
from retriever_server.encoder import PROFILES, Encoder
from retriever_server.errors import StartError
from tests.tiny_encoder import tiny_encoder_dir

COUNTRIES = ("norway", "peru", "japan", "kenya", "chile", "nepal", "spain", "egypt")
TEXTS = [
    f'"{country}"\n{text}' for country in COUNTRIES for text in ("the capital of rivers", "mountains are high " * 9)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_encoder_dir(tmp_path_factory.mktemp("encoder") / "tiny"))


@pytest.fixture(scope="module")
def encoder(model: str) -> Encoder:
    return Encoder(model, PROFILES["e5"])


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{row}", "contents": text}) + "\n" for row, text in enumerate(TEXTS)))
    return Corpus.open(path)


def ids(found: Sequence[Any]) -> list[list[str]]:
    return [[json.loads(passage.document)["id"] for passage in passages] for passages in found]


@pytest.mark.parametrize("name", list(PROFILES))
def test_a_profile_sets_prefix_pooling_length_and_norm(name: str, model: str) -> None:
    """Against one text at a time through the plain model."""
    profile = replace(PROFILES[name], max_passage_tokens=20)
    plain, tokenizer = AutoModel.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    encoder = Encoder(model, profile)
    texts = ["the capital of peru", "mountains " * 40, ""]
    for prefix, limit, found in (
        (profile.query_prefix, 128, encoder.encode_queries(texts)),
        (profile.passage_prefix, 20, encoder.encode_passages(texts)),
    ):
        for text, vector in zip(texts, found, strict=True):
            inputs = tokenizer(prefix + text, truncation=True, max_length=limit, return_tensors="pt")
            with torch.no_grad():
                hidden = plain(**inputs).last_hidden_state[0]
            expected = hidden[0] if profile.pooling == "cls" else hidden.mean(0)
            if profile.normalize:
                expected = expected / expected.norm()
            np.testing.assert_allclose(vector, expected.numpy(), atol=2e-6)


def test_a_vector_does_not_depend_on_its_batch_mates(encoder: Encoder) -> None:
    texts = ["peru", "the capital of norway is high", *(f"{'rivers ' * length}" for length in range(1, 60))]
    together = encoder.encode_queries(texts)
    for place, text in enumerate(texts):
        assert np.array_equal(encoder.encode_queries([text])[0], together[place])
    assert np.array_equal(encoder.encode_queries(texts[::-1])[::-1], together)


@pytest.mark.parametrize("factory", [None, "Flat", "HNSW8"])
def test_a_built_index_finds_what_brute_force_finds(
    factory: str | None, model: str, encoder: Encoder, corpus: Corpus, tmp_path: Path
) -> None:
    dense_build.build(corpus, tmp_path / "index", encoder, factory=factory, shard_rows=5)
    retriever = dense.load(tmp_path / "index", corpus.path, model)
    queries = ["capital of norway", "mountains", "rivers of peru or japan"]
    stored = encoder.encode_passages(list(corpus.texts())).astype(np.float16).astype(np.float64)
    best = np.argsort(-(encoder.encode_queries(queries).astype(np.float64) @ stored.T), axis=1, kind="stable")[:, :4]
    assert ids(retriever.search(queries, 4)) == [[f"p{row}" for row in rows] for rows in best.tolist()]
    assert retriever.describe()["rows"] == len(TEXTS)


def test_an_interrupted_build_goes_on_where_it_stopped(
    encoder: Encoder, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []

    class Counting:
        dim, describe = encoder.dim, encoder.describe

        def encode_passages(self, texts: Sequence[str]) -> Any:
            if len(encoded) >= 8:
                raise KeyboardInterrupt
            encoded.extend(texts)
            return encoder.encode_passages(texts)

    def build(folder: str, with_encoder: Any) -> None:
        dense_build.build(corpus, tmp_path / folder, with_encoder, shard_rows=4)

    with pytest.raises(KeyboardInterrupt):
        build("index", Counting())
    assert not (tmp_path / "index").exists()
    encoded.clear()
    monkeypatch.setattr(
        Counting, "encode_passages", lambda self, texts: encoded.extend(texts) or encoder.encode_passages(texts)
    )
    build("index", Counting())
    assert encoded == TEXTS[8:]
    build("at once", encoder)
    for shard in (tmp_path / "at once").glob("*.npy"):
        assert (tmp_path / "index" / shard.name).read_bytes() == shard.read_bytes()


def test_a_build_does_not_go_on_with_another_corpus_or_encoder(
    encoder: Encoder, model: str, corpus: Corpus, tmp_path: Path
) -> None:
    other = Encoder(model, PROFILES["bge"])
    (tmp_path / "index.partial").mkdir()
    (tmp_path / "index.partial" / "settings.json").write_text("{}")
    with pytest.raises(StartError, match="was begun with other settings"):
        dense_build.build(corpus, tmp_path / "index", other)
    dense_build.build(corpus, tmp_path / "done", encoder)
    with pytest.raises(StartError, match="exists already"):
        dense_build.build(corpus, tmp_path / "done", encoder)


def test_another_encoder_corpus_or_a_cut_index_is_refused(
    encoder: Encoder, model: str, corpus: Corpus, tmp_path: Path
) -> None:
    dense_build.build(corpus, tmp_path / "index", encoder, factory="Flat")
    stranger = str(tiny_encoder_dir(tmp_path / "stranger", seed=1))
    with pytest.raises(StartError, match="was built by the encoder tiny"):
        dense.load(tmp_path / "index", corpus.path, stranger)
    wide = str(tiny_encoder_dir(tmp_path / "wide", hidden_size=48))
    with pytest.raises(StartError, match=r"\(32 dimensions\), not by .*wide \(48\)"):
        dense.load(tmp_path / "index", corpus.path, wide)
    other = tmp_path / "other.jsonl"
    other.write_text(corpus.path.read_text().replace("norway", "sweden"))
    with pytest.raises(StartError, match="built for another corpus"):
        dense.load(tmp_path / "index", other, model)
    with pytest.raises(StartError, match="cannot be loaded"):
        dense.load(tmp_path / "index", corpus.path, str(tmp_path / "nothing"))
    with pytest.raises(StartError, match="has no effect on exact search"):
        dense.load(tmp_path / "index", corpus.path, model, backend="torch", parameters="nprobe=3")
    (tmp_path / "index" / "index.faiss").write_bytes((tmp_path / "index" / "index.faiss").read_bytes()[:-4])
    with pytest.raises(StartError, match="is missing or damaged"):
        dense.load(tmp_path / "index", corpus.path, model)
    offsets = tmp_path / "index" / "offsets.npy"
    offsets.write_bytes(offsets.read_bytes()[:-4])
    with pytest.raises(StartError, match=r"is damaged: offsets.npy"):
        dense.load(tmp_path / "index", corpus.path, model)
    offsets.unlink()
    with pytest.raises(StartError, match=r"is damaged: offsets.npy"):
        dense.load(tmp_path / "index", corpus.path, model)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "index" / "vectors-000000000000.npy").read_bytes()[:-4])
    with pytest.raises(StartError, match=r"cut.npy are damaged"):
        dense_build.import_vectors(corpus, tmp_path / "imported", encoder, [tmp_path / "cut.npy"])


@pytest.mark.parametrize("convert", [False, True])
def test_published_parts_and_memmaps_are_taken_in_where_they_lie(
    convert: bool, encoder: Encoder, model: str, corpus: Corpus, tmp_path: Path
) -> None:
    dense_build.build(corpus, tmp_path / "built", encoder, factory="Flat")
    data = (tmp_path / "built" / "index.faiss").read_bytes()
    parts = [tmp_path / "part_aa", tmp_path / "part_ab"]
    parts[0].write_bytes(data[:777])
    parts[1].write_bytes(data[777:])
    memmap = tmp_path / "emb_e5.memmap"
    memmap.write_bytes(encoder.encode_passages(TEXTS).tobytes())
    expected = ids(dense.load(tmp_path / "built", corpus.path, model).search(["capital of peru"], 5))
    for number, sources in enumerate([parts, [memmap]]):
        folder = tmp_path / f"imported {number}"
        dense_build.import_vectors(corpus, folder, encoder, sources, convert=convert)
        assert ids(dense.load(folder, corpus.path, model).search(["capital of peru"], 5)) == expected
        assert (sum(path.suffix == ".npy" for path in folder.iterdir()) == 2) is convert


def test_another_faiss_index_is_taken_in_whole(encoder: Encoder, model: str, corpus: Corpus, tmp_path: Path) -> None:
    dense_build.build(corpus, tmp_path / "built", encoder, factory="HNSW8")
    dense_build.import_vectors(corpus, tmp_path / "imported", encoder, [tmp_path / "built" / "index.faiss"])
    built, imported = (dense.load(tmp_path / name, corpus.path, model) for name in ("built", "imported"))
    assert imported.search(["rivers"], 5) == built.search(["rivers"], 5)
    with pytest.raises(StartError, match="only a FAISS file"):
        dense.load(tmp_path / "imported", corpus.path, model, backend="torch")


def test_vectors_of_another_pooling_or_corpus_order_are_not_imported(
    encoder: Encoder, model: str, corpus: Corpus, tmp_path: Path
) -> None:
    memmap = tmp_path / "emb.memmap"
    vectors = encoder.encode_passages(TEXTS)
    memmap.write_bytes(vectors.tobytes())
    with pytest.raises(StartError, match="gives other vectors than the files hold"):
        dense_build.import_vectors(corpus, tmp_path / "a", Encoder(model, PROFILES["bge"]), [memmap])
    memmap.write_bytes(np.roll(vectors, 1, axis=0).tobytes())
    with pytest.raises(StartError, match="another corpus order"):
        dense_build.import_vectors(corpus, tmp_path / "b", encoder, [memmap])
    for number, part in enumerate((vectors[:11], vectors[12:], vectors[11:12])):  # most rows stand where they should
        (tmp_path / f"emb_{number}.memmap").write_bytes(part.tobytes())
    with pytest.raises(StartError, match=r"median cosine 1.000, lowest 0\.[78].*another corpus order"):
        dense_build.import_vectors(corpus, tmp_path / "d", encoder, sorted(tmp_path.glob("emb_*.memmap")))
    memmap.write_bytes(vectors[1:].tobytes())
    with pytest.raises(StartError, match="files hold"):
        dense_build.import_vectors(corpus, tmp_path / "c", encoder, [memmap])
