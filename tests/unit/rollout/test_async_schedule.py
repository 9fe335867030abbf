from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from search_r1.config import EnvironmentConfig, RolloutConfig
from search_r1.engines.hf_engine import HFEngine
from search_r1.environments.search import SearchEnvironment
from search_r1.errors import EngineError, EngineLostError, VoidLimitError
from search_r1.rollout.async_schedule import AsyncLimits
from search_r1.rollout.manager import LLMGenerationManager
from search_r1.types import Action, Completion, Observation, Prompt, SamplingConfig, Status, Trajectory
from tests.fakes import AsyncEngine, FakeRetriever, FunctionEngine, decode, encode, make_prompt, make_question
from tests.model_factory import tiny_model, tiny_tokenizer

CONFIG = RolloutConfig(
    max_turns=3, max_start_length=400, max_response_length=60, max_obs_length=200, max_prompt_length=2000
)
GREEDY = SamplingConfig(max_new_tokens=60, temperature=0.0)
FOREVER = 10_000_000


def roll(
    engine: FunctionEngine,
    prompts: Sequence[Prompt],
    schedule: str = "async",
    environment: object = None,
    config: RolloutConfig = CONFIG,
    sampling: SamplingConfig = GREEDY,
    **limits: float,
) -> list[Trajectory]:
    environment = environment or SearchEnvironment(FakeRetriever(), encode, decode, EnvironmentConfig(), 200)
    settings = replace(config, schedule=schedule)
    manager = LLMGenerationManager(engine, environment, settings, AsyncLimits(**limits))  # type: ignore[arg-type]
    try:
        return manager.run_llm_loop(prompts, sampling)
    finally:
        manager.close()


