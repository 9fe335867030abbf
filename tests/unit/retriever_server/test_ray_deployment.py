"""What a Ray Serve deployment is told before Ray starts anything."""

from __future__ import annotations

import pytest
from ray import cloudpickle
from starlette.testclient import TestClient

from retriever_server.command import make_parser
from retriever_server.serve_ray import app_builder, main


def test_replicas_ask_for_the_drivers_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRIEVER_TOKEN", "secret")
    sent = cloudpickle.dumps(app_builder(make_parser().parse_args(["--retriever", "noise"])))
    monkeypatch.delenv("RETRIEVER_TOKEN")  # as where the replica runs
    with TestClient(cloudpickle.loads(sent)()) as client:
        assert client.post("/retrieve", json={"queries": []}).status_code == 401


@pytest.mark.parametrize("arguments", [["--workers", "2"], ["--port", "0"]])
def test_options_that_cannot_be_heeded_are_refused(arguments: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert main(["--retriever", "noise", *arguments]) == 2
    assert "Ray Serve takes no --workers and no --port 0" in caplog.text
