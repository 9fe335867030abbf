"""One training step, start to end. Everything it calls is a pure function or a protocol."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from search_r1.algorithms import advantages as estimators
from search_r1.algorithms import corrections
from search_r1.algorithms.kl import KLController, token_kl
from search_r1.algorithms.masking import masked_mean, masked_whiten
from search_r1.config import Config
from search_r1.data.collate import collate
from search_r1.errors import TrainingError
from search_r1.protocols import Critic, Metrics, Policy, Reference, Reward, Scorer, WeightSync
from search_r1.rewards import metrics_of, score
from search_r1.rollout.manager import LLMGenerationManager
from search_r1.rollout.metrics import rollout_metrics
from search_r1.trainer.life_cycle import LifeCycle
from search_r1.types import Question, RolloutBatch, Status, TrainBatch, Trajectory


class ParityCheck(Protocol):
    """Compares engine and trainer. See `trainer.parity`."""

    def __call__(self, trajectories: Sequence[Trajectory], step: int) -> Metrics: ...

    def diagnose(self, trajectories: Sequence[Trajectory], step: int) -> str: ...


@dataclass(frozen=True, slots=True)
class Roles:
    """Who takes part in a step. No critic means GRPO, no reference means no KL term."""

    policy: Policy
    score: Scorer
    manager: LLMGenerationManager
    reward: Reward
    sync_weights: WeightSync
    encode_prompt: Callable[[Question], tuple[int, ...]]
    pad_token_id: int
    reference: Reference | None = None
    critic: Critic | None = None
    life_cycle: LifeCycle = field(default_factory=LifeCycle)
    parity: ParityCheck | None = None


@dataclass(slots=True)
class StepResult:
    metrics: Metrics
    trajectories: list[Trajectory]
    parts: list[dict[str, float]]
    """Reward and its parts, one mapping a trajectory; empty for a VOID one."""
    batch: TrainBatch
    times: Metrics = field(default_factory=dict)


class Stopwatch:
    """Seconds of a step's phases, as `time/<phase>_s`."""

    def __init__(self) -> None:
        self.times: Metrics = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.times[f"time/{name}_s"] = self.times.get(f"time/{name}_s", 0.0) + time.perf_counter() - start


def train_step(
    roles: Roles, trajectories: Sequence[Trajectory], config: Config, step: int, kl: KLController, watch: Stopwatch
) -> StepResult:
    """Score, learn, and carry the new weights to the engine."""
    with watch.phase("reward"):
        parts = [{} if t.status is Status.VOID else score(roles.reward, t) for t in trajectories]
    kept = [(t, p) for t, p in zip(trajectories, parts, strict=True) if p]
    if not kept:
        raise TrainingError(f"step {step}: no trajectory is left to learn from")
    rewards = [p["reward"] for _, p in kept]
    batch, metrics = prepare(roles, collate([t for t, _ in kept], rewards, roles.pad_token_id), config, kl, watch)
    metrics |= rollout_metrics(trajectories) | reward_metrics(parts) | group_metrics(kept)
    metrics |= staleness_metrics([t for t, _ in kept], step)
    if roles.critic:
        with watch.phase("critic"):
            metrics |= roles.critic.update(batch)
    if not roles.critic or step > config.critic.warmup_steps:
        with watch.phase("actor"):
            metrics |= roles.policy.update(batch)
        with watch.phase("sync"):
            metrics |= roles.sync_weights()
            roles.manager.weights_changed(step)
        if roles.parity is not None:
            with watch.phase("parity"):
                metrics |= roles.parity(trajectories, step)
    return StepResult(metrics, list(trajectories), parts, batch, watch.times)


def prepare(
    roles: Roles,
    rollout: RolloutBatch,
    config: Config,
    kl: KLController,
    watch: Stopwatch,
) -> tuple[TrainBatch, Metrics]:
    """Add what the update needs to a scored rollout: log-probs, values, advantages, returns."""
    metrics: Metrics = {}
    with watch.phase("log_probs"):
        needed = {
            "policy": needs_old_log_probs(config, rollout.rewards.shape[0]),
            "reference": roles.reference is not None,
            "critic": roles.critic is not None,
        }
        names = [name for name, is_needed in needed.items() if is_needed]
        scores = roles.score(rollout, names) if names else {}
        old, reference, values = (scores.get(name) for name in needed)
    mask = rollout.loss_mask
    token_rewards = estimators.last_token_rewards(rollout.rewards, mask)
    if config.algorithm.kl_placement == "reward" and reference is not None and old is not None:
        divergence = token_kl(old, reference, mask, config.algorithm.kl_estimator)
        metrics["kl/reward_coef"] = kl.value
        token_rewards = token_rewards - kl.value * divergence
        per_trajectory = float(divergence.sum(dim=1).mean())
        kl.update(per_trajectory, rollout.rewards.shape[0])
        metrics["kl/per_trajectory"] = per_trajectory
        metrics["kl/per_token"] = float(masked_mean(divergence, mask))
    advantages, returns = compute_advantages(config, token_rewards, rollout, values)
    metrics |= advantage_metrics(advantages, values, returns, mask)
    weights, mismatch = correct_mismatch(config, rollout, old)
    return TrainBatch(rollout, advantages, old, reference, values, returns, weights), metrics | mismatch


