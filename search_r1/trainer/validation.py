"""Validation and evaluation: the same rollout as training, greedy by default, every question scored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from search_r1.config import Config
from search_r1.protocols import Metrics, Reward
from search_r1.rewards import metrics_of, score
from search_r1.rollout.manager import LLMGenerationManager
from search_r1.rollout.metrics import rollout_metrics
from search_r1.rollout.records import trajectory_record
from search_r1.types import Prompt, Question, SamplingConfig, Status, Trajectory

Summary = dict[str, float]
"""em, f1, sub_em, searches_per_question, valid_action_rate, questions; with tools the calls of each."""


@dataclass(frozen=True, slots=True)
class ValidationResult:
    overall: Summary
    by_source: dict[str, Summary]
    metrics: Metrics
    """`val/…` of all questions and `val/<source>/…`: the summary and the shares of statuses; tools over all."""
    records: list[dict[str, Any]]


def validate(
    manager: LLMGenerationManager,
    questions: Sequence[Question],
    encode_prompt: Callable[[Question], tuple[int, ...]],
    config: Config,
    reward: Reward | None = None,
    step: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> ValidationResult:
    """Roll out every question once and score it; a VOID trajectory counts as wrong."""
    size = config.data.val_batch_size
    trajectories: list[Trajectory] = []
    for start in range(0, len(questions), size):
        prompts = [Prompt(q, start + i, encode_prompt(q)) for i, q in enumerate(questions[start : start + size])]
        trajectories += manager.run_llm_loop(prompts, validation_sampling(config, start), policy_version=step)
        if on_progress:
            on_progress(len(trajectories), len(questions))
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.prompt.question.data_source].append(trajectory)
    by_source = {source: summarize(group) for source, group in sorted(groups.items())}
    overall = summarize(trajectories)
    metrics = _named("val", overall, trajectories, "status/", "tools/")
    for source, summary in by_source.items():
        metrics |= _named(f"val/{source}", summary, groups[source], "status/")
    records = [trajectory_record(t, _parts(t, reward), step) for t in trajectories]
    return ValidationResult(overall, by_source, metrics, records)


def validation_sampling(config: Config, offset: int = 0) -> SamplingConfig:
    """How validation, evaluation and `infer` sample; `offset` sets batches apart."""
    settings = config.validation
    return SamplingConfig(
        config.rollout.max_response_length, settings.temperature, settings.top_p, seed=config.seed + offset
    )


def summarize(trajectories: Sequence[Trajectory]) -> Summary:
    """Means over questions."""
    scores = [metrics_of(t) for t in trajectories]
    rollout = rollout_metrics(trajectories)
    return {
        **{name: fmean(s[name] for s in scores) for name in ("em", "f1", "sub_em")},
        "searches_per_question": rollout["rollout/searches"],
        "valid_action_rate": rollout["rollout/valid_action_rate"],
        "questions": float(len(trajectories)),
        **{name: value for name, value in rollout.items() if name.startswith("tools/") and name.endswith("/calls")},
    }


def _named(area: str, summary: Summary, trajectories: Sequence[Trajectory], *beside: str) -> Metrics:
    """The summary and those rollout metrics that begin with one of `beside`, as `<area>/<name>`."""
    others = {name: value for name, value in rollout_metrics(trajectories).items() if name.startswith(beside)}
    return {f"{area}/{name}": value for name, value in (summary | others).items()}


def _parts(trajectory: Trajectory, reward: Reward | None) -> dict[str, float]:
    if trajectory.status is Status.VOID:
        return {}
    scores = metrics_of(trajectory)
    return {"reward": scores["em"], **scores} if reward is None else score(reward, trajectory) | scores
