"""quickstart.sh around a stand-in server and trainer: what it starts ends with it, and failures are told."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SERVER = """#!/usr/bin/env bash
echo $$ >> pids
sleep 300 & echo $! >> pids
while [ "$1" != --port-file ]; do shift; done
exec python - "$2" <<'PY'
import sys, http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
open(sys.argv[1], "w").write(f"{server.server_port}\\n")
server.serve_forever()
PY
"""
TRAINER = """#!/usr/bin/env bash
echo $$ >> pids
printf '%s\\n' "$0" "$@" "setup=$SEARCH_R1_SETUP_SECONDS" > arguments
"""
POLITE = TRAINER + "exec python -c \"import time; open('started', 'w'); time.sleep(300)\"\n"
STUBBORN = TRAINER + "trap '' INT\nsleep 300 & echo $! >> pids\ntouch started\nwait\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that quickstart.sh takes for the repository; `python -m search_r1.report` is a stand-in too."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "search_r1").mkdir()
    (tmp_path / "search_r1" / "report.py").write_text("import sys; print('report of', sys.argv[1])")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    os.symlink(sys.executable, tmp_path / ".venv" / "bin" / "python")
    shutil.copy(ROOT / "quickstart.sh", tmp_path)
    shutil.copy(ROOT / ".ci/env.sh", tmp_path / ".ci")
    write_script(tmp_path / ".ci/setup.sh", "#!/bin/sh\n")
    write_script(tmp_path / "retrieval_launch.sh", SERVER)
    for name in ("train_grpo.sh", "train_ppo.sh"):
        write_script(tmp_path / name, TRAINER)
    return tmp_path


def write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def start(checkout: Path, *arguments: str) -> subprocess.Popen[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["./quickstart.sh", *arguments],
        cwd=checkout,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def survivors(checkout: Path) -> list[int]:
    """Processes that were started and still run (a zombie does not)."""
    alive = []
    for pid in map(int, (checkout / "pids").read_text().split()):
        status = Path(f"/proc/{pid}/stat")
        if status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z":
            alive.append(pid)
    return alive


def test_the_trainer_gets_the_url_the_seed_and_what_else_was_given(checkout: Path) -> None:
    process = start(checkout, "--ppo", "--seed", "7", "trainer.total_steps=2")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    name, experiment, url, seed, steps, setup = (checkout / "arguments").read_text().split()
    assert (name, experiment, seed, steps) == (
        "./train_ppo.sh",
        "experiment=quickstart",
        "seed=7",
        "trainer.total_steps=2",
    )
    assert url.startswith("environment.retriever_urls=[http://127.0.0.1:")
    assert url.endswith("/retrieve]")
    assert setup.removeprefix("setup=").isdigit()
    assert "report of runs/quickstart/latest" in output
    assert survivors(checkout) == []


@pytest.mark.parametrize("number, trainer", [(signal.SIGINT, STUBBORN), (signal.SIGTERM, POLITE)])
def test_an_interrupted_quickstart_leaves_nothing_running(checkout: Path, number: signal.Signals, trainer: str) -> None:
    write_script(checkout / "train_grpo.sh", trainer)
    process = start(checkout)
    while not (checkout / "started").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=90)
    assert process.returncode == 128 + number
    assert survivors(checkout) == []


def test_a_failed_training_is_the_exit_status_and_ends_the_server(checkout: Path) -> None:
    write_script(checkout / "train_grpo.sh", TRAINER + "exit 2\n")
    process = start(checkout)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "report of" not in output
    assert survivors(checkout) == []


def test_a_server_that_dies_is_told_with_its_last_lines(checkout: Path) -> None:
    write_script(checkout / "retrieval_launch.sh", "#!/bin/sh\necho $$ >> pids\necho the corpus is gone\nexit 2\n")
    process = start(checkout)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the corpus is gone" in errors
    assert "did not start" in errors
    assert not (checkout / "arguments").exists()
