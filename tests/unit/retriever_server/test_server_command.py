"""`python -m retriever_server` as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from retriever_server.__main__ import main
from retriever_server.serving import bind
from tests.recorded_server import Answer, Asked, recorded_server

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    texts = ["Oslo is the capital of Norway", "Lima is the capital of Peru", "a fox"]
    path.write_text("".join(json.dumps({"id": f"p{row}", "contents": text}) + "\n" for row, text in enumerate(texts)))
    return path


@contextmanager
def server(
    folder: Path, *arguments: str, env: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    port_file = folder / "port"
    process = subprocess.Popen(
        [sys.executable, "-m", "retriever_server", "--port", "0", "--port-file", str(port_file), *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + 60
        while not port_file.exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < end, "the server never was ready"
            time.sleep(0.02)
        yield process, f"http://127.0.0.1:{port_file.read_text().strip()}"
    finally:
        process.kill()
        process.wait()


def refusal(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, arguments: Sequence[str]) -> str:
    """What a failed start says; it must be one line and exit code 2."""
    assert main(list(arguments)) == 2
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "\n" not in record.getMessage()
    assert "Traceback" not in capsys.readouterr().err
    return record.getMessage()


def test_a_server_answers_says_where_and_ends_cleanly_on_sigterm(tmp_path: Path, corpus: Path) -> None:
    with server(tmp_path, "--corpus", str(corpus), "--topk", "1") as (process, url):
        answer = httpx.post(f"{url}/retrieve", json={"queries": ["capital of Peru"]}).json()
        assert [document["id"] for document in answer["result"][0]] == ["p1"]
        assert httpx.get(f"{url}/info").json()["rows"] == 3
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
    assert process.returncode == 0
    assert [line for line in log.splitlines() if "ready" in line] == [log.splitlines()[-1]]
    assert f"ready: bm25 at {url}/retrieve" in log
    assert "Traceback" not in log


def test_a_search_that_hangs_does_not_keep_the_server_from_ending_on_sigterm(tmp_path: Path) -> None:
    hanging, release = threading.Event(), threading.Event()

    def respond(asked: Asked) -> Answer:
        if asked.path != "/info" and asked.json["queries"] == ["hangs"]:
            hanging.set()
            release.wait(30)
        return Answer({"result": [[]]})

    with recorded_server(respond) as engine:
        arguments = ("--retriever", "remote", "--url", engine.url, "--timeout-s", "0.3")
        with server(tmp_path, *arguments) as (process, url):
            assert httpx.post(f"{url}/retrieve", json={"queries": ["hangs"]}).status_code == 504
            assert hanging.is_set()
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=15)
        release.set()
    assert process.returncode == 0
    assert "a call still runs and is left alone" in log
    assert "Traceback" not in log


def test_several_processes_share_a_port_and_an_index_and_end_together(tmp_path: Path, corpus: Path) -> None:
    arguments = ("--corpus", str(corpus), "--index", str(tmp_path / "index"), "--topk", "1", "--workers", "2")
    with server(tmp_path, *arguments) as (process, url):
        workers = children(process.pid)
        assert len(workers) >= 2
        for _ in range(8):  # a connection each, so that both may be asked
            answer = httpx.post(f"{url}/retrieve", json={"queries": ["capital of Peru"]}).json()
            assert [document["id"] for document in answer["result"][0]] == ["p1"]
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in log
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < end, "a process outlives its server"
        time.sleep(0.01)


def test_processes_that_cannot_open_the_index_end_the_start(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "index").mkdir()
    arguments = ["--corpus", str(corpus), "--index", str(tmp_path / "index"), "--port", "0", "--workers", "2"]
    command = [sys.executable, "-m", "retriever_server", *arguments]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "is no index folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_that_dies_over_a_health_check_is_replaced_without_waiting_for_it(
    tmp_path: Path, corpus: Path
) -> None:
    arguments = ("--corpus", str(corpus), "--index", str(tmp_path / "index"), "--workers", "2")
    with server(tmp_path, *arguments) as (process, _):
        before = {pid for pid in children(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()}
        victim = min(before)
        os.kill(victim, signal.SIGSTOP)
        time.sleep(2)  # health checks are half a second apart: one of them waits now
        os.kill(victim, signal.SIGKILL)
        end = time.monotonic() + 40  # the check alone would take 60
        while not set(children(process.pid)) - before or victim in children(process.pid):
            assert time.monotonic() < end, "the dead process was not replaced"
            time.sleep(0.05)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_quick_starts_empty_retriever_needs_no_corpus(tmp_path: Path) -> None:
    with server(tmp_path, "--retriever", "noise", "--noise", "empty") as (_, url):
        assert httpx.post(f"{url}/retrieve", json={"queries": ["a", "b"]}).json() == {"result": [[], []]}


def test_the_token_comes_from_the_environment(tmp_path: Path) -> None:
    arguments = ("--retriever", "noise")
    with server(tmp_path, *arguments, env={"RETRIEVER_TOKEN": "secret"}) as (process, url):
        assert httpx.post(f"{url}/retrieve", json={"queries": []}).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert httpx.post(f"{url}/retrieve", json={"queries": []}, headers=headers).status_code == 200
        process.terminate()
        assert "secret" not in process.communicate()[1]


def test_it_listens_on_this_machine_only_unless_told_otherwise(tmp_path: Path) -> None:
    with server(tmp_path, "--retriever", "noise") as (process, url):
        port = int(url.rsplit(":", 1)[1])
        with socket.socket() as probe:  # another address of this machine on the same port is free
            probe.bind(("127.0.0.2", port))
        process.terminate()
        assert f"http://127.0.0.1:{port}/retrieve" in process.communicate()[1]


def test_a_port_in_use_is_told_in_a_sentence(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = refusal(capsys, caplog, ["--retriever", "noise", "--port", str(port)])
    assert message.startswith(f"cannot listen on 127.0.0.1:{port}: Address already in use")


def test_of_two_servers_started_together_on_one_port_the_later_one_is_refused(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with bind("127.0.0.1", 0) as first:

        def first_one_is_ready(asked: Asked) -> Answer:
            first.listen()
            return Answer({})

        port = str(first.getsockname()[1])
        with recorded_server(first_one_is_ready) as engine:  # asked while the second one loads
            message = refusal(capsys, caplog, ["--retriever", "remote", "--url", engine.url, "--port", port])
    assert message.startswith(f"cannot listen on 127.0.0.1:{port}: Address already in use")


def test_a_launch_from_another_folder_takes_relative_paths_from_there(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("no json\n")
    command = [str(ROOT / "retrieval_launch.sh"), "--corpus", "mine.jsonl", "--port", "0"]
    done = subprocess.run(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "mine.jsonl line 1 is not JSON" in done.stderr


@pytest.mark.parametrize(
    "arguments, cause",
    [
        (["--port-file", "/nowhere/port", "--retriever", "noise"], "--port-file /nowhere/port cannot be written"),
        (["--corpus", "/nowhere/corpus.jsonl"], "the corpus /nowhere/corpus.jsonl does not exist"),
        ([], "--corpus is missing"),
        (["--retriever", "noise", "--noise", "random"], "--corpus is missing"),
        (["--workers", "2", "--corpus", "c.jsonl"], "--workers 2 needs a memory-mapped index"),
        (["--workers", "2", "--retriever", "dense", "--index", "i"], "--workers 2 needs a memory-mapped index"),
        (["--host", "no.such.host.invalid", "--retriever", "noise"], "cannot listen on no.such.host.invalid:0"),
    ],
)
def test_a_wrong_start_is_told_in_a_sentence(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, arguments: list[str], cause: str
) -> None:
    assert cause in refusal(capsys, caplog, ["--port", "0", *arguments])


def test_a_bad_corpus_line_ends_the_start_with_its_number(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, corpus: Path
) -> None:
    corpus.write_text(corpus.read_text() + "no json\n")
    assert f"{corpus} line 4 is not JSON" in refusal(capsys, caplog, ["--port", "0", "--corpus", str(corpus)])


def test_a_stale_port_file_does_not_survive_a_failed_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stale = tmp_path / "port"
    stale.write_text("1\n")
    assert main(["--port", "0", "--port-file", str(stale), "--corpus", "/nowhere"]) == 2
    assert not stale.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "70000"], ["--topk", "0"], ["--retriever", "magic"], ["--colour"], ["--k1", "-1"], ["--b", "2"],
        ["--timeout-s", "0"], ["--timeout-s", "nan"], ["--requests-per-s", "0"], ["--cache-mb", "-1"],
        ["--faiss-gpu", "a"],
    ],
)  # fmt: skip
def test_a_wrong_flag_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_help_shows_how_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert "python -m retriever_server --retriever bm25 --corpus corpus.jsonl" in text
    assert "RETRIEVER_TOKEN" in text


def test_the_server_never_imports_the_framework() -> None:
    loaded = "[name for name in ('search_r1', 'torch') if name in sys.modules]"
    code = f"import sys, retriever_server.__main__, retriever_server.bm25; sys.exit(' '.join({loaded}) or None)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
