"""The lockstep schedule does not wait for an engine for ever."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from search_r1.config import EnvironmentConfig, RolloutConfig
from search_r1.environments.search import SearchEnvironment
from search_r1.errors import EngineError, VoidLimitError
from search_r1.rollout.async_schedule import AsyncLimits
from search_r1.rollout.blocking import BoundedCaller
from search_r1.rollout.manager import LLMGenerationManager
from search_r1.types import SamplingConfig, Status
from tests.fakes import FakeRetriever, FunctionEngine, decode, encode, make_prompt

SAMPLING = SamplingConfig(64)
LIMITS = AsyncLimits(generation_timeout_s=0.2)


class StuckEngine(FunctionEngine):
    """Answers at once until it sees a context with `stuck`; then it hangs until the test ends."""

    def __init__(self) -> None:
        super().__init__(lambda context, seed: "<answer>a</answer>" if "echo" in context else "<search>stuck</search>")
        self.released = threading.Event()
        self.max_running = self._running = 0

    def generate(self, contexts, sampling, seeds):  # type: ignore[no-untyped-def]
        self._running += 1
        self.max_running = max(self.max_running, self._running)
        if any("stuck" in decode(context) for context in contexts):
            self.released.wait()
        self._running -= 1
        return super().generate(contexts, sampling, seeds)


def manager_of(engine: FunctionEngine, max_void_share: float) -> LLMGenerationManager:
    config = RolloutConfig(
        schedule="lockstep",
        max_turns=2,
        max_start_length=64,
        max_response_length=64,
        max_obs_length=200,
        max_prompt_length=900,
        max_void_share=max_void_share,
    )
    environment = SearchEnvironment(FakeRetriever(), encode, decode, EnvironmentConfig(), 200)
    return LLMGenerationManager(engine, environment, config, LIMITS)


def test_trajectories_whose_turn_outlives_the_deadline_are_void() -> None:
    engine = StuckEngine()
    manager = manager_of(engine, max_void_share=1.0)
    found = manager.run_llm_loop([make_prompt("a"), make_prompt("b")], SAMPLING)
    assert [trajectory.status for trajectory in found] == [Status.VOID] * 2
    assert [len(trajectory.turns) for trajectory in found] == [1, 1]
    assert {t.failure for t in found} == {"the engine gave no completion within engine.timeout_s=0.2"}
    engine.released.set()
    manager.close()


def test_a_stuck_engine_stops_the_step_with_its_cause() -> None:
    engine = StuckEngine()
    manager = manager_of(engine, max_void_share=0.1)
    with pytest.raises(VoidLimitError, match=r"2 of 2 trajectories failed.*engine\.timeout_s=0\.2"):
        manager.run_llm_loop([make_prompt("a"), make_prompt("b")], SAMPLING)
    engine.released.set()
    manager.close()


def test_an_engine_that_is_still_at_an_abandoned_call_gets_no_second_one_beside_it() -> None:
    engine = StuckEngine()
    manager = manager_of(engine, max_void_share=1.0)
    manager.run_llm_loop([make_prompt("a")], SAMPLING)
    again = manager.run_llm_loop([make_prompt("b")], SAMPLING)
    assert again[0].status is Status.VOID
    engine.released.set()
    while manager.run_llm_loop([make_prompt("c")], SAMPLING)[0].status is Status.VOID:
        time.sleep(0.01)
    assert engine.max_running == 1
    manager.close()


def test_what_an_engine_raises_in_time_is_raised_as_itself() -> None:
    class Broken(FunctionEngine):
        def generate(self, contexts, sampling, seeds):  # type: ignore[no-untyped-def]
            raise EngineError("no room")

    manager = manager_of(Broken(lambda context, seed: ""), max_void_share=1.0)
    with pytest.raises(EngineError, match="no room"):
        manager.run_llm_loop([make_prompt("a")], SAMPLING)
    manager.close()


def test_a_bounded_caller_starts_again_after_it_was_closed() -> None:
    caller = BoundedCaller("test")
    assert caller(lambda: threading.current_thread().name, 5.0) == "test"
    caller.close()
    assert caller(lambda: 1, 5.0) == 1
    caller.close()


INTERRUPTED = """
import atexit, torch
from search_r1.rollout.blocking import BoundedCaller, end_process

def sample():
    print("sampling", flush=True)
    while True:
        torch.ones(200, 200) @ torch.ones(200, 200)

atexit.register(print, "handled")
try:
    BoundedCaller("engine")(sample, 600.0)
except KeyboardInterrupt:
    end_process(130)
"""


def test_ctrl_c_ends_the_process_with_its_exit_handlers_while_a_call_is_inside_torch() -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "sampling\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("handled\n", "")
    assert process.returncode == 130
