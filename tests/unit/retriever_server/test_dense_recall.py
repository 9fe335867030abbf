"""Dense retrieval with a real model over real questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retriever_server import dense, dense_build
from retriever_server.corpus import Corpus
from retriever_server.encoder import PROFILES, Encoder
from tests.minilm_model import minilm_dir
from tests.shared_data import json_lines, shared_data


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_minilm_finds_the_gold_passages_of_real_questions(tmp_path: Path) -> None:
    """Share of gold passages in the best three, over 5,000 passages (minutes to encode)."""
    model, corpus = minilm_dir(), shared_data("minibench/corpus.jsonl")
    dense_build.build(Corpus.open(corpus), tmp_path / "index", Encoder(model, PROFILES["minilm"]))
    questions = [row for row in json_lines("minibench/questions.jsonl") if row["data_source"] == "nq"]
    found = dense.load(tmp_path / "index", corpus, model).search([row["question"] for row in questions], 3)
    recalls = []
    for question, passages in zip(questions, found, strict=True):
        gold = set(question["gold_ids"])
        recalls.append(len(gold & {json.loads(passage.document)["id"] for passage in passages}) / len(gold))
    assert sum(recalls) / len(recalls) >= 0.93
