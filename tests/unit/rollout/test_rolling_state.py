from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.config import RolloutConfig
from search_r1.rollout.rolling_state import RollingState, turn_seed
from search_r1.types import Action, Observation, SamplingConfig, Status
from tests.fakes import EOS_ID, EOS_TEXT, encode, make_completion, make_prompt

CONFIG = RolloutConfig(
    max_turns=2, max_start_length=40, max_response_length=30, max_obs_length=30, max_prompt_length=200
)
SAMPLING = SamplingConfig(max_new_tokens=30, stop=("</search>", "</answer>"), seed=7)
SEARCH, INVALID = Action("search", "q"), Action("invalid")


def observation(text: str, failure: str = "") -> Observation:
    return Observation(text, tuple(encode(text)), failure=failure)


def state_of(*prompts: str, config: RolloutConfig = CONFIG) -> RollingState:
    return RollingState([make_prompt(text) for text in prompts], config, SAMPLING)


def test_a_token_is_trained_exactly_where_it_was_sampled() -> None:
    state = state_of("Q:")
    state.append_completion(0, make_completion("<search>q</search>"), SEARCH)
    state.append_observation(0, observation("found"))
    state.append_completion(0, make_completion("<answer>a</answer>"), Action("answer", "a"))
    (trajectory,) = state.trajectories
    assert bytes(trajectory.response_ids).decode() == "<search>q</search>found<answer>a</answer>"
    assert trajectory.loss_mask == [True] * 18 + [False] * 5 + [True] * 18
    assert trajectory.log_probs[:18] == list(make_completion("<search>q</search>").log_probs)
    assert trajectory.log_probs[18:23] == [0.0] * 5
    assert trajectory.status is Status.ANSWERED
    assert trajectory.answer == "a"


def test_an_end_of_text_token_sampled_after_the_answer_is_trained() -> None:
    state = state_of("Q:")
    state.append_completion(0, make_completion("<answer>a</answer>" + EOS_TEXT), Action("answer", "a"))
    assert state.trajectories[0].response_ids[-1] == EOS_ID
    assert state.trajectories[0].loss_mask[-1]


def test_a_pad_token_in_an_observation_stays_in_its_place_unsampled() -> None:
    state = state_of("Q:")
    state.append_completion(0, make_completion("x" + EOS_TEXT), INVALID)
    state.append_observation(0, Observation("", (EOS_ID, 65, EOS_ID)))
    assert state.trajectories[0].response_ids == [120, EOS_ID, EOS_ID, 65, EOS_ID]
    assert state.trajectories[0].loss_mask == [True, True, False, False, False]


def test_the_context_is_the_whole_prompt_and_response_uncut() -> None:
    state = state_of("Question A", "B")
    state.append_completion(0, make_completion("<search>q</search>"), SEARCH)
    state.append_observation(0, observation("found"))
    assert state.request(0).context == encode("Question A<search>q</search>found")
    assert state.request(1).context == encode("B")


def test_a_prompt_above_the_limit_ends_out_of_tokens_uncut_and_unsampled() -> None:
    state = state_of("x" * 40, "x" * 41)
    assert [t.status for t in state.trajectories] == [Status.RUNNING, Status.OUT_OF_TOKENS]
    assert len(state.trajectories[1].prompt.token_ids) == 41
    assert state.trajectories[1].response_ids == []
    assert state.active == [0]


def test_a_prompt_that_fills_the_context_budget_ends_out_of_tokens() -> None:
    config = replace(CONFIG, max_prompt_length=10)
    assert [t.status for t in state_of("x" * 9, "x" * 10, config=config).trajectories] == [
        Status.RUNNING,
        Status.OUT_OF_TOKENS,
    ]


def test_an_observation_fits_if_one_more_token_can_be_sampled_after_it() -> None:
    statuses = []
    for length in (9, 10, 11):
        state = state_of("x" * 10, config=replace(CONFIG, max_prompt_length=38))
        state.append_completion(0, make_completion("<search>q</search>"), SEARCH)
        assert state.room(0) == 10
        state.append_observation(0, observation("o" * length))
        statuses.append(state.trajectories[0].status)
    assert statuses == [Status.RUNNING, Status.OUT_OF_TOKENS, Status.OUT_OF_TOKENS]


def test_an_observation_that_does_not_fit_is_left_out_and_the_sampled_tokens_stay() -> None:
    state = state_of("x" * 10, config=replace(CONFIG, max_prompt_length=38))
    state.append_completion(0, make_completion("<search>q</search>"), SEARCH)
    state.append_observation(0, observation("o" * 20))
    (trajectory,) = state.trajectories
    assert bytes(trajectory.response_ids).decode() == "<search>q</search>"
    assert all(trajectory.loss_mask)
    assert trajectory.turns[0].observation is None


