"""Ending vLLM's processes with the one that started them, which vLLM leaves to a clean exit."""

from __future__ import annotations

import os
import threading
import time

import psutil

_ENGINE_TITLE = "EngineCore"
_POLL_S = 1.0


def end_with_driver() -> None:
    """To be called in a vLLM worker process: when the process that started the engine is killed, end the engine.

    A killed driver cannot end its children. They would wait for requests for ever and keep the GPU's memory, also from
    the engine that is started in place of theirs.
    """
    parent = psutil.Process(os.getppid())
    engine = parent if _ENGINE_TITLE in "".join(parent.cmdline()) else psutil.Process()
    threading.Thread(target=_watch, args=(engine, engine.ppid()), name="orphans", daemon=True).start()


def _watch(engine: psutil.Process, driver: int) -> None:
    while engine.is_running() and engine.ppid() == driver:
        time.sleep(_POLL_S)
    if engine.is_running():
        engine.kill()
    os._exit(1)
