from __future__ import annotations

import math
from dataclasses import replace

import pytest

from search_r1.rollout.metrics import rollout_metrics
from search_r1.types import Action, Status, Trajectory, Turn
from tests.fakes import answer_turn, make_completion, make_prompt, make_trajectory, search_turn


def timed_search(seconds: float, truncated: bool = False) -> Turn:
    turn = search_turn("q", "found")
    assert turn.observation is not None
    return replace(turn, observation=replace(turn.observation, seconds=seconds, truncated=truncated))


def invalid_turn() -> Turn:
    correction = search_turn("", "no")
    return Turn(make_completion("hm", "length"), Action("invalid"), correction.observation)


def test_metrics_of_a_batch_worked_by_hand() -> None:
    searched = make_trajectory([timed_search(0.1, truncated=True), answer_turn("a")], prompt=make_prompt("four"))
    wandered = make_trajectory([invalid_turn(), timed_search(0.3), search_turn("q", None)], Status.OUT_OF_TURNS)
    metrics = rollout_metrics([searched, wandered])
    # lengths in bytes: <search>q</search> and <answer>a</answer> 18, "found" 5, "hm" 2, "no" 2
    assert metrics == {
        "rollout/num_trajectories": 2.0,
        "rollout/num_void": 0.0,
        "rollout/turns": 2.5,
        "rollout/searches": 1.0,
        "rollout/valid_action_rate": 0.8,
        "rollout/invalid_action_rate": 0.2,
        "rollout/num_truncated_completions": 1.0,
        "rollout/num_truncated_observations": 1.0,
        "status/answered": 0.5,
        "status/out_of_turns": 0.5,
        "status/out_of_tokens": 0.0,
        "status/void": 0.0,
        "state_tokens/coverage": pytest.approx((36 + 38) / (41 + 45)),
        "length/prompt_mean": 4.0,
        "length/prompt_max": 4.0,
        "length/response_mean": 43.0,
        "length/response_max": 45.0,
        "length/sampled_mean": 37.0,
        "length/sampled_max": 38.0,
        "retrieval/p50_s": 0.1,
        "retrieval/p95_s": 0.3,
    }


def test_retrieval_percentiles_count_a_request_once_however_many_trajectories_share_it() -> None:
    shared = [make_trajectory([timed_search(9.0), answer_turn("a")]) for _ in range(50)]
    alone = [make_trajectory([timed_search(seconds / 100), answer_turn("a")]) for seconds in range(1, 100)]
    metrics = rollout_metrics(shared + alone)
    assert metrics["retrieval/p50_s"] == 0.5
    assert metrics["retrieval/p95_s"] == 0.95


def test_a_search_whose_passages_were_never_appended_is_not_counted_as_executed() -> None:
    metrics = rollout_metrics([make_trajectory([search_turn("q", None)], Status.OUT_OF_TOKENS)])
    assert metrics["rollout/searches"] == 0.0
    assert metrics["rollout/valid_action_rate"] == 1.0


def test_void_trajectories_are_counted_and_touch_no_other_metric() -> None:
    good = make_trajectory([timed_search(0.1), answer_turn("a")])
    void = make_trajectory([invalid_turn()] * 3, Status.VOID, failure="down")
    alone, beside = rollout_metrics([good]), rollout_metrics([good, void])
    counted = {"rollout/num_trajectories", "rollout/num_void", "status/answered", "status/void"}
    assert {name for name in alone if alone[name] != beside[name]} == counted
    assert (beside["rollout/num_void"], beside["status/void"]) == (1.0, 0.5)


@pytest.mark.parametrize("batch", [[], [make_trajectory([], Status.VOID)], [make_trajectory([], Status.OUT_OF_TOKENS)]])
def test_a_batch_without_turns_has_finite_metrics(batch: list[Trajectory]) -> None:
    assert all(math.isfinite(value) for value in rollout_metrics(batch).values())
