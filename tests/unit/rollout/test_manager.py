from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from search_r1.config import EnvironmentConfig, RolloutConfig
from search_r1.environments.search import SearchEnvironment
from search_r1.errors import VoidLimitError
from search_r1.rollout.manager import LLMGenerationManager, check_void_share
from search_r1.rollout.metrics import rollout_metrics
from search_r1.types import Passage, SamplingConfig, Status, Trajectory
from tests.fakes import (
    FakeRetriever,
    FunctionEngine,
    ScriptedEngine,
    answer_turn,
    decode,
    encode,
    make_prompt,
    make_trajectory,
    search_turn,
)
from tests.shared_data import json_lines

CONFIG = RolloutConfig(
    max_turns=2, max_start_length=4000, max_response_length=4000, max_obs_length=5000, max_prompt_length=40_000
)
SAMPLING = SamplingConfig(max_new_tokens=4000, temperature=1.0, seed=3)


def manager(engine: FunctionEngine, retriever: FakeRetriever, config: RolloutConfig = CONFIG) -> LLMGenerationManager:
    environment = SearchEnvironment(retriever, encode, decode, EnvironmentConfig(), config.max_obs_length)
    return LLMGenerationManager(engine, environment, config)


def run(
    *calls: Sequence[str], num_prompts: int = 1, config: RolloutConfig = CONFIG
) -> tuple[list[Trajectory], ScriptedEngine, FakeRetriever]:
    engine, retriever = ScriptedEngine(*calls), FakeRetriever()
    prompts = [make_prompt(f"Q{index}:") for index in range(num_prompts)]
    return manager(engine, retriever, config).run_llm_loop(prompts, SAMPLING), engine, retriever


def test_the_policy_searches_reads_and_answers() -> None:
    (trajectory,), engine, retriever = run(["<search>capital</search>"], ["<answer>Paris</answer>"])
    assert retriever.requests == [["capital"]]
    assert engine.contexts[1] == [
        "Q0:<search>capital</search>\n\n<information>Doc 1(Title: capital) echo</information>\n\n"
    ]
    sampled = [token for token, kept in zip(trajectory.response_ids, trajectory.loss_mask, strict=True) if kept]
    assert decode(sampled) == "<search>capital</search><answer>Paris</answer>"
    assert (trajectory.status, trajectory.answer) == (Status.ANSWERED, "Paris")


def test_finished_trajectories_leave_the_batch_and_order_is_kept() -> None:
    found, engine, _ = run(
        ["<answer>a</answer>", "<search>q</search>", "<search>r</search>"],
        ["<search>s</search>", "<answer>c</answer>"],
        ["<answer>b</answer>"],
        num_prompts=3,
    )
    assert [len(contexts) for contexts in engine.contexts] == [3, 2, 1]
    assert [trajectory.answer for trajectory in found] == ["a", "b", "c"]
    assert [trajectory.prompt.question.text for trajectory in found] == ["Q0:", "Q1:", "Q2:"]


def test_all_searches_of_a_turn_make_one_request() -> None:
    _, _, retriever = run(
        ["<search>q</search>", "nothing", "<search>r</search>"], ["<answer>a</answer>"] * 3, num_prompts=3
    )
    assert retriever.requests == [["q", "r"]]


def test_the_search_of_the_last_turn_is_neither_executed_nor_counted_as_executed() -> None:
    (trajectory,), engine, retriever = run(*[[f"<search>{turn}</search>"] for turn in range(3)])
    assert retriever.requests == [["0"], ["1"]]
    assert len(engine.contexts) == 3
    assert trajectory.status is Status.OUT_OF_TURNS
    assert trajectory.loss_mask[-1]
    assert rollout_metrics([trajectory])["rollout/searches"] == 2.0


def test_with_no_action_turns_there_is_one_generation_and_no_search() -> None:
    (trajectory,), _, retriever = run(["<search>q</search>"], config=replace(CONFIG, max_turns=0))
    assert retriever.requests == []
    assert trajectory.status is Status.OUT_OF_TURNS


def test_one_malformed_turn_is_corrected_and_the_trajectory_goes_on() -> None:
    (trajectory,), engine, retriever = run(["<search>unclosed"], ["<answer>Paris</answer>"])
    assert retriever.requests == []
    assert "no valid action" in engine.contexts[1][0]
    assert trajectory.answer == "Paris"


def test_sampling_options_reach_the_engine_with_the_stop_strings_of_the_environment() -> None:
    engine = ScriptedEngine(["<search>q</search>"], ["<answer>a</answer>"])
    greedy = replace(SAMPLING, temperature=0.0, top_p=0.9, stop=("ignored",))
    manager(engine, FakeRetriever()).run_llm_loop([make_prompt()], greedy)
    assert engine.samplings == [replace(greedy, stop=("</search>", "</answer>"))] * 2


def test_two_rollouts_with_one_seed_are_identical_and_siblings_differ() -> None:
    def respond(context: str, seed: int) -> str:
        return f"<search>{seed}</search>" if context.count("<search>") < 2 else f"<answer>{seed}</answer>"

    def roll(seed: int) -> list[str]:
        prompts = [make_prompt("same")] * 4
        found = manager(FunctionEngine(respond), FakeRetriever()).run_llm_loop(prompts, replace(SAMPLING, seed=seed))
        return [decode(trajectory.response_ids) for trajectory in found]

    assert roll(1) == roll(1)
    assert roll(1) != roll(2)
    assert len(set(roll(1))) == 4


