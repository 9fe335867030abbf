from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

WORKER = "from search_r1.engines.orphans import end_with_driver; end_with_driver(); print('ready', flush=True); input()"
PARENT = "import subprocess, sys; subprocess.run(sys.argv[1:], check=False)"


@pytest.mark.parametrize("in_engine_process", [False, True])
def test_a_killed_driver_takes_its_engine_along(tmp_path: Path, in_engine_process: bool) -> None:
    """driver > engine > worker, or driver > engine that is its own worker."""
    worker = [sys.executable, "-c", WORKER]
    engine = worker if in_engine_process else [sys.executable, "-c", PARENT + " # VLLM::EngineCore", *worker]
    driver = subprocess.Popen(
        [sys.executable, "-c", PARENT, *engine], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "ready\n"
    family = psutil.Process(driver.pid).children(recursive=True)
    assert len(family) == (1 if in_engine_process else 2)
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    assert driver.stdin is not None
    driver.stdin.close()
