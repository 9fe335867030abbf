"""A finished trajectory as one JSON row: what trajectories/step_*.jsonl holds and the report shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from search_r1.types import Passage, ToolResult, Trajectory, Turn


def trajectory_record(trajectory: Trajectory, reward_parts: Mapping[str, float], step: int) -> dict[str, Any]:
    """Everything a person needs to see why a trajectory got its reward, in JSON types alone.

    `token_ids` are the whole sequence, prompt first; `sampled_spans` are the [start, end) runs in it that the policy
    sampled. `reward_parts` holds `reward` and what it is made of; empty for a VOID trajectory, whose reward is null.
    """
    question = trajectory.prompt.question
    num_prompt_tokens = len(trajectory.prompt.token_ids)
    return {
        "step": step,
        "question_id": question.question_id,
        "data_source": question.data_source,
        "group_id": trajectory.prompt.group_id,
        "question": question.text,
        "golden_answers": list(question.golden_answers),
        "tools": None if question.tools is None else list(question.tools),
        "prompt": [dict(message) for message in question.prompt_messages],
        "turns": [_turn(turn) for turn in trajectory.turns],
        "answer": trajectory.answer,
        "status": trajectory.status.value,
        "failure": trajectory.failure,
        "reward": float(reward_parts["reward"]) if reward_parts else None,
        "reward_parts": {name: float(value) for name, value in reward_parts.items()},
        "policy_version": trajectory.policy_version,
        "num_prompt_tokens": num_prompt_tokens,
        "num_response_tokens": len(trajectory.response_ids),
        "num_sampled_tokens": sum(trajectory.loss_mask),
        "token_ids": trajectory.context_ids,
        "sampled_spans": spans(trajectory.loss_mask, offset=num_prompt_tokens),
    }


def spans(mask: Sequence[bool], offset: int = 0) -> list[list[int]]:
    """The runs of True as [start, end).

    >>> spans([True, True, False, True], offset=5)
    [[5, 7], [8, 9]]
    """
    found, start = [], offset
    for value, run in groupby(mask):
        end = start + len(list(run))
        if value:
            found.append([start, end])
        start = end
    return found


def _turn(turn: Turn) -> dict[str, Any]:
    observation = turn.observation
    return {
        "completion": turn.completion.text,
        "finish_reason": turn.completion.finish_reason,
        "num_tokens": len(turn.completion.token_ids),
        "action": turn.action.kind,
        "content": turn.action.content,
        "query": turn.action.content if turn.action.kind == "search" else None,
        "observation": observation.text if observation else None,
        "num_observation_tokens": len(observation.token_ids) if observation else 0,
        "passages": [_passage(passage) for passage in observation.passages] if observation else [],
        "calls": [_call(call) for call in observation.calls] if observation else [],
        "truncated": observation.truncated if observation else False,
        "seconds": observation.seconds if observation else 0.0,
    }


def _passage(passage: Passage) -> dict[str, Any]:
    score = None if passage.score is None else float(passage.score)
    return {"id": passage.passage_id, "title": passage.title, "text": passage.text, "score": score}


def _call(call: ToolResult) -> dict[str, Any]:
    """Arguments stand in the turn's content, results in its observation."""
    return {"tool": call.tool, "status": call.status, "seconds": call.seconds}