def needs_old_log_probs(config: Config, num_rows: int) -> bool:
    """With one optimizer step a batch the old log-probs are the current ones, unless something needs them first."""
    one_step = config.policy.epochs == 1 and num_rows <= config.policy.mini_batch_size * config.rollout.group_size
    kl_in_reward = config.algorithm.kl_placement == "reward" and config.algorithm.kl_coef > 0
    return not one_step or kl_in_reward or importance_cap(config) is not None


def importance_cap(config: Config) -> float | None:
    """Where importance weights are cut; None is no correction."""
    cap = config.algorithm.importance_cap
    return 2.0 if cap is None and config.rollout.max_staleness > 0 else cap


def correct_mismatch(config: Config, rollout: RolloutBatch, old: Tensor | None) -> tuple[Tensor | None, Metrics]:
    """Importance weights (B, T) for tokens sampled by other weights or kernels than the trainer's, None without."""
    if old is None:
        return None, {}
    log_probs = old, rollout.rollout_log_probs, rollout.loss_mask
    metrics = {"mismatch/kl": float(corrections.mismatch_kl(*log_probs))}
    cap, mask_above = importance_cap(config), config.algorithm.importance_mask_above
    if cap is None:
        return None, metrics
    weights = corrections.truncated_importance_weights(*log_probs, cap)
    metrics["mismatch/truncated_share"] = float(corrections.truncated_share(*log_probs, cap))
    if mask_above is not None:
        credible = corrections.credible_tokens(*log_probs, 1 / mask_above, mask_above)
        weights = weights * credible
        metrics["mismatch/masked_share"] = 1.0 - float(masked_mean(credible.float(), rollout.loss_mask))
    return weights, metrics


def staleness_metrics(trajectories: Sequence[Trajectory], step: int) -> Metrics:
    """Updates between the weights that a trajectory was begun under and those that train on it."""
    ages = [step - 1 - trajectory.policy_version for trajectory in trajectories]
    return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))}


def compute_advantages(
    config: Config, token_rewards: Tensor, rollout: RolloutBatch, values: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """GAE with a critic, whitened over all sampled tokens; GRPO without one, from the sum of token rewards."""
    algorithm, mask = config.algorithm, rollout.loss_mask
    if values is None:
        rewards = token_rewards.sum(dim=1)
        return estimators.grpo(rewards, rollout.group_ids, mask, normalize_by_std=algorithm.normalize_by_std), None
    raw, returns = estimators.gae(token_rewards, values, mask, algorithm.gamma, algorithm.lam)
    return masked_whiten(raw, mask), returns


def reward_metrics(parts: Sequence[dict[str, float]]) -> Metrics:
    """`reward/mean`, `reward/max` and `reward/min` over the trajectories that were scored, and each part's mean as
    `reward/<part>`, or `reward/part_<part>` where that is one of the three.
    """
    scored = [p for p in parts if p]
    rewards = [p["reward"] for p in scored]
    whole = {"reward/mean": sum(rewards) / len(rewards), "reward/max": max(rewards), "reward/min": min(rewards)}
    means: Metrics = {}
    for name in sorted({name for p in scored for name in p} - {"reward"}):
        key = f"reward/part_{name}" if f"reward/{name}" in whole else f"reward/{name}"
        means[key] = sum(p.get(name, 0.0) for p in scored) / len(scored)
    return means | whole


def group_metrics(kept: Sequence[tuple[Trajectory, dict[str, float]]]) -> Metrics:
    """Shares of groups that teach nothing because all their rewards are equal: those all right, and those all wrong.

    Right is a trajectory whose answer is an exact match, or whose reward, the turn penalty aside, is 1 or more.
    """
    groups: dict[int, list[tuple[float, bool]]] = {}
    for trajectory, parts in kept:
        full = parts["reward"] + parts.get("turn_penalty", 0.0) >= 1.0 - 1e-6
        right = full or metrics_of(trajectory)["em"] == 1.0
        groups.setdefault(trajectory.prompt.group_id, []).append((parts["reward"], right))
    uniform = Counter(group[0][1] for group in groups.values() if len(set(group)) == 1)
    return {
        "groups/all_right_share": uniform[True] / len(groups),
        "groups/all_wrong_share": uniform[False] / len(groups),
    }


def advantage_metrics(advantages: Tensor, values: Tensor | None, returns: Tensor | None, mask: Tensor) -> Metrics:
    metrics = {"advantages/abs_mean": float(masked_mean(advantages.abs(), mask))}
    if values is not None and returns is not None:
        error = masked_mean((returns - values) ** 2, mask)
        spread = masked_mean((returns - masked_mean(returns, mask)) ** 2, mask)
        metrics["critic/explained_variance"] = float(1 - error / spread.clamp(min=1e-8))
        metrics["critic/value_mean"] = float(masked_mean(values, mask))
        metrics["critic/return_mean"] = float(masked_mean(returns, mask))
    return metrics
