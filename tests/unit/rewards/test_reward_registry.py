from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from search_r1.config import RewardConfig
from search_r1.errors import ConfigError, ToolUnavailableError
from search_r1.rewards import REWARDS, resolve_reward, score
from search_r1.types import Prompt
from tests.fakes import answer_turn, make_prompt, make_question, make_trajectory

TRAJECTORY = make_trajectory([answer_turn("Paris")])


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes an importable module and returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source: str) -> str:
        name = f"user_rewards_{abs(hash(source))}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_every_built_in_reward_resolves_and_scores_any_data_source(name: str) -> None:
    reward = resolve_reward(RewardConfig(function=name))
    for source in ("nq", "a source nobody knows"):
        prompt = Prompt(make_question(data_source=source), 0, ())
        assert math.isfinite(score(reward, make_trajectory([answer_turn("Paris")], prompt=prompt))["reward"])


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"reward.function=em_fromat is unknown: did you mean em_format\?"):
        resolve_reward(RewardConfig(function="em_fromat"))


def test_a_user_function_is_loaded_by_path_and_may_return_parts(user_module: Callable[[str], str]) -> None:
    name = user_module("def brevity(trajectory):\n    return {'reward': 0.5, 'turns': len(trajectory.turns)}\n")
    assert score(resolve_reward(RewardConfig(function=f"{name}:brevity")), TRAJECTORY) == {"reward": 0.5, "turns": 1.0}


@pytest.mark.parametrize(
    "source, name, message",
    [
        ("def brevity(t): ...", "brevty", "did you mean brevity"),
        ("brevity = 3", "brevity", "int, not a function"),
        ("import a_package_nobody_has", "f", "ModuleNotFoundError"),
        ("1 / 0", "f", "ZeroDivisionError"),
        ("def f(:", "f", "SyntaxError"),
    ],
)
def test_a_user_function_that_cannot_be_had_is_named_with_its_cause(
    user_module: Callable[[str], str], source: str, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_reward(RewardConfig(function=f"{user_module(source)}:{name}"))


@pytest.mark.parametrize("path", ["no_such_module_at_all:f", ":f", "math:", "..relative:f"])
def test_a_path_that_leads_nowhere_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"reward\.function="):
        resolve_reward(RewardConfig(function=path))


@pytest.mark.parametrize("result", [math.nan, math.inf, None, "high", {"em": 1.0}, {"reward": math.nan}, [1.0, 2.0]])
def test_a_reward_that_is_no_finite_number_is_refused_with_its_question(result: Any) -> None:
    with pytest.raises(ConfigError, match="nq/test/Who"):
        score(lambda trajectory: result, TRAJECTORY)


@pytest.mark.parametrize("result", [1, True, 0.5, {"reward": 1}])
def test_numbers_of_any_kind_become_floats(result: Any) -> None:
    found = score(lambda trajectory: result, make_trajectory([], prompt=make_prompt()))
    assert found == {"reward": float(result["reward"] if isinstance(result, dict) else result)}
    assert isinstance(found["reward"], float)


def test_an_exception_in_a_user_function_names_the_function_and_the_question() -> None:
    with pytest.raises(ConfigError, match=r"=json:loads failed on nq/test/Who\? \('Who\?'\): TypeError"):
        score(resolve_reward(RewardConfig(function="json:loads")), TRAJECTORY)


def test_an_error_that_a_user_function_raises_on_purpose_stays_as_it_is(user_module: Callable[[str], str]) -> None:
    name = user_module(
        "from search_r1.errors import ToolUnavailableError\n"
        "def judged(trajectory):\n    raise ToolUnavailableError('the judge is down')\n"
    )
    with pytest.raises(ToolUnavailableError, match="the judge is down"):
        score(resolve_reward(RewardConfig(function=f"{name}:judged", turn_penalty=0.1)), TRAJECTORY)
