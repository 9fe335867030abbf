"""The built-in rewards: functions of a trajectory and the reward's configuration.

They read what the policy itself sampled, never the prompt nor what the retriever returned; the two exceptions,
`legacy_em` and the retrieval part of `em_format`, are so by definition and say it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from search_r1.config import RewardConfig
from search_r1.rewards.exact_match import TextScore, em, f1, sub_em
from search_r1.rewards.format import information_texts, is_valid_format
from search_r1.rewards.normalize import squad_normalize
from search_r1.types import Trajectory

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def em_reward(trajectory: Trajectory, config: RewardConfig) -> float:
    """Exact match of the final answer; 0 without one."""
    return _score(em, trajectory.answer, trajectory)


def sub_em_reward(trajectory: Trajectory, config: RewardConfig) -> float:
    """1 where a golden answer is part of the final answer."""
    return _score(sub_em, trajectory.answer, trajectory)


def f1_reward(trajectory: Trajectory, config: RewardConfig) -> float:
    """Word F1 of the final answer."""
    return _score(f1, trajectory.answer, trajectory)


def em_format(trajectory: Trajectory, config: RewardConfig) -> Mapping[str, float]:
    """Exact match with credit for form (s structure, f final, r retrieval score).

                                               format valid    format invalid
        answer right                           1               1 - s
        wrong or none, golden answer retrieved s + r           f if there is an answer, else 0
        wrong or none, not retrieved           s               f if there is an answer, else 0

    Retrieved means: a golden answer stands in the text of an information block.
    """
    valid = is_valid_format(trajectory)
    right = em_reward(trajectory, config) == 1.0
    golden_answers = trajectory.prompt.question.golden_answers
    retrieved = any(sub_em(text, golden_answers) for text in information_texts(trajectory))
    if right:
        reward = 1.0 if valid else 1.0 - config.structure_score
    elif valid:
        reward = config.structure_score + (config.retrieval_score if retrieved else 0.0)
    else:
        reward = config.format_score if trajectory.answer is not None else 0.0
    return {"reward": reward, "em": float(right), "valid_format": float(valid), "retrieved": float(retrieved)}


def recall_f1(trajectory: Trajectory, config: RewardConfig) -> Mapping[str, float]:
    """ReCall's reward (arXiv:2503.19470): word F1 of a well formed answer; where that is 0 or there is none, the
    format score for a valid format, else 0. With tools, an answer in the configured pattern is the valid format.
    """
    valid = _is_final(trajectory) or is_valid_format(trajectory)
    score = _score(f1, trajectory.answer, trajectory)
    return {"reward": score or (config.format_score if valid else 0.0), "f1": score, "valid_format": float(valid)}


def legacy_em(trajectory: Trajectory, config: RewardConfig) -> float:
    """Upstream Search-R1's rule, for comparison with published logs: exact match (ASCII normalisation) of the last
    `<answer>` over prompt *and* response, observations included; 0 where there are fewer than two matches, since the
    first one is the prompt's example. Texts that both normalise to nothing match.
    """
    parts = [message["content"] for message in trajectory.prompt.question.prompt_messages]
    for turn in trajectory.turns:
        parts.append(turn.completion.text)
        if turn.observation is not None:
            parts.append(turn.observation.text)
    answers = _ANSWER.findall("".join(parts))
    if len(answers) < 2:
        return 0.0
    golden_answers = trajectory.prompt.question.golden_answers
    return float(squad_normalize(answers[-1]) in map(squad_normalize, golden_answers))


def metrics_of(trajectory: Trajectory) -> dict[str, float]:
    """What validation reports of a trajectory, whatever reward it is trained on: `em`, `f1`, `sub_em`."""
    scores: dict[str, TextScore] = {"em": em, "f1": f1, "sub_em": sub_em}
    return {name: _score(score, trajectory.answer, trajectory) for name, score in scores.items()}


def _is_final(trajectory: Trajectory) -> bool:
    return bool(trajectory.turns) and trajectory.turns[-1].action.kind == "final"


def _score(score: TextScore, answer: str | None, trajectory: Trajectory) -> float:
    return 0.0 if answer is None else score(answer, trajectory.prompt.question.golden_answers)
