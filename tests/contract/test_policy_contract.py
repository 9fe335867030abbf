"""What the trainer may rely on, wherever the policy lives: here, with adapters, or split over Ray workers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from search_r1.backends.policy import LocalPolicy, build_reference
from search_r1.backends.sharding import Replicated
from search_r1.config import Config, EngineConfig, LoraConfig, ShardingConfig
from search_r1.data.micro_batches import select_rows
from search_r1.errors import ConfigError
from search_r1.protocols import Policy, Reference
from search_r1.types import RolloutBatch, TrainBatch
from tests.batches import random_batch, tiny_training_config
from tests.model_factory import tiny_model_dir
from tests.training_group import remote_roles

BATCH = random_batch((9, 14, 6, 11, 5))
TEMPERATURE = 0.7


@dataclass
class Subject:
    policy: Policy
    reference: Reference
    model: str
    """The folder it starts from."""
    fresh: str
    """A checkpoint of it as it was at the start."""
    lora: bool = False

    def saved_log_probs(self, folder: Path) -> Tensor:
        """What plain transformers makes of a saved policy."""
        if not self.lora:
            return plain_log_probs(str(folder), BATCH.rollout)
        return log_probs_of(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(self.model), str(folder)))


def plain_log_probs(path: str, batch: RolloutBatch) -> Tensor:
    return log_probs_of(AutoModelForCausalLM.from_pretrained(path), batch)


def log_probs_of(model: Any, batch: RolloutBatch = BATCH.rollout) -> Tensor:
    """The slow way: row by row without padding, all logits at once."""
    found = torch.zeros(batch.input_ids.shape)
    for row, length in enumerate(batch.attention_mask.sum(dim=1).tolist()):
        ids = batch.input_ids[row : row + 1, :length]
        with torch.no_grad():
            scores = (model(ids).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        found[row, 1:length] = scores.gather(1, ids[0, 1:, None])[:, 0]
    return found.where(batch.loss_mask, 0.0)


def config_of(path: str, **model: Any) -> Config:
    config = tiny_training_config(path, lr=1e-2, mini_batch_size=100, max_tokens=30)
    return replace(config, model=replace(config.model, **model), engine=EngineConfig(name="vllm"))


@pytest.fixture(scope="module", params=["local", "lora", "sharded over two workers"])
def one_subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    path = str(tiny_model_dir(tmp_path_factory.mktemp("model")))
    fresh = str(tmp_path_factory.mktemp("fresh"))
    if request.param == "sharded over two workers":
        with remote_roles(replace(config_of(path), sharding=ShardingConfig(name="fsdp2")), 2) as roles:
            roles.policy.save(fresh)
            yield Subject(roles.policy, roles.reference, path, fresh)
        return
    config = config_of(path, lora=LoraConfig(rank=4 if request.param == "lora" else 0))
    policy = LocalPolicy(config, Replicated(), 100)
    policy.save(fresh)
    yield Subject(policy, build_reference(config, Replicated(), policy), path, fresh, lora=bool(config.model.lora.rank))


@pytest.fixture
def subject(one_subject: Subject) -> Subject:
    one_subject.policy.load(one_subject.fresh)
    return one_subject


def on_policy(subject: Subject, batch: TrainBatch = BATCH) -> TrainBatch:
    scored = subject.policy.log_probs(batch.rollout)
    return replace(batch, old_log_probs=scored, ref_log_probs=scored)


def test_log_probs_are_the_models_at_the_sampling_temperature_in_the_order_of_the_rows(subject: Subject) -> None:
    found = subject.policy.log_probs(BATCH.rollout)
    assert found.dtype == torch.float32
    assert found.device.type == "cpu"
    torch.testing.assert_close(found, plain_log_probs(subject.model, BATCH.rollout), atol=5e-5, rtol=1e-4)


def test_nothing_is_said_of_tokens_that_were_not_sampled(subject: Subject) -> None:
    for scored in (subject.policy.log_probs(BATCH.rollout), subject.reference.log_probs(BATCH.rollout)):
        assert scored[~BATCH.rollout.loss_mask].abs().max() == 0


@pytest.mark.parametrize("rows", [[3], [4, 0], [2, 2, 2]])
def test_a_rows_log_probs_do_not_depend_on_its_batch(subject: Subject, rows: list[int]) -> None:
    part = select_rows(BATCH.rollout, rows)
    expected = subject.policy.log_probs(BATCH.rollout)[rows][:, : part.input_ids.shape[1]]
    torch.testing.assert_close(subject.policy.log_probs(part), expected, atol=5e-5, rtol=1e-4)


def test_scoring_changes_nothing(subject: Subject) -> None:
    first = subject.policy.log_probs(BATCH.rollout)
    assert torch.equal(subject.policy.log_probs(BATCH.rollout), first)


def test_an_update_follows_the_advantages_and_leaves_the_reference_alone(subject: Subject) -> None:
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    advantages = signs[:, None] * BATCH.rollout.loss_mask
    before, reference = subject.policy.log_probs(BATCH.rollout), subject.reference.log_probs(BATCH.rollout)
    for _ in range(3):
        subject.policy.update(on_policy(subject, replace(BATCH, advantages=advantages)))
    moved = (subject.policy.log_probs(BATCH.rollout) - before).sum(dim=1)
    assert (moved * signs > 0).all()
    assert torch.equal(subject.reference.log_probs(BATCH.rollout), reference)


def test_an_update_tells_its_loss_gradient_and_learning_rate_as_finite_numbers(subject: Subject) -> None:
    metrics = subject.policy.update(on_policy(subject))
    names = {"loss", "grad_norm", "lr", "bad_steps", "entropy", "clip_fraction", "rollout_log_prob_gap", "kl_ref"}
    assert {f"actor/{name}" for name in names} <= metrics.keys()
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
    assert metrics["actor/bad_steps"] == 0


def test_without_old_log_probs_the_current_ones_are_taken(subject: Subject) -> None:
    given = subject.policy.update(on_policy(subject))
    subject.policy.load(subject.fresh)
    left_out = subject.policy.update(replace(on_policy(subject), old_log_probs=None))
    assert left_out == pytest.approx(given, rel=1e-4, abs=1e-5)


def test_the_order_of_the_rows_does_not_matter_to_an_update(subject: Subject) -> None:
    metrics = subject.policy.update(on_policy(subject))
    after = subject.policy.log_probs(BATCH.rollout)
    subject.policy.load(subject.fresh)
    order = [4, 2, 0, 3, 1]
    assert subject.policy.update(select_rows(on_policy(subject), order)) == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(subject.policy.log_probs(BATCH.rollout), after, atol=2e-3, rtol=1e-3)


def test_an_update_that_is_not_finite_changes_no_weight_and_is_counted(subject: Subject) -> None:
    before = subject.policy.log_probs(BATCH.rollout)
    broken = replace(on_policy(subject), advantages=BATCH.advantages * math.nan)
    assert subject.policy.update(broken)["actor/bad_steps"] == 1
    assert torch.equal(subject.policy.log_probs(BATCH.rollout), before)


def test_transformers_reads_a_saved_policy_as_it_is(subject: Subject, tmp_path: Path) -> None:
    subject.policy.update(on_policy(subject))
    subject.policy.save(str(tmp_path))
    torch.testing.assert_close(
        subject.saved_log_probs(tmp_path), subject.policy.log_probs(BATCH.rollout), atol=5e-5, rtol=1e-4
    )


def test_a_loaded_policy_goes_on_exactly(subject: Subject, tmp_path: Path) -> None:
    batch = on_policy(subject)
    subject.policy.update(batch)
    subject.policy.save(str(tmp_path))
    expected = subject.policy.update(batch), subject.policy.log_probs(BATCH.rollout)
    subject.policy.load(str(tmp_path))
    assert subject.policy.update(batch) == expected[0]
    assert torch.equal(subject.policy.log_probs(BATCH.rollout), expected[1])


def test_a_checkpoint_of_another_architecture_is_refused_by_its_folder(subject: Subject, tmp_path: Path) -> None:
    other = tiny_model_dir(tmp_path / "other", "llama", hidden_size=32)
    lora = LoraConfig(rank=4 if subject.lora else 0)
    LocalPolicy(config_of(str(other), lora=lora), Replicated(), 1).save(str(tmp_path / "checkpoint"))
    before = subject.policy.log_probs(BATCH.rollout)
    with pytest.raises(ConfigError, match=r"checkpoint in .*/checkpoint does not fit .*model\.path it was made with"):
        subject.policy.load(str(tmp_path / "checkpoint"))
    assert torch.equal(subject.policy.log_probs(BATCH.rollout), before)
