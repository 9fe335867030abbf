from __future__ import annotations

from dataclasses import replace

import pytest

from search_r1.config import RewardConfig
from search_r1.rewards import REWARDS, metrics_of, resolve_reward, score
from search_r1.rollout.tool_calls import find_answer
from search_r1.types import Action, Observation, Status, Trajectory, Turn
from tests.fakes import answer_turn, decode, make_completion, make_prompt, make_trajectory, search_turn

OTHER_PASSAGE = "\n\n<information>Doc 1(Title: Lyon) Lyon is a city.\n</information>\n\n"
GOLDEN_PASSAGE = "\n\n<information>Doc 1(Title: France) Its capital is PARIS.\n</information>\n\n"
CORRECTION = "\n\nThat was no valid action about Paris.\n\n"
EXAMPLE_PROMPT = "For example, <answer> Beijing </answer>. Question: capital of China?"


def value(name: str, trajectory: Trajectory, **settings: float) -> float:
    return score(resolve_reward(RewardConfig(function=name, **settings)), trajectory)["reward"]


def well_formed(answer: str, observation: str = OTHER_PASSAGE) -> Trajectory:
    search = search_turn("capital", observation)
    turns = [
        replace(search, completion=make_completion("<think>hm</think>\n<search>capital</search>")),
        Turn(make_completion(f"<think>so</think>\n<answer>{answer}</answer>"), Action("answer", answer)),
    ]
    return make_trajectory(turns)


def sloppy(answer: str | None, observation: str = OTHER_PASSAGE) -> Trajectory:
    last = search_turn("more", None) if answer is None else answer_turn(answer)
    status = Status.OUT_OF_TURNS if answer is None else Status.ANSWERED
    return make_trajectory([search_turn("capital", observation), last], status)


def test_exact_match_rewards_by_hand() -> None:
    assert [value("em", sloppy(answer)) for answer in ("The Paris.", "Lyon", None)] == [1.0, 0.0, 0.0]
    assert [value("sub_em", sloppy(answer)) for answer in ("in Paris", "Lyon", None)] == [1.0, 0.0, 0.0]
    assert [value("f1", sloppy(answer)) for answer in ("Paris France", "Lyon", None)] == [pytest.approx(2 / 3), 0, 0]


@pytest.mark.parametrize("name", [name for name in REWARDS if name != "legacy_em"])
@pytest.mark.parametrize("turns", [[], [search_turn("capital", "<information><answer>Beijing</answer></information>")]])
def test_without_an_own_answer_neither_prompt_nor_passages_are_scored(name: str, turns: list[Turn]) -> None:
    """The prompt's example says Beijing, the passage says Beijing, and so does the golden answer: still 0."""
    prompt = make_prompt(EXAMPLE_PROMPT, golden_answers=["Beijing"])
    trajectory = make_trajectory(turns, Status.OUT_OF_TURNS, prompt)
    assert value(name, trajectory) == 0.0
    assert metrics_of(trajectory) == {"em": 0.0, "f1": 0.0, "sub_em": 0.0}


@pytest.mark.parametrize("name", [name for name in REWARDS if name != "legacy_em"])
def test_a_wrong_answer_is_not_saved_by_a_passage_that_answers(name: str) -> None:
    trajectory = sloppy("Lyon", "<information><answer>Paris</answer></information>")
    assert value(name, trajectory, format_score=0.0) == 0.0


SETTINGS = {"structure_score": 0.2, "format_score": 0.1, "retrieval_score": 0.05}


@pytest.mark.parametrize(
    "trajectory, expected",
    [
        (well_formed("Paris"), 1.0),
        (sloppy("Paris"), 0.8),
        (well_formed("Lyon", GOLDEN_PASSAGE), 0.25),
        (sloppy("Lyon", GOLDEN_PASSAGE), 0.1),
        (sloppy(None, GOLDEN_PASSAGE), 0.0),
        (well_formed("Lyon"), 0.2),
        (well_formed(""), 0.2),
        (sloppy("Lyon"), 0.1),
        (sloppy(""), 0.1),
        (sloppy(None), 0.0),
        (make_trajectory([], Status.OUT_OF_TOKENS), 0.0),
    ],
)
def test_em_format_follows_the_table(trajectory: Trajectory, expected: float) -> None:
    assert value("em_format", trajectory, **SETTINGS) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prompt", "text", "valid"),
    [
        ("Who?<assistant><think>\n", "hm</think>\n<answer>Paris</answer>", True),
        ("Who?<assistant><think>", "</think><answer>Paris</answer>", True),
        ("Who?<assistant><think>\n", "<think>hm</think><answer>Paris</answer>", True),
        ("Who?<assistant><think>\n", "hm</think>so</think><answer>Paris</answer>", False),
        ("Who?<assistant><think>\n", "hm <answer>Paris</answer>", False),
        ("Who?<assistant>", "hm</think>\n<answer>Paris</answer>", False),
        ("Who <think>?<assistant>", "hm</think>\n<answer>Paris</answer>", False),
        ("Who?<assistant><think>\n\n</think>\n\n", "hm</think>\n<answer>Paris</answer>", False),
    ],
)
def test_a_thought_counts_as_opened_only_where_the_prompt_ends_with_its_tag(
    prompt: str, text: str, valid: bool
) -> None:
    turn = Turn(make_completion(text), Action("answer", "Paris"))
    trajectory = make_trajectory([turn], prompt=make_prompt(prompt))
    for name in ("em_format", "recall_f1"):
        assert score(resolve_reward(RewardConfig(function=name), decode), trajectory)["valid_format"] == valid
    assert trajectory.turns == [turn]