def test_a_turn_may_sample_no_more_than_the_room_that_is_left() -> None:
    state = state_of("x" * 10, "x" * 30, config=replace(CONFIG, max_prompt_length=55))
    assert [state.request(index).sampling.max_new_tokens for index in state.active] == [30, 25]


def test_a_turn_that_fills_the_context_ends_out_of_tokens_unless_it_answers() -> None:
    config = replace(CONFIG, max_prompt_length=28)
    state = state_of("x" * 10, "y" * 10, config=config)
    state.append_completion(0, make_completion("<search>q</search>"), SEARCH)
    state.append_completion(1, make_completion("<answer>a</answer>"), Action("answer", "a"))
    assert [t.status for t in state.trajectories] == [Status.OUT_OF_TOKENS, Status.ANSWERED]


def test_the_generation_after_the_last_action_turn_ends_the_trajectory() -> None:
    state = state_of("Q:")
    for _ in range(CONFIG.max_turns):
        state.append_completion(0, make_completion("<search>q</search>"), SEARCH)
        assert state.active == [0]
        state.append_observation(0, observation("found"))
    state.append_completion(0, make_completion("<search>q</search>"), SEARCH)
    assert state.trajectories[0].status is Status.OUT_OF_TURNS


def test_a_turn_without_tool_calls_ends_a_tool_trajectory() -> None:
    state = state_of("Q:")
    state.append_completion(0, make_completion("done"), Action("final", "done"))
    assert state.trajectories[0].status is Status.ANSWERED


@pytest.mark.parametrize("end_on_eos, status", [(False, Status.RUNNING), (True, Status.OUT_OF_TURNS)])
def test_end_of_text_without_an_action_is_an_invalid_turn_or_the_end_as_configured(
    end_on_eos: bool, status: Status
) -> None:
    state = state_of("Q:", config=replace(CONFIG, end_on_eos=end_on_eos))
    state.append_completion(0, make_completion("hm" + EOS_TEXT), INVALID)
    assert state.trajectories[0].status is status
    assert state.trajectories[0].response_ids[-1] == EOS_ID


@pytest.mark.parametrize("text, reason", [("stray </search>", "stop"), ("too long", "length")])
def test_only_the_end_of_text_token_counts_as_giving_up(text: str, reason: str) -> None:
    state = state_of("Q:", config=replace(CONFIG, end_on_eos=True))
    state.append_completion(0, make_completion(text, reason), INVALID)  # type: ignore[arg-type]
    assert state.trajectories[0].status is Status.RUNNING


def test_a_failed_observation_voids_the_trajectory_and_appends_nothing() -> None:
    state = state_of("Q:", "R:")
    for index in state.active:
        state.append_completion(index, make_completion("<search>q</search>"), SEARCH)
    state.append_observation(0, observation("Internal Server Error", failure="retriever: 500"))
    state.append_observation(1, observation("found"))
    assert [t.status for t in state.trajectories] == [Status.VOID, Status.RUNNING]
    assert state.trajectories[0].failure == "retriever: 500"
    assert all(state.trajectories[0].loss_mask)
    assert state.active == [1]


def test_seeds_differ_between_rows_turns_and_runs_and_never_depend_on_batch_mates() -> None:
    seeds = {turn_seed(seed, index, turn) for seed in range(3) for index in range(20) for turn in range(3)}
    assert len(seeds) == 180
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert state_of("Q:", "R:").request(0).seed == state_of("Q:").request(0).seed == turn_seed(7, 0, 0)


def test_more_sampled_tokens_than_the_room_are_our_error() -> None:
    state = state_of("x" * 10, config=replace(CONFIG, max_prompt_length=15))
    with pytest.raises(AssertionError, match="6 sampled tokens in a room of 5"):
        state.append_completion(0, make_completion("abcdef"), INVALID)


@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=12)), max_size=6), st.integers(1, 80))
def test_the_response_is_always_its_turns_and_observations_in_a_row(script: list[tuple[str, str]], budget: int) -> None:
    state = state_of("Q:", config=replace(CONFIG, max_prompt_length=budget, max_turns=3))
    for sampled, observed in script:
        if not state.active or len(encode(sampled)) > state.room(0):
            break
        state.append_completion(0, make_completion(sampled), INVALID)
        if state.active:
            state.append_observation(0, observation(observed))
    (trajectory,) = state.trajectories
    ids, mask = [], []
    for turn in trajectory.turns:
        ids += turn.completion.token_ids
        mask += [True] * len(turn.completion.token_ids)
        if turn.observation:
            ids += turn.observation.token_ids
            mask += [False] * len(turn.observation.token_ids)
    assert (trajectory.response_ids, trajectory.loss_mask) == (ids, mask)
    assert len(trajectory.log_probs) == len(ids)
    assert len(trajectory.context_ids) <= max(budget, 2)
