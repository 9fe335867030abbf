from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from search_r1.algorithms.kl import FixedKLController
from search_r1.config import AlgorithmConfig, Config, EnvironmentConfig, PolicyConfig, RolloutConfig
from search_r1.data.questions import QuestionStream
from search_r1.environments.search import SearchEnvironment
from search_r1.protocols import Metrics
from search_r1.rollout.manager import LLMGenerationManager
from search_r1.trainer.rollouts import StepRollouts
from search_r1.trainer.step import Roles, Stopwatch, train_step
from search_r1.types import Completion, RolloutBatch, SamplingConfig, TrainBatch
from tests.fakes import AsyncEngine, FakeRetriever, decode, encode, make_question

NUM_STEPS, BATCH_SIZE, GROUP_SIZE = 5, 2, 2
ROWS = BATCH_SIZE * GROUP_SIZE
CONFIG = Config(
    rollout=RolloutConfig(
        group_size=GROUP_SIZE,
        max_turns=0,
        max_start_length=64,
        max_response_length=64,
        max_obs_length=200,
        max_prompt_length=300,
    ),
    algorithm=AlgorithmConfig(kl_placement="none"),
    policy=PolicyConfig(mini_batch_size=2),
)


class GatedEngine(AsyncEngine):
    """Samples the questions of the first `open_batches` batches; the others wait."""

    def __init__(self) -> None:
        super().__init__(lambda context, seed: f"<answer>{context}</answer>")
        self.open_batches = 99

    async def agenerate(self, context: Sequence[int], sampling: SamplingConfig, seed: int) -> Completion:
        self.running += 1
        try:
            while int(decode(context)[1:]) // BATCH_SIZE >= self.open_batches:
                await asyncio.sleep(0.001)
        finally:
            self.running -= 1
        return self.generate([context], sampling, [seed])[0]

    def wait_until_running(self, count: int) -> None:
        while self.running != count:
            time.sleep(0.001)


class Learner:
    """Policy and scorer: old log-probs a fixed distance above the engine's."""

    def __init__(self, gap: float = 0.0) -> None:
        self.gap = gap
        self.batches: list[TrainBatch] = []

    def score(self, rollout: RolloutBatch, roles: Sequence[str]) -> dict[str, Any]:
        return {"policy": torch.where(rollout.loss_mask, rollout.rollout_log_probs + self.gap, 0.0)}

    def update(self, batch: TrainBatch) -> Metrics:
        self.batches.append(batch)
        return {}


def make_roles(engine: AsyncEngine, learner: Learner) -> Roles:
    environment = SearchEnvironment(FakeRetriever(), encode, decode, EnvironmentConfig(), 200)
    return Roles(
        policy=learner,  # type: ignore[arg-type]
        score=learner.score,
        manager=LLMGenerationManager(engine, environment, CONFIG.rollout),
        reward=lambda trajectory: float(len(trajectory.response_ids) % 7),
        sync_weights=dict,
        encode_prompt=lambda question: tuple(encode(question.text)),
        pad_token_id=0,
    )


def stream() -> QuestionStream:
    questions = [make_question(f"q{number}") for number in range(NUM_STEPS * BATCH_SIZE)]
    return QuestionStream(questions, BATCH_SIZE, seed=0, shuffle=False)


@pytest.fixture
def engine() -> GatedEngine:
    return GatedEngine()


def with_staleness(staleness: int, **algorithm: float) -> Config:
    return replace(
        CONFIG,
        rollout=replace(CONFIG.rollout, max_staleness=staleness),
        algorithm=replace(CONFIG.algorithm, **algorithm),  # type: ignore[arg-type]
    )


def test_on_policy_every_batch_is_sampled_by_the_weights_it_trains(engine: GatedEngine) -> None:
    roles = make_roles(engine, Learner())
    rollouts = StepRollouts(roles, stream(), CONFIG, NUM_STEPS)
    for step in (1, 2, 3):
        found = rollouts.take(step)
        assert len(engine.contexts) == ROWS * step
        metrics = train_step(roles, found, CONFIG, step, FixedKLController(0.0), Stopwatch()).metrics
        assert (metrics["staleness/mean"], metrics["staleness/max"]) == (0, 0)
        assert "mismatch/kl" not in metrics
    roles.manager.close()