def test_a_row_short_of_room_gets_less_and_its_batch_mates_do_not() -> None:
    config = replace(CONFIG, max_prompt_length=120, max_response_length=50, max_start_length=100)
    engine = FunctionEngine(lambda context, seed: "z" * 200)
    prompts = [make_prompt("b"), make_prompt("a" * 100), make_prompt("c")]
    found = manager(engine, FakeRetriever(), replace(config, max_turns=0)).run_llm_loop(prompts, SAMPLING)
    assert [len(trajectory.response_ids) for trajectory in found] == [50, 20, 50]
    assert sorted((s.max_new_tokens, len(c)) for s, c in zip(engine.samplings, engine.contexts, strict=True)) == [
        (20, 1),
        (50, 2),
    ]
    assert [trajectory.status for trajectory in found] == [
        Status.OUT_OF_TURNS,
        Status.OUT_OF_TOKENS,
        Status.OUT_OF_TURNS,
    ]


def test_an_overlong_prompt_is_neither_cut_nor_sampled() -> None:
    engine = ScriptedEngine(["<answer>a</answer>"])
    prompts = [make_prompt("x" * 4001), make_prompt("short")]
    found = manager(engine, FakeRetriever()).run_llm_loop(prompts, SAMPLING)
    assert engine.contexts == [["short"]]
    assert [trajectory.status for trajectory in found] == [Status.OUT_OF_TOKENS, Status.ANSWERED]
    assert found[0].response_ids == []


def test_no_prompts_need_no_engine() -> None:
    assert run(num_prompts=0)[0] == []


def test_the_policy_version_is_written_on_every_trajectory() -> None:
    found = manager(ScriptedEngine(["<answer>a</answer>"]), FakeRetriever()).run_llm_loop([make_prompt()], SAMPLING, 5)
    assert found[0].policy_version == 5


def test_progress_counts_finished_trajectories_after_every_turn() -> None:
    seen: list[tuple[int, int]] = []
    engine = ScriptedEngine(["<answer>a</answer>", "<search>q</search>"], ["<answer>b</answer>"])
    prompts = [make_prompt("a"), make_prompt("b")]
    manager(engine, FakeRetriever()).run_llm_loop(prompts, SAMPLING, on_turn=lambda *counts: seen.append(counts))
    assert seen == [(1, 2), (2, 2)]


def test_a_dead_retriever_voids_what_searched_and_spares_what_answered() -> None:
    engine = ScriptedEngine(["<search>q</search>", "<answer>a</answer>"])
    found = manager(
        engine, FakeRetriever(error="connection refused"), replace(CONFIG, max_void_share=0.5)
    ).run_llm_loop([make_prompt("a"), make_prompt("b")], SAMPLING)
    assert [trajectory.status for trajectory in found] == [Status.VOID, Status.ANSWERED]
    assert found[0].failure == "connection refused"


def test_too_many_voids_stop_the_step_at_once_and_name_the_cause() -> None:
    engine = ScriptedEngine(["<search>q</search>", "bad", "bad"])
    dead = manager(engine, FakeRetriever(error="connection refused"))
    with pytest.raises(VoidLimitError, match=r"1 of 3 .*max_void_share=0\.1.*connection refused"):
        dead.run_llm_loop([make_prompt(text) for text in "abc"], SAMPLING)


def test_the_void_limit_names_the_commonest_cause() -> None:
    void = [make_trajectory([], Status.VOID, failure=cause) for cause in ("timeout", "500", "timeout")]
    with pytest.raises(VoidLimitError, match=r"commonest cause \(2 of 3\): timeout"):
        check_void_share([*void, make_trajectory([answer_turn("a")])], 0.5)
    check_void_share([*void, make_trajectory([search_turn("q")])], 0.75)


def test_real_rollouts_replayed_train_on_exactly_what_their_policy_wrote() -> None:
    """Each turn of a published rollout is sampled again, with the passages it once got."""
    block = re.compile(r"\n\n<information>(.*?)</information>\n\n", re.DOTALL)
    for number, row in enumerate(json_lines("traces/wellformed.jsonl")[::6]):
        turns, texts = block.split(row["response"])[::2], iter(block.findall(row["response"]))
        engine = ScriptedEngine(*[[turn] for turn in turns])
        retriever = FakeRetriever(lambda query, texts=texts: [Passage("real", next(texts))])  # type: ignore[misc]
        roomy = replace(CONFIG, max_turns=8)
        (trajectory,) = manager(engine, retriever, roomy).run_llm_loop([make_prompt(f"Q{number}")], SAMPLING)
        sampled = [token for token, kept in zip(trajectory.response_ids, trajectory.loss_mask, strict=True) if kept]
        assert decode(sampled) == "".join(turns)
        assert len(retriever.requests) == len(turns) - 1
        assert trajectory.status is Status.ANSWERED
        assert trajectory.answer is not None
        assert trajectory.answer in turns[-1]
