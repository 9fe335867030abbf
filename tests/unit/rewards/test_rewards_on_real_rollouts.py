from __future__ import annotations

import re
from typing import Any

import pytest

from search_r1.config import RewardConfig
from search_r1.rewards import metrics_of, resolve_reward, score
from search_r1.rewards.format import is_valid_format
from search_r1.types import Action, Observation, Trajectory, Turn
from tests.fakes import make_completion, make_prompt, make_trajectory
from tests.shared_data import json_lines

_OBSERVATION = re.compile(r"(\s*<information>.*?</information>\s*)", re.DOTALL)
_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


def to_trajectory(row: dict[str, Any]) -> Trajectory:
    """Cut a recorded response at its observations into turns."""
    turns = []
    pieces = _OBSERVATION.split(row["response"])
    for text, observed in zip(pieces[::2], [*pieces[1::2], None], strict=True):
        found = _ACTION.search(text)
        action = Action(found[1], found[2]) if found else Action("invalid")  # type: ignore[arg-type]
        turns.append(Turn(make_completion(text), action, None if observed is None else Observation(observed, ())))
    return make_trajectory(turns, prompt=make_prompt(row["question"], golden_answers=row["golden_answers"]))


def strip_blocks(response: str) -> str:
    """An independent reading of the format: remove valid blocks from the front until nothing is left."""
    inner = r"(?:(?!</?(?:think|search|information|answer)>).)*"
    names = ("think", "search", "information", "answer")
    think, search, information, answer = (rf"\s*<{name}>{inner}</{name}>\s*" for name in names)
    response = re.sub(f"^{think}", "", response, count=1, flags=re.DOTALL)
    while match := re.match(search + information + think, response, re.DOTALL):
        response = response[match.end() :]
    return re.sub(f"^{answer}$", "", response, flags=re.DOTALL)


def test_right_rollouts_score_one() -> None:
    rows = json_lines("traces/wellformed.jsonl")
    assert len(rows) == 180
    for row in rows:
        assert metrics_of(to_trajectory(row)) == {"em": 1.0, "f1": 1.0, "sub_em": 1.0}, row["question"]


@pytest.mark.parametrize("name", ["traces/wellformed.jsonl", "traces/malformed.jsonl"])
def test_validity_agrees_with_an_independent_reading(name: str) -> None:
    for row in json_lines(name):
        starts_well = re.match(r"\s*<think>", row["response"]) is not None
        assert is_valid_format(to_trajectory(row)) == (starts_well and strip_blocks(row["response"]) == ""), row


def test_balanced_rollouts_split_into_strict_and_loose_ones() -> None:
    """Balanced tags are not enough: 85 of 180 think inside their tags at every turn, the others write around them."""
    rewards = [
        score(resolve_reward(RewardConfig("em_format")), to_trajectory(r))
        for r in json_lines("traces/wellformed.jsonl")
    ]
    assert sum(r["valid_format"] for r in rewards) == 85
    assert sorted({r["reward"] for r in rewards}) == [0.8, 1.0]


def test_malformed_rollouts_are_valid_only_where_tags_balance_and_an_answer_ends_them() -> None:
    """Seven think once and answer without a search: the grammar allows it."""
    valid = [row["response"] for row in json_lines("traces/malformed.jsonl") if is_valid_format(to_trajectory(row))]
    assert len(valid) == 7
    assert not any("<search>" in response for response in valid)
