from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.model_factory import tiny_model_dir

ROOT = Path(__file__).resolve().parents[3]

WORKER = "from search_r1.engines.orphans import end_with_driver; end_with_driver(); print('ready', flush=True); input()"
PARENT = "import subprocess, sys; subprocess.run(sys.argv[1:], check=False)"


def assert_ends_with(driver: subprocess.Popen[str], family: list[psutil.Process], timeout_s: float) -> None:
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(family, timeout=timeout_s)
    assert not alive
    assert driver.stdin is not None
    driver.stdin.close()


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
    assert_ends_with(driver, family, timeout_s=30)


ENGINE = """
import sys
from search_r1.engines.vllm_engine import VLLMEngine

if __name__ == "__main__":
    engine = VLLMEngine(sys.argv[1], dtype="float32", max_batch_size=2, cpu_cache_gib=0.1)
    print("ready", flush=True)
    input()
"""


@pytest.mark.vllm
def test_a_killed_driver_takes_a_real_vllm_engine_along(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(ENGINE)
    model = tiny_model_dir(tmp_path / "model")
    driver = subprocess.Popen(
        [sys.executable, str(script), str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert driver.stdout is not None
    assert any(line == "ready\n" for line in driver.stdout)
    family = psutil.Process(driver.pid).children(recursive=True)
    assert any("EngineCore" in "".join(process.cmdline()) for process in family)
    assert_ends_with(driver, family, timeout_s=60)
