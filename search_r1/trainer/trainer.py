"""The training loop: generate, learn, sync, validate, save, log. It knows roles and protocols only."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from search_r1.algorithms.kl import AdaptiveKLController, FixedKLController, KLController
from search_r1.config import Config
from search_r1.data.questions import QuestionStream
from search_r1.protocols import Metrics, State, Tracker
from search_r1.rollout.records import trajectory_record
from search_r1.trainer.checkpoints import Checkpoints, changed_settings, comparable
from search_r1.trainer.console import RunConsole, comparison_table
from search_r1.trainer.health import HealthCheck
from search_r1.trainer.rollouts import StepRollouts
from search_r1.trainer.run_folder import RunFolder, metrics_row
from search_r1.trainer.step import Roles, StepResult, Stopwatch, train_step
from search_r1.trainer.validation import ValidationResult, validate
from search_r1.types import Question

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Progress:
    """What a resumed run must know about the past, beside weights and data position."""

    step: int = 0
    train_seconds: float = 0.0
    before: dict[str, Metrics] | None = None


class Trainer:
    """Owns the order of things; everything it calls is given to it."""

    def __init__(
        self,
        config: Config,
        roles: Roles,
        train_questions: Sequence[Question],
        val_questions: Sequence[Question],
        folder: RunFolder,
        trackers: Sequence[Tracker],
        save_tokenizer: Callable[[str], Any],
        show: bool = True,
    ) -> None:
        self.config = config
        self.roles = roles
        self.val_questions = val_questions
        self.folder = folder
        self.trackers = trackers
        self.save_tokenizer = save_tokenizer
        self.stream = QuestionStream(
            train_questions, config.data.train_batch_size, seed=config.seed, shuffle=config.data.shuffle
        )
        self.total_steps = total_steps(config, len(train_questions))
        self.rollouts = StepRollouts(roles, self.stream, config, self.total_steps)
        self.kl = build_kl_controller(config)
        self.checkpoints = Checkpoints(folder.checkpoints, config.trainer.keep_checkpoints)
        self.progress = Progress()
        self.last: StepResult | None = None
        stale = config.rollout.max_staleness > 0
        max_parity_error = math.inf if stale else config.engine.max_parity_error
        self.health = HealthCheck(
            config.trainer.max_bad_steps, max_parity_error, self._save_bad_batch, self._explain_parity
        )
        self.console = RunConsole(self.total_steps, enabled=show and "console" in config.tracking.backends)

    def fit(self, resume_from: Path | None = None) -> dict[str, Any]:
        """Train to the last step; returns the summary that is also written to summary.json.

        A validation that was due at the checkpoint `resume_from`, and in which its run stopped, is made up first.
        """
        row: Metrics = {}
        if resume_from is not None:
            self._restore(self.checkpoints.load(resume_from, self.roles))
            self.console.say(f"going on from {resume_from}")
            for change in changed_settings(resume_from.parents[1], self.config):
                logger.warning("going on with another setting: %s", change)
            row = metrics_row(resume_from.parents[1], self.progress.step)
        self.folder.forget_after(self.progress.step)
        self.checkpoints.forget_after(self.progress.step)
        self.folder.write_json("settings.json", comparable(self.config))
        self.folder.link_latest()
        self.roles.sync_weights()
        with self.console, closing(self.rollouts):
            after = None
            if self.progress.step == 0 and self.config.validation.before_training:
                self.progress.before = self._tables(self._validate(0))
            elif row and _due(self.progress.step, self.config.validation.every_steps) and "val/em" not in row:
                after = self._validate(self.progress.step)
            while self.progress.step < self.total_steps:
                after = self._step(self.progress.step + 1)
            after = after or self._validate(self.progress.step)
        summary = self._summary(self._tables(after))
        self.folder.write_json("summary.json", summary)
        self.console.console.print(comparison_table(self.progress.before, self._tables(after)))
        self.console.say(f"run folder: {self.folder.path}")
        return summary

    def _step(self, step: int) -> ValidationResult | None:
        start, watch = time.perf_counter(), Stopwatch()
        with watch.phase("rollout"):
            trajectories = self.rollouts.take(step, self._on_turn)
        result = train_step(self.roles, trajectories, self.config, step, self.kl, watch)
        self.progress.train_seconds += time.perf_counter() - start
        self.progress.step, self.last = step, result
        metrics = result.metrics | result.times | {"time/step_s": time.perf_counter() - start}
        last = step == self.total_steps
        self.console.step(step, metrics)
        self._write_trajectories(result, step)
        self._log(metrics, step)
        self.health(metrics, step)
        if last or _due(step, self.config.trainer.save_every_steps):
            self.roles.life_cycle.rest()
            self.checkpoints.save(step, self.roles, self._state(), self.save_tokenizer)
        return self._validate(step) if last or _due(step, self.config.validation.every_steps) else None

    def _validate(self, step: int) -> ValidationResult:
        with self.roles.life_cycle.generating():
            result = validate(
                self.roles.manager,
                self.val_questions,
                self.roles.encode_prompt,
                self.config,
                self.roles.reward,
                step,
                on_progress=lambda done, total: self.console.phase("validating", done, total),
            )
        if self.config.tracking.log_trajectories:
            self.folder.write_trajectories(f"val_{step:06d}", result.records)
        self._log(result.metrics, step)
        self.console.say(f"step {step}: validation exact match {result.overall['em']:.3f}")
        return result

    def _on_turn(self, done: int, total: int) -> None:
        self.console.phase("rollout", done, total)

    def _log(self, metrics: Metrics, step: int) -> None:
        self.folder.log_metrics(metrics, step)
        for tracker in self.trackers:
            tracker.log(metrics, step)

    def _write_trajectories(self, result: StepResult, step: int) -> None:
        if self.config.tracking.log_trajectories:
            rows = zip(result.trajectories, result.parts, strict=True)
            self.folder.write_trajectories(f"step_{step:06d}", (trajectory_record(t, p, step) for t, p in rows))

    def _save_bad_batch(self) -> str:
        path = self.folder.path / "bad_batch.pt"
        assert self.last is not None
        batch = self.last.batch
        tensors = {name: getattr(batch.rollout, name) for name in batch.rollout.__slots__}
        tensors |= {name: getattr(batch, name) for name in batch.__slots__ if name != "rollout"}
        torch.save(tensors, path)
        return str(path)

    def _explain_parity(self) -> str:
        parity, last = self.roles.parity, self.last
        return parity.diagnose(last.trajectories, self.progress.step) if parity and last else "the cause is not known"

    def _state(self) -> State:
        return {
            "data": self.rollouts.state(),
            "kl": self.kl.state(),
            "train_seconds": self.progress.train_seconds,
            "before": self.progress.before,
        }

    def _restore(self, state: State) -> None:
        self.stream.load_state(state["data"])
        self.kl.load_state(state["kl"])
        self.progress = Progress(state["step"], state["train_seconds"], state["before"])

    def _tables(self, result: ValidationResult) -> dict[str, Metrics]:
        return {**result.by_source, "all": result.overall}

    def _summary(self, after: dict[str, Metrics]) -> dict[str, Any]:
        before = self.progress.before
        return {
            "algorithm": "ppo" if self.config.algorithm.advantage == "gae" else "grpo",
            "questions": len(self.val_questions),
            "steps": self.progress.step,
            "before": before["all"] if before else None,
            "after": after["all"],
            "by_source": {s: {"before": before.get(s) if before else None, "after": t} for s, t in after.items()},
            "train_seconds": round(self.progress.train_seconds, 3),
            "setup_seconds": float(os.environ.get("SEARCH_R1_SETUP_SECONDS", 0)),
        }


def total_steps(config: Config, num_questions: int) -> int:
    """`trainer.total_steps`, else as many batches as `trainer.epochs` passes need (the last one is filled up)."""
    if config.trainer.total_steps is not None:
        return config.trainer.total_steps
    return -(-num_questions * config.trainer.epochs // config.data.train_batch_size)


def optimizer_steps(config: Config, num_questions: int) -> tuple[int, int]:
    """Optimizer steps of the whole run: of the policy, and of the critic."""
    steps, batch = total_steps(config, num_questions), config.data.train_batch_size
    policy = -(-batch // config.policy.mini_batch_size) * config.policy.epochs
    critic = -(-batch // config.critic.mini_batch_size) * config.critic.epochs
    return max(1, steps - config.critic.warmup_steps) * policy, steps * critic


def build_kl_controller(config: Config) -> KLController:
    algorithm = config.algorithm
    if algorithm.kl_controller == "adaptive":
        return AdaptiveKLController(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon)
    return FixedKLController(algorithm.kl_coef)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
