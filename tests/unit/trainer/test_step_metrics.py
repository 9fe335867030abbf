"""What a step says of its rewards and groups."""

from __future__ import annotations

import pytest

from search_r1.config import RewardConfig
from search_r1.rewards import resolve_reward, score
from search_r1.trainer.step import group_metrics, reward_metrics
from search_r1.types import Trajectory
from tests.fakes import answer_turn, make_prompt, make_trajectory, search_turn


def group(group_id: int, *answers: str, searches: int = 0) -> list[Trajectory]:
    turns = [search_turn("q")] * searches
    return [make_trajectory([*turns, answer_turn(a)], prompt=make_prompt(group_id=group_id)) for a in answers]


@pytest.mark.parametrize(
    "config",
    [
        RewardConfig("em"),
        RewardConfig("em", turn_penalty=0.1),
        RewardConfig("f1"),
        RewardConfig("em_format", format_score=0.2),
        RewardConfig("recall_f1", format_score=0.2),
    ],
)
def test_a_group_is_all_right_by_its_answers_and_not_by_partial_credit(config: RewardConfig) -> None:
    right, wrong, mixed = group(0, "Paris", "Paris", searches=1), group(1, "Rome", "Rome"), group(2, "Paris", "Rome")
    reward = resolve_reward(config)
    metrics = group_metrics([(t, score(reward, t)) for t in [*right, *wrong, *mixed]])
    assert metrics == {"groups/all_right_share": pytest.approx(1 / 3), "groups/all_wrong_share": pytest.approx(1 / 3)}


def test_a_full_reward_is_right_where_exact_match_is_not_what_is_asked() -> None:
    metrics = group_metrics([(t, {"reward": 1.0}) for t in group(0, "2 * 21", "42.0")])
    assert metrics["groups/all_right_share"] == 1.0


def test_parts_named_like_the_reward_s_own_statistics_stand_beside_them() -> None:
    metrics = reward_metrics(
        [{"reward": 1.0, "mean": 5.0, "length": 3.0}, {}, {"reward": 0.0, "mean": 7.0, "max": 2.0}]
    )
    assert metrics == {
        "reward/mean": 0.5,
        "reward/max": 1.0,
        "reward/min": 0.0,
        "reward/length": 1.5,
        "reward/part_mean": 6.0,
        "reward/part_max": 1.0,
    }
