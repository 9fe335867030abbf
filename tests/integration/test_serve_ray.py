"""The retrieval service as a Ray Serve deployment, as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]


def test_the_same_service_answers_behind_ray_serve_and_ends_on_sigterm(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    texts = ["Oslo is the capital of Norway", "Lima is the capital of Peru"]
    corpus.write_text("".join(json.dumps({"id": f"p{row}", "contents": text}) + "\n" for row, text in enumerate(texts)))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "retriever_server.serve_ray", "--corpus", str(corpus), "--port", str(port)]
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    timer = threading.Timer(300, process.kill)
    timer.start()
    try:
        assert process.stderr is not None
        log = []
        for line in process.stderr:
            log.append(line)
            if "ready: bm25" in line:
                break
        url = f"http://127.0.0.1:{port}"
        assert f"at {url}/retrieve" in log[-1], "".join(log)
        body = {"queries": ["capital of Peru", "Oslo"], "topk": 1, "return_scores": True}
        answer = httpx.post(f"{url}/retrieve", json=body, timeout=60).json()
        assert [[item["document"]["id"] for item in items] for items in answer["result"]] == [["p1"], ["p0"]]
        assert httpx.get(f"{url}/ready", timeout=60).status_code == 200
        assert httpx.post(f"{url}/retrieve", json={"queries": ["x"], "topk": 0}, timeout=60).status_code == 422
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0
    finally:
        timer.cancel()
        process.kill()
        process.wait()
