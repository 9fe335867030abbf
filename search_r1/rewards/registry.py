"""From a configured name to a reward, and from a reward to numbers."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Protocol

from search_r1.config import RewardConfig
from search_r1.errors import ConfigError, SearchR1Error
from search_r1.protocols import Reward
from search_r1.rewards import functions
from search_r1.types import Trajectory

_OPEN, _OPEN_TOKENS = "<think>", 16
"""A byte-level tokenizer needs no more for the tag and the line break after it."""


class BuiltInReward(Protocol):
    def __call__(self, trajectory: Trajectory, config: RewardConfig) -> float | Mapping[str, float]: ...


REWARDS: dict[str, BuiltInReward] = {
    "em": functions.em_reward,
    "sub_em": functions.sub_em_reward,
    "f1": functions.f1_reward,
    "em_format": functions.em_format,
    "recall_f1": functions.recall_f1,
    "legacy_em": functions.legacy_em,
}
"""Every built-in reward by its name. Each serves questions of any data source."""


def resolve_reward(config: RewardConfig, decode: Callable[[Sequence[int]], str] | None = None) -> Reward:
    """The reward that `reward.function` names: one of `REWARDS`, or a user's `package.module:name`.

    Args:
        config: the reward's settings.
        decode: token ids to text, for built-in rewards to see a thought that the chat template has opened.

    Raises:
        ConfigError: for an unknown name (the nearest is suggested), a module that does not import, or a name in it
            that is missing or cannot be called.
    """
    reward = _resolve(config)
    if decode is not None and ":" not in config.function:
        reward = partial(_with_opened_thought, reward, decode)
    return partial(_with_turn_penalty, reward, config.turn_penalty) if config.turn_penalty else reward


def _with_opened_thought(
    reward: Reward, decode: Callable[[Sequence[int]], str], trajectory: Trajectory
) -> float | Mapping[str, float]:
    """The reward, where a first turn closes a thought that it did not open and the prompt ends with its `<think>`, of
    the trajectory with that tag before the turn."""
    text = trajectory.turns[0].completion.text if trajectory.turns else ""
    thought, end, _ = text.partition("</think>")
    if end and _OPEN not in thought and decode(trajectory.prompt.token_ids[-_OPEN_TOKENS:]).rstrip().endswith(_OPEN):
        first, *others = trajectory.turns
        first = replace(first, completion=replace(first.completion, text=_OPEN + text))
        trajectory = replace(trajectory, turns=[first, *others])
    return reward(trajectory)


def _with_turn_penalty(reward: Reward, penalty: float, trajectory: Trajectory) -> dict[str, float]:
    """The reward less `penalty` for every turn that the environment answered."""
    parts = score(reward, trajectory)
    lost = penalty * sum(turn.observation is not None for turn in trajectory.turns)
    return parts | {"reward": parts["reward"] - lost, "turn_penalty": lost}


def _resolve(config: RewardConfig) -> Reward:
    if ":" in config.function:
        return _load(config.function)
    if config.function not in REWARDS:
        near = difflib.get_close_matches(config.function, REWARDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"reward.function={config.function} is unknown: {hint}There are {', '.join(REWARDS)}, "
            "or your own as package.module:function"
        )
    return partial(REWARDS[config.function], config=config)


def _load(path: str) -> Reward:
    module_name, _, name = path.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"reward.function={path}: module {module_name!r} does not import ({type(error).__name__}: {error}); "
            "it must be installed or on PYTHONPATH"
        ) from error
    function = getattr(module, name, None)
    if function is None:
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"reward.function={path}: {module_name} has no {name!r}{hint}")
    if not callable(function):
        raise ConfigError(f"reward.function={path} is a {type(function).__name__}, not a function of a trajectory")
    return partial(_call_users, function, path)


def _call_users(function: Reward, path: str, trajectory: Trajectory) -> float | Mapping[str, float]:
    """A user's reward, whose exceptions say where they come from."""
    try:
        return function(trajectory)
    except SearchR1Error:
        raise
    except Exception as error:
        question = trajectory.prompt.question
        raise ConfigError(
            f"reward.function={path} failed on {question.question_id} ({question.text[:80]!r}): "
            f"{type(error).__name__}: {error}; it is called with a trajectory (search_r1.types)"
        ) from error


def score(reward: Reward, trajectory: Trajectory) -> dict[str, float]:
    """Apply a reward and bring its result into one shape: `reward` and the parts it is made of, all finite floats.

    Raises:
        ConfigError: where the reward function returns something else; the message names the question.
    """
    result = reward(trajectory)
    question_id = trajectory.prompt.question.question_id
    parts = dict(result) if isinstance(result, Mapping) else {"reward": result}
    if "reward" not in parts:
        raise ConfigError(f"reward.function returned {sorted(parts)} for {question_id}: the key 'reward' is missing")
    try:
        numbers = {str(name): float(value) for name, value in parts.items()}
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"reward.function returned {result!r} for {question_id}: it must be a number or a mapping of numbers"
        ) from error
    bad = {name: value for name, value in numbers.items() if not math.isfinite(value)}
    if bad:
        raise ConfigError(f"reward.function returned {bad} for {question_id}: rewards must be finite")
    return numbers