def test_a_thought_of_a_later_turn_must_open_by_itself_whatever_the_prompt_ends_with() -> None:
    texts = ("hm</think><search>q</search>", "so</think><answer>Paris</answer>")
    turns = [
        replace(search_turn("q", OTHER_PASSAGE), completion=make_completion(texts[0])),
        Turn(make_completion(texts[1]), Action("answer", "Paris")),
    ]
    reward = resolve_reward(RewardConfig(function="em_format"), decode)
    assert score(reward, make_trajectory(turns, prompt=make_prompt("<think>")))["valid_format"] == 0.0


def test_retrieved_speaks_of_information_blocks_and_of_nothing_else() -> None:
    reward = resolve_reward(RewardConfig(function="em_format"))
    assert score(reward, well_formed("Lyon", GOLDEN_PASSAGE))["retrieved"] == 1.0
    assert score(reward, well_formed("Lyon", CORRECTION))["retrieved"] == 0.0
    assert score(reward, well_formed("in Paris perhaps", OTHER_PASSAGE))["retrieved"] == 0.0


def test_recall_f1_keeps_a_floor_for_the_format() -> None:
    assert value("recall_f1", well_formed("Paris France")) == pytest.approx(2 / 3)
    assert value("recall_f1", sloppy("Paris")) == 1.0
    assert value("recall_f1", well_formed("Lyon")) == pytest.approx(0.1)
    assert value("recall_f1", sloppy("Lyon")) == 0.0
    assert value("recall_f1", sloppy(None)) == 0.0


@pytest.mark.parametrize(
    "text, expected",
    [
        (r"So it is \boxed{Paris}.", 1.0),
        (r"First \boxed{Lyon}, rather \boxed{{Paris} France}", 2 / 3),
        ("<answer>Paris</answer>", 1.0),
        (r"\boxed{Lyon}", 0.1),
        ("Paris", 0.0),
        (r"\boxed{Paris", 0.0),
    ],
)
def test_recall_f1_reads_the_final_turn_of_a_tool_trajectory(text: str, expected: float) -> None:
    response = Observation(r"<tool_response>\boxed{Paris}</tool_response>", ())
    call = Turn(make_completion(r"<tool_call>{}</tool_call> \boxed{Paris}"), Action("tool_call", "{}"), response)
    answer = find_answer(text)
    last = Action("end") if answer is None else Action("final", answer)
    trajectory = make_trajectory([call, Turn(make_completion(text), last)])
    assert value("recall_f1", trajectory) == pytest.approx(expected)
    assert trajectory.answer == answer


@pytest.mark.parametrize("name", ["em", "recall_f1"])
def test_a_turn_penalty_is_taken_off_for_every_turn_that_was_answered(name: str) -> None:
    trajectory = make_trajectory([search_turn("q"), search_turn("q"), answer_turn("Paris")])
    assert value(name, trajectory, turn_penalty=0.25) == 0.5
    parts = score(resolve_reward(RewardConfig(function=name, turn_penalty=0.25)), trajectory)
    assert parts["turn_penalty"] == 0.5


def legacy_trajectory(prompt: str, *texts: str) -> Trajectory:
    turns = [Turn(make_completion(text), Action("invalid"), None) for text in texts]
    return make_trajectory(turns, prompt=make_prompt(prompt, golden_answers=["Paris"]))


@pytest.mark.parametrize(
    "prompt, texts, expected",
    [
        (EXAMPLE_PROMPT, ("<answer>\nParis </answer>",), 1.0),
        (EXAMPLE_PROMPT, ("<answer>Lyon</answer>", "<answer>Paris</answer>"), 1.0),
        (EXAMPLE_PROMPT, ("<answer>Paris</answer>", "<answer>Lyon</answer>"), 0.0),
        (EXAMPLE_PROMPT.replace("Beijing", "Paris"), ("no answer",), 0.0),
        ("no example", ("<answer>Paris</answer>",), 0.0),
        ("no example", ("<answer>x</answer><answer>Paris</answer>",), 1.0),
        ("<answer> and </answer>", ("<answer>Paris\nFrance</answer>",), 0.0),
    ],
)
def test_legacy_em_takes_the_last_of_at_least_two_answers(prompt: str, texts: tuple[str, ...], expected: float) -> None:
    assert value("legacy_em", legacy_trajectory(prompt, *texts)) == expected


def test_legacy_em_reads_observations_as_upstream_did() -> None:
    turn = search_turn("q", "<information><answer>Paris</answer></information>")
    trajectory = make_trajectory([turn], Status.OUT_OF_TURNS, make_prompt(EXAMPLE_PROMPT))
    assert value("legacy_em", trajectory) == 1.0


def test_legacy_em_normalises_ascii_only_as_upstream_did() -> None:
    turns = [Turn(make_completion("<answer>Paris。</answer>"), Action("answer", "Paris。"))]
    trajectory = make_trajectory(turns, prompt=make_prompt(EXAMPLE_PROMPT))
    assert (value("legacy_em", trajectory), value("em", trajectory)) == (0.0, 1.0)


def test_legacy_em_compares_answers_that_normalise_to_nothing_as_upstream_did() -> None:
    turns = [Turn(make_completion("<answer>the</answer>"), Action("answer", "the"))]
    trajectory = make_trajectory(turns, prompt=make_prompt(EXAMPLE_PROMPT, golden_answers=["A", "The"]))
    assert (value("legacy_em", trajectory), value("em", trajectory)) == (1.0, 0.0)


def test_validation_metrics_do_not_depend_on_the_training_reward() -> None:
    assert metrics_of(sloppy("Paris France")) == {"em": 0.0, "f1": pytest.approx(2 / 3), "sub_em": 1.0}