@pytest.mark.parametrize("staleness", [1, 2])
def test_the_next_batches_are_sampled_while_a_step_learns_and_are_no_staler_than_allowed(
    engine: GatedEngine, staleness: int
) -> None:
    config = with_staleness(staleness)
    roles = make_roles(engine, Learner())
    rollouts = StepRollouts(roles, stream(), config, NUM_STEPS)
    for step in range(1, NUM_STEPS + 1):
        engine.open_batches = step
        found = rollouts.take(step)
        engine.wait_until_running(ROWS * min(staleness, NUM_STEPS - step))
        metrics = train_step(roles, found, config, step, FixedKLController(0.0), Stopwatch()).metrics
        assert metrics["staleness/max"] == metrics["staleness/mean"] == min(step - 1, staleness)
        texts = [trajectory.prompt.question.text for trajectory in found[::GROUP_SIZE]]
        assert texts == [f"q{2 * step - 2}", f"q{2 * step - 1}"]
    roles.manager.close()
    assert len(engine.contexts) == ROWS * NUM_STEPS


def test_a_checkpoint_remembers_the_questions_of_its_step_and_not_those_ahead(engine: GatedEngine) -> None:
    roles = make_roles(engine, Learner())
    rollouts = StepRollouts(roles, stream(), with_staleness(2), NUM_STEPS)
    rollouts.take(1)
    rollouts.take(2)
    expected = stream()
    expected.next_batch()
    expected.next_batch()
    assert rollouts.state() == expected.state()
    rollouts.close()
    roles.manager.close()


def test_closing_cancels_what_is_ahead(engine: GatedEngine) -> None:
    roles = make_roles(engine, Learner())
    rollouts = StepRollouts(roles, stream(), with_staleness(2), NUM_STEPS)
    engine.open_batches = 1
    rollouts.take(1)
    engine.wait_until_running(2 * ROWS)
    rollouts.close()
    assert engine.running == 0
    roles.manager.close()


def test_stale_tokens_are_weighted_by_the_truncated_ratio(engine: GatedEngine) -> None:
    """The trainer's log-probs lie 1 above the engine's: every ratio is e, cut at 2, and KL (k3) is e - 2."""
    learner = Learner(gap=1.0)
    roles = make_roles(engine, learner)
    config = with_staleness(1)
    found = StepRollouts(roles, stream(), CONFIG, NUM_STEPS).take(1)
    metrics = train_step(roles, found, config, 1, FixedKLController(0.0), Stopwatch()).metrics
    roles.manager.close()
    weights, mask = learner.batches[0].importance_weights, learner.batches[0].rollout.loss_mask
    assert weights is not None
    assert torch.equal(weights, torch.where(mask, 2.0, 0.0))
    assert metrics["mismatch/truncated_share"] == 1.0
    assert metrics["mismatch/kl"] == pytest.approx(torch.e - 2)


def test_extreme_ratios_are_left_out_where_asked(engine: GatedEngine) -> None:
    learner = Learner(gap=-1.0)
    roles = make_roles(engine, learner)
    found = StepRollouts(roles, stream(), CONFIG, NUM_STEPS).take(1)
    for mask_above, expected in ((2.0, 0.0), (3.0, torch.e**-1)):
        config = with_staleness(0, importance_cap=5.0, importance_mask_above=mask_above)
        metrics = train_step(roles, found, config, 1, FixedKLController(0.0), Stopwatch()).metrics
        weights = learner.batches[-1].importance_weights
        assert weights is not None
        assert weights.unique().tolist() == pytest.approx(sorted({0.0, expected}))
        assert metrics["mismatch/masked_share"] == (expected == 0.0)
        assert metrics["mismatch/truncated_share"] == 0.0
    roles.manager.close()