def without_times(trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    for turn in (turn for trajectory in trajectories for turn in trajectory.turns):
        turn.observation = turn.observation and replace(turn.observation, seconds=0.0)
    return trajectories


def search_then_answer(context: str, seed: int) -> str:
    """Searches as often as the question has letters, says nothing valid once in between, and answers."""
    num_turns = context.count("</search>") + context.count("mumble")
    if num_turns == 1:
        return "mumble"
    return f"<search>{num_turns}{seed % 7}</search>" if num_turns < len(context.split(":")[0]) else "<answer>a</answer>"


def prompts_of(*texts: str) -> list[Prompt]:
    return [make_prompt(f"{text}:") for text in texts]


class StepEnvironment:
    """An environment with an `astep` given as a function."""

    stop = ("</search>", "</answer>")

    def __init__(self, astep: object) -> None:
        self.astep = astep

    def parse(self, completion: Completion) -> Action:
        return Action("answer" if "answer" in completion.text else "search", completion.text)


@pytest.mark.parametrize("engine_class", [FunctionEngine, AsyncEngine])
def test_lockstep_and_async_give_the_same_trajectories(engine_class: type[FunctionEngine]) -> None:
    prompts = prompts_of("", "a", "ab", "abc", "abcd", "ab", "x" * 500)
    lockstep = without_times(roll(engine_class(search_then_answer), prompts, "lockstep"))
    assert without_times(roll(engine_class(search_then_answer), prompts, "async")) == lockstep
    assert {trajectory.status for trajectory in lockstep} == {
        Status.ANSWERED,
        Status.OUT_OF_TURNS,
        Status.OUT_OF_TOKENS,
    }


def test_the_order_in_which_calls_return_changes_nothing() -> None:
    prompts = prompts_of(*["abc"] * 12)
    found = [
        without_times(roll(AsyncEngine(search_then_answer, moments), prompts))
        for moments in (lambda context, seed: seed % 50, lambda context, seed: 50 - seed % 50)
    ]
    assert found[0] == found[1]


def test_lockstep_and_async_agree_on_a_real_model() -> None:
    tokenizer = tiny_tokenizer()
    questions = [make_question(text) for text in ("who?", "where is ab from", "abc")]
    prompts = [Prompt(q, i, tuple(tokenizer.encode(f"Question: {q.text}"))) for i, q in enumerate(questions * 2)]
    environment = SearchEnvironment(
        FakeRetriever(), tokenizer.encode, lambda ids: tokenizer.decode(list(ids)), EnvironmentConfig(), 60
    )
    config = replace(CONFIG, max_response_length=12, max_prompt_length=250)

    def rolled(schedule: str) -> list[Trajectory]:
        return roll(HFEngine(tiny_model(), tokenizer), prompts, schedule, environment, config)  # type: ignore[arg-type]

    for one, other in zip(rolled("lockstep"), rolled("async"), strict=True):
        assert (one.response_ids, one.loss_mask, one.status) == (other.response_ids, other.loss_mask, other.status)
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_a_slow_search_holds_up_no_other_trajectory() -> None:
    """The search of "slow" returns only after "quick" has searched, read and answered: in lockstep, never."""
    answered = asyncio.Event()

    def respond(context: str, seed: int) -> str:
        if "found" not in context:
            return f"<search>{context}</search>"
        if context.startswith("quick"):
            answered.set()
        return "<answer>a</answer>"

    async def astep(action: Action, prompt: Prompt) -> Observation:
        if "slow" in action.content:
            await answered.wait()
        return Observation("found", tuple(encode("found")))

    found = roll(AsyncEngine(respond), prompts_of("slow", "quick"), environment=StepEnvironment(astep))
    assert [trajectory.status for trajectory in found] == [Status.ANSWERED] * 2


def test_generations_and_searches_in_flight_are_bounded() -> None:
    searching, most = 0, 0

    async def astep(action: Action, prompt: Prompt) -> Observation:
        nonlocal searching, most
        searching += 1
        most = max(most, searching)
        for _ in range(20):
            await asyncio.sleep(0)
        searching -= 1
        return Observation("o", (1,))

    engine = AsyncEngine(lambda context, seed: "<search>q</search>", lambda context, seed: 9)
    roll(engine, prompts_of(*"abcdefghijklmnop"), environment=StepEnvironment(astep), max_generations=5, max_searches=3)
    assert (engine.max_running, most) == (5, 3)


def test_a_completion_that_misses_its_deadline_voids_its_trajectory_alone() -> None:
    engine = AsyncEngine(
        lambda context, seed: "<answer>a</answer>", lambda context, seed: FOREVER if context.startswith("slow") else 1
    )
    config = replace(CONFIG, max_void_share=0.5)
    found = roll(engine, prompts_of("slow", "quick"), config=config, generation_timeout_s=0.05)
    assert [trajectory.status for trajectory in found] == [Status.VOID, Status.ANSWERED]
    assert "engine.timeout_s=0.05" in found[0].failure
    assert engine.running == 0


def test_a_search_that_misses_its_deadline_voids_its_trajectory_alone() -> None:
    async def astep(action: Action, prompt: Prompt) -> Observation:
        if action.content == "slow:":
            await asyncio.sleep(FOREVER)
        return Observation("answer", tuple(encode("answer")))

    config = replace(CONFIG, max_void_share=0.5)
    engine = AsyncEngine(lambda context, seed: context)
    environment = StepEnvironment(astep)
    found = roll(engine, prompts_of("slow", "q"), environment=environment, config=config, search_timeout_s=0.05)
    assert [trajectory.status for trajectory in found] == [Status.VOID, Status.ANSWERED]
    assert "within 0.05 s" in found[0].failure


@pytest.mark.parametrize("schedule", ["lockstep", "async"])
def test_a_lost_engine_voids_what_waited_for_it(schedule: str) -> None:
    def respond(context: str, seed: int) -> str:
        raise EngineLostError("engine 0 died")

    with pytest.raises(VoidLimitError, match=r"engine 0 died"):
        roll(AsyncEngine(respond), prompts_of("a", "b"), schedule)
    found = roll(AsyncEngine(respond), prompts_of("a", "b"), schedule, config=replace(CONFIG, max_void_share=1.0))
    assert [(t.status, t.failure, t.response_ids) for t in found] == [(Status.VOID, "engine 0 died", [])] * 2


def test_an_error_in_one_trajectory_cancels_all_others_and_is_the_one_raised() -> None:
    def respond(context: str, seed: int) -> str:
        raise EngineError("context 0 is empty")

    engine = AsyncEngine(respond, lambda context, seed: 3 if context.startswith("bad") else FOREVER)
    with pytest.raises(EngineError, match="context 0 is empty"):
        roll(engine, prompts_of("bad", "b", "c"))
    assert engine.max_running == 3
    assert engine.running == 0


def test_interrupting_the_caller_leaves_nothing_running() -> None:
    """Ctrl-C arrives in the main thread while it waits for the rollout."""

    def moments(context: str, seed: int) -> int:
        if context.startswith("last"):
            os.kill(os.getpid(), signal.SIGINT)
        return FOREVER

    threads = threading.active_count()
    engine = AsyncEngine(search_then_answer, moments)
    with pytest.raises(KeyboardInterrupt):
        roll(engine, prompts_of("a", "b", "last"))
    assert engine.max_running == 3
    assert engine.running == 0
    assert threading.active_count() == threads


def test_a_blocking_engine_is_called_once_at_a_time_with_all_that_wait() -> None:
    calls: list[int] = []
    busy = threading.Lock()

    class Blocking(FunctionEngine):
        def generate(
            self, contexts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
        ) -> list[Completion]:
            assert busy.acquire(blocking=False)
            calls.append(len(contexts))
            found = super().generate(contexts, sampling, seeds)
            busy.release()
            return found

    roll(Blocking(search_then_answer), prompts_of(*["abc"] * 6))
    assert calls[0] == 6
    assert sum(calls) == 6 * 4


def test_an_interrupted_blocking_engine_is_waited_for() -> None:
    ended: list[str] = []

    class Blocking(FunctionEngine):
        def generate(
            self, contexts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
        ) -> list[Completion]:
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(0.05)
            ended.append("engine")
            return super().generate(contexts, sampling, seeds)

    with pytest.raises(KeyboardInterrupt):
        roll(Blocking(search_then_answer), prompts_of("a"))
    assert ended == ["engine"]


def test_progress_counts_ended_trajectories() -> None:
    seen: list[tuple[int, int]] = []
    environment = SearchEnvironment(FakeRetriever(), encode, decode, EnvironmentConfig(), 200)
    manager = LLMGenerationManager(AsyncEngine(search_then_answer), environment, CONFIG)
    manager.run_llm_loop(prompts_of("", "a", "x" * 500), GREEDY, on_turn=lambda *counts: seen.append(counts))
    manager.close()
    assert seen[-1] == (3, 3)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_trajectory_that_begins_after_a_weight_sync_carries_the_new_version() -> None:
    environment = SearchEnvironment(FakeRetriever(), encode, decode, EnvironmentConfig(), 200)

    def respond(context: str, seed: int) -> str:
        if context.startswith("first"):
            manager.weights_changed(8)
        return "<answer>a</answer>"

    manager = LLMGenerationManager(AsyncEngine(respond), environment, CONFIG, AsyncLimits(max_generations=1))
    found = manager.run_llm_loop(prompts_of("first", "second"), GREEDY, policy_version=7)
    manager.close()
    assert [trajectory.policy_version for trajectory in found] == [7, 8]


def test_two_batches_roll_forward_at_the_same_time() -> None:
    """Each waits for the other to have begun."""
    begun = {"one": asyncio.Event(), "two": asyncio.Event()}

    async def astep(action: Action, prompt: Prompt) -> Observation:
        name = prompt.question.text.removesuffix(":")
        begun[name].set()
        await begun["two" if name == "one" else "one"].wait()
        return Observation("answer", tuple(encode("answer")))

    manager = LLMGenerationManager(AsyncEngine(lambda c, s: c), StepEnvironment(astep), CONFIG)  # type: ignore[arg-type]
    jobs = [manager.start(prompts_of(name), GREEDY) for name in begun]
    assert [job.result()[0].status for job in jobs] == [Status.ANSWERED] * 2
    manager.close()


def test_auto_is_async_where_the_engine_is() -> None:
    def calls(engine: FunctionEngine) -> int:
        roll(engine, prompts_of("ab", "ab"), "auto")
        return len(engine.contexts[0])

    assert calls(FunctionEngine(search_then_answer)) == 2
    assert calls(AsyncEngine(search_then_answer)) == 1
