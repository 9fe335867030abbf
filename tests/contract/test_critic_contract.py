"""What the trainer may rely on, wherever the critic lives: here, with adapters, or split over Ray workers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from search_r1.backends.critic import LocalCritic
from search_r1.backends.sharding import Replicated
from search_r1.config import AlgorithmConfig, Config, EngineConfig, LoraConfig, ShardingConfig
from search_r1.data.micro_batches import select_rows
from search_r1.errors import ConfigError
from search_r1.protocols import Critic
from search_r1.types import TrainBatch
from tests.batches import random_batch, tiny_training_config
from tests.model_factory import tiny_model_dir
from tests.training_group import remote_roles

BATCH = random_batch((9, 14, 6, 11, 5))


@dataclass
class Subject:
    critic: Critic
    fresh: str
    """A checkpoint of it after one update: a critic that has just begun says 0 of everything."""
    lora: LoraConfig


def config_of(path: str, lora: LoraConfig) -> Config:
    config = tiny_training_config(path, lr=1e-2, mini_batch_size=100, max_tokens=30)
    return replace(
        config,
        model=replace(config.model, lora=lora),
        algorithm=AlgorithmConfig(advantage="gae"),
        engine=EngineConfig(name="vllm"),
    )


@pytest.fixture(scope="module", params=["local", "lora", "sharded over two workers"])
def one_subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    path = str(tiny_model_dir(tmp_path_factory.mktemp("model")))
    fresh = str(tmp_path_factory.mktemp("fresh"))
    lora = LoraConfig(rank=4 if request.param == "lora" else 0)
    config = config_of(path, lora)
    if request.param == "sharded over two workers":
        with remote_roles(replace(config, sharding=ShardingConfig(name="fsdp2")), 2) as roles:
            yield begun(roles.critic, fresh, lora)
        return
    yield begun(LocalCritic(config, Replicated(), 100), fresh, lora)


def begun(critic: Critic, fresh: str, lora: LoraConfig) -> Subject:
    assert critic.values(BATCH.rollout).abs().max() == 0, "a critic begins with 0 of everything"
    critic.update(BATCH)
    critic.save(fresh)
    return Subject(critic, fresh, lora)


@pytest.fixture
def subject(one_subject: Subject) -> Subject:
    one_subject.critic.load(one_subject.fresh)
    return one_subject


def learnable(subject: Subject) -> TrainBatch:
    """Returns that differ between the rows, and the values of now."""
    returns = torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0])[:, None] * BATCH.rollout.loss_mask
    return replace(BATCH, values=subject.critic.values(BATCH.rollout), returns=returns)


def test_values_are_numbers_of_sampled_tokens_alone(subject: Subject) -> None:
    values = subject.critic.values(BATCH.rollout)
    assert values.shape == BATCH.rollout.input_ids.shape
    assert values.dtype == torch.float32
    assert values.device.type == "cpu"
    assert values[~BATCH.rollout.loss_mask].abs().max() == 0
    assert values[BATCH.rollout.loss_mask].abs().min() > 0


def test_a_value_does_not_see_its_own_token_or_later_ones(subject: Subject) -> None:
    (row, column), *_ = BATCH.rollout.loss_mask.nonzero()[4:].tolist()
    changed = replace(BATCH.rollout, input_ids=BATCH.rollout.input_ids.clone())
    changed.input_ids[row, column:] = 7
    before, after = subject.critic.values(BATCH.rollout), subject.critic.values(changed)
    torch.testing.assert_close(before[row, : column + 1], after[row, : column + 1], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(before[row, column + 1 :], after[row, column + 1 :])


@pytest.mark.parametrize("rows", [[3], [4, 0], [2, 2, 2]])
def test_a_rows_values_do_not_depend_on_its_batch(subject: Subject, rows: list[int]) -> None:
    part = select_rows(BATCH.rollout, rows)
    expected = subject.critic.values(BATCH.rollout)[rows][:, : part.input_ids.shape[1]]
    torch.testing.assert_close(subject.critic.values(part), expected, atol=1e-5, rtol=1e-4)


def test_updates_bring_the_values_to_the_returns(subject: Subject) -> None:
    def error(batch: TrainBatch) -> float:
        assert batch.returns is not None
        assert batch.values is not None
        return float((batch.returns - batch.values).abs().sum())

    start = error(learnable(subject))
    for _ in range(15):
        subject.critic.update(learnable(subject))
    assert error(learnable(subject)) < 0.6 * start


def test_an_update_tells_its_loss_gradient_and_learning_rate_as_finite_numbers(subject: Subject) -> None:
    metrics = subject.critic.update(learnable(subject))
    assert {"critic/loss", "critic/grad_norm", "critic/lr", "critic/bad_steps"} <= metrics.keys()
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())


def test_the_order_of_the_rows_does_not_matter_to_an_update(subject: Subject) -> None:
    batch = learnable(subject)
    metrics = subject.critic.update(batch)
    subject.critic.load(subject.fresh)
    assert subject.critic.update(select_rows(batch, [4, 2, 0, 3, 1])) == pytest.approx(metrics, rel=1e-4, abs=1e-5)


def test_an_update_that_is_not_finite_changes_no_weight_and_is_counted(subject: Subject) -> None:
    before = subject.critic.values(BATCH.rollout)
    broken = replace(learnable(subject), returns=torch.full_like(before, math.nan))
    assert subject.critic.update(broken)["critic/bad_steps"] == 1
    assert torch.equal(subject.critic.values(BATCH.rollout), before)


def test_a_loaded_critic_goes_on_exactly(subject: Subject, tmp_path: Path) -> None:
    batch = learnable(subject)
    subject.critic.update(batch)
    subject.critic.save(str(tmp_path))
    expected = subject.critic.update(batch), subject.critic.values(BATCH.rollout)
    subject.critic.load(str(tmp_path))
    assert subject.critic.update(batch) == expected[0]
    assert torch.equal(subject.critic.values(BATCH.rollout), expected[1])


def test_a_checkpoint_of_another_architecture_is_refused_by_its_folder(subject: Subject, tmp_path: Path) -> None:
    other = tiny_model_dir(tmp_path / "other", "llama", hidden_size=32)
    checkpoint = str(tmp_path / "checkpoint")
    LocalCritic(config_of(str(other), subject.lora), Replicated(), 1).save(checkpoint)
    before = subject.critic.values(BATCH.rollout)
    with pytest.raises(ConfigError, match=r"checkpoint in .*/checkpoint does not fit .*model\.path it was made with"):
        subject.critic.load(checkpoint)
    assert torch.equal(subject.critic.values(BATCH.rollout), before)
