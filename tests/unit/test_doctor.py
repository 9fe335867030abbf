"""The doctor tells what is missing and what to do about it."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from search_r1 import doctor

URL = "http://127.0.0.1:1/retrieve"


def answering(status: int, body: object) -> httpx.MockTransport:
    return httpx.MockTransport(lambda request: httpx.Response(status, json=body))


def test_a_retriever_that_is_not_running_is_missing_with_the_command_that_starts_one() -> None:
    finding = doctor.check_retriever(URL)
    assert finding.level == "missing"
    assert "retrieval_launch.sh" in finding.remedy


def test_the_doctor_asks_the_retriever_as_training_does() -> None:
    sent = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return httpx.Response(200, json={"result": [[{"document": {"contents": '"Title"\nText'}, "score": 1.0}]]})

    assert doctor.check_retriever(URL, httpx.MockTransport(handler)).level == "ok"
    assert sent == [{"queries": ["test"], "topk": 1, "return_scores": True}]


@pytest.mark.parametrize(
    "status, body", [(404, {}), (500, {"error": "x"}), (200, {"error": "x"}), (200, {"result": []}), (200, [])]
)
def test_an_answer_without_passages_is_no_retriever(status: int, body: object) -> None:
    assert doctor.check_retriever(URL, answering(status, body)).level == "missing"


def test_a_corpus_that_knows_nothing_of_the_doctors_query_is_no_failure() -> None:
    assert doctor.check_retriever(URL, answering(200, {"result": [[]]})).level == "ok"


def test_a_model_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    assert "no folder" in doctor.check_model(tmp_path / "absent").detail
    assert "config.json" in doctor.check_model(tmp_path).detail
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert "weights" in doctor.check_model(tmp_path).detail
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "tokenizer" in doctor.check_model(tmp_path).detail
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert "tokenizer" in doctor.check_model(tmp_path).detail
    (tmp_path / "tokenizer.json").write_text("{}")
    assert doctor.check_model(tmp_path).level == "ok"


def test_an_old_python_and_a_full_disk_are_told() -> None:
    assert doctor.check_python((3, 10, 1)).level == "missing"
    assert doctor.check_disk(Path.cwd(), free_gib=1.0).level == "note"
    assert doctor.check_package("no-such-package-anywhere").remedy == doctor.INSTALL


def test_an_optional_package_that_is_absent_is_a_note_and_not_a_failure() -> None:
    finding = doctor.check_optional("no_such_module", "extra", "works without it")
    assert (finding.level, finding.detail, finding.remedy) == ("note", "not installed", "works without it")
