"""What a batch of trajectories did, as numbers for the log."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import ceil

from search_r1.protocols import Metrics
from search_r1.types import Status, ToolResult, Trajectory, Turn

_FINAL_STATUSES = (Status.ANSWERED, Status.OUT_OF_TURNS, Status.OUT_OF_TOKENS, Status.VOID)


def rollout_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Turns, searches, actions, statuses, lengths in tokens, retrieval times and tool calls of one batch.

    Statuses are shares of all trajectories; everything else speaks of those that are not VOID. A search counts where
    its passages were appended: that of the last turn, which is not executed, does not. 0 where there is nothing.
    """
    kept = [trajectory for trajectory in trajectories if trajectory.status is not Status.VOID]
    turns = [turn for trajectory in kept for turn in trajectory.turns]
    statuses = Counter(trajectory.status for trajectory in trajectories)
    num_invalid = sum(turn.action.kind in ("invalid", "end") for turn in turns)
    metrics = {
        "rollout/num_trajectories": float(len(trajectories)),
        "rollout/num_void": float(statuses[Status.VOID]),
        "rollout/turns": _ratio(len(turns), len(kept)),
        "rollout/searches": _ratio(sum(map(_num_searches, turns)), len(kept)),
        "rollout/valid_action_rate": _ratio(len(turns) - num_invalid, len(turns)),
        "rollout/invalid_action_rate": _ratio(num_invalid, len(turns)),
        "rollout/num_truncated_completions": float(sum(turn.completion.finish_reason == "length" for turn in turns)),
        "rollout/num_truncated_observations": float(
            sum(turn.observation is not None and turn.observation.truncated for turn in turns)
        ),
    }
    metrics |= {f"status/{status}": _ratio(statuses[status], len(trajectories)) for status in _FINAL_STATUSES}
    return metrics | _lengths(kept) | _retrieval_times(turns) | _tools(turns)


def _searched(turn: Turn) -> bool:
    return turn.action.kind == "search" and turn.observation is not None


def _num_searches(turn: Turn) -> int:
    """In tags at most one; with tools every call of the one named search that found something."""
    return _searched(turn) + sum(call.tool == "search" and call.status == "success" for call in _calls(turn))


def _calls(turn: Turn) -> tuple[ToolResult, ...]:
    return turn.observation.calls if turn.observation is not None else ()


def _tools(turns: Sequence[Turn]) -> Metrics:
    """`tools/<name>/…` of every tool called; `tools/rejected_calls` were unreadable or named no allowed tool."""
    by_tool: defaultdict[str, list[ToolResult]] = defaultdict(list)
    for turn in turns:
        for call in _calls(turn):
            by_tool[call.tool].append(call)
    if not by_tool:
        return {}
    metrics = {"tools/rejected_calls": float(len(by_tool.pop("", [])))}
    for name, calls in sorted(by_tool.items()):
        metrics[f"tools/{name}/calls"] = float(len(calls))
        metrics[f"tools/{name}/errors"] = float(sum(call.status == "error" for call in calls))
        metrics[f"tools/{name}/p50_s"] = _percentile(sorted(call.seconds for call in calls if call.seconds), 50)
    return metrics


def _lengths(trajectories: Sequence[Trajectory]) -> Metrics:
    prompts = [len(trajectory.prompt.token_ids) for trajectory in trajectories]
    responses = [len(trajectory.response_ids) for trajectory in trajectories]
    sampled = [sum(trajectory.loss_mask) for trajectory in trajectories]
    metrics: Metrics = {"state_tokens/coverage": _ratio(sum(sampled), sum(responses))}
    for name, lengths in (("prompt", prompts), ("response", responses), ("sampled", sampled)):
        metrics[f"length/{name}_mean"] = _ratio(sum(lengths), len(lengths))
        metrics[f"length/{name}_max"] = float(max(lengths, default=0))
    return metrics


def _retrieval_times(turns: Sequence[Turn]) -> Metrics:
    """Percentiles over requests: the observations of one request carry the very same number of seconds.

    With tools over the calls of the one named search.
    """
    asked = {turn.observation.seconds for turn in turns if turn.observation is not None and _searched(turn)}
    seconds = sorted(asked | {call.seconds for turn in turns for call in _calls(turn) if call.tool == "search"})
    return {
        "retrieval/p50_s": _percentile(seconds, 50),
        "retrieval/p95_s": _percentile(seconds, 95),
    }


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that at least `percent` % of the values do not exceed (nearest rank)."""
    return ordered[ceil(len(ordered) * percent / 100) - 1] if ordered else 0.0


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
