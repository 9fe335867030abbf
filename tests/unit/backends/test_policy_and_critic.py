from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from search_r1.backends.critic import LocalCritic
from search_r1.backends.policy import LocalPolicy, RecastPolicy, ReferencePolicy
from search_r1.backends.sharding import Replicated
from search_r1.data.micro_batches import make_shares, select_rows
from search_r1.errors import ConfigError
from search_r1.types import TrainBatch
from tests.batches import random_batch, tiny_training_config, with_policy
from tests.model_factory import ARCHITECTURES, tiny_model_dir


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model_dir(tmp_path_factory.mktemp("policy")))


def gradients(role: LocalPolicy | LocalCritic, batch: TrainBatch, num_workers: int = 1) -> torch.Tensor:
    """The summed gradient of one mini-batch, worker by worker; the learning rate is 0, so weights stay."""
    trainable = role.trainable
    trainable.config = replace(trainable.config, max_grad_norm=1e9)
    kept: list[torch.Tensor] = []

    def keep(*_: object) -> None:
        parameters = list(trainable.module.parameters())
        kept.append(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]))

    trainable.optimizer.register_step_pre_hook(keep)
    for shares in make_shares(batch, 100, num_workers):
        role.update_shares(shares)
    return torch.stack(kept).sum(dim=0)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"])
@pytest.mark.parametrize("max_tokens", [14, 20, 28])
def test_policy_gradient_does_not_depend_on_micro_batches(model_dir: str, aggregation: str, max_tokens: int) -> None:
    config = with_policy(tiny_training_config(model_dir, lr=0.0), loss_aggregation=aggregation)
    whole = gradients(LocalPolicy(config, Replicated(), 1), random_batch())
    config = with_policy(config, max_tokens_per_micro_batch=max_tokens)
    split = gradients(LocalPolicy(config, Replicated(), 1), random_batch())
    assert (whole - split).norm() / whole.norm() < 1e-5


@pytest.mark.parametrize("num_workers", [2, 3, 4, 7])
def test_policy_gradient_does_not_depend_on_workers(model_dir: str, num_workers: int) -> None:
    config = tiny_training_config(model_dir, lr=0.0)
    whole = gradients(LocalPolicy(config, Replicated(), 1), random_batch())
    split = gradients(LocalPolicy(config, Replicated(), 1), random_batch(), num_workers)
    assert (whole - split).norm() / whole.norm() < 1e-5


def test_critic_gradient_does_not_depend_on_micro_batches_or_workers(model_dir: str) -> None:
    config = tiny_training_config(model_dir, lr=0.0)
    whole = gradients(LocalCritic(config, Replicated(), 1), random_batch())
    config = replace(config, critic=replace(config.critic, max_tokens_per_micro_batch=14))
    split = gradients(LocalCritic(config, Replicated(), 1), random_batch(), 3)
    assert (whole - split).norm() / whole.norm() < 1e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probs_are_those_of_the_plain_model(tmp_path: Path, architecture: str) -> None:
    path = str(tiny_model_dir(tmp_path / architecture, architecture, tied=architecture == "llama"))
    batch = random_batch().rollout
    scored = ReferencePolicy(tiny_training_config(path, max_tokens=20), Replicated()).log_probs(batch)
    model = AutoModelForCausalLM.from_pretrained(path)
    for row, length in enumerate(batch.attention_mask.sum(dim=1).tolist()):
        with torch.no_grad():
            logits = model(batch.input_ids[row : row + 1, :length]).logits[0] / 0.7
        expected = logits[:-1].log_softmax(-1).gather(1, batch.input_ids[row, 1:length, None])[:, 0]
        mask = batch.loss_mask[row, 1:length]
        torch.testing.assert_close(scored[row, 1:length][mask], expected[mask], atol=2e-5, rtol=1e-5)
        assert scored[row][~batch.loss_mask[row]].abs().max() == 0


def test_a_policy_whose_weights_lose_precision_cannot_tell_what_rounding_does(model_dir: str) -> None:
    sharding = Replicated()
    policy = LocalPolicy(tiny_training_config(model_dir), sharding, 1)
    batch = random_batch().rollout
    RecastPolicy(policy, "float32").log_probs(batch)
    sharding.lowers_precision = True
    RecastPolicy(policy, "bfloat16").log_probs(batch)
    with pytest.raises(ConfigError, match=r"set engine\.dtype and model\.dtype to the same"):
        RecastPolicy(policy, "float32").log_probs(batch)


def test_value_of_a_token_is_read_before_it(model_dir: str) -> None:
    critic = LocalCritic(tiny_training_config(model_dir), Replicated(), 1)
    torch.nn.init.normal_(critic.module.value_head.weight)
    batch = random_batch((8,)).rollout
    batch = replace(batch, loss_mask=batch.attention_mask & (torch.arange(8) > 2))
    changed = replace(batch, input_ids=batch.input_ids.clone())
    changed.input_ids[0, 5] += 1
    before, after = critic.values(batch), critic.values(changed)
    torch.testing.assert_close(before[0, :6], after[0, :6])
    assert (before[0, 6:] - after[0, 6:]).abs().min() > 1e-6


@pytest.mark.parametrize(
    ("architecture", "shares"),
    [
        ("llama", {"attention_dropout": 0.5}),
        ("phi3", {"attention_dropout": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}),
    ],
)
def test_a_model_with_dropout_is_trained_without(tmp_path: Path, architecture: str, shares: dict[str, float]) -> None:
    config = tiny_training_config(str(tiny_model_dir(tmp_path, architecture, **shares)), lr=0.0)
    batch = random_batch()
    policy = LocalPolicy(config, Replicated(), 1)
    batch = replace(batch, old_log_probs=policy.log_probs(batch.rollout))
    assert policy.update(batch)["actor/ratio"] == pytest.approx(1.0, abs=1e-5)
    policy.module.train()
    rows = batch.rollout.input_ids, batch.rollout.loss_mask, 1.0
    assert torch.equal(policy.module(*rows)[0], policy.module(*rows)[0])


def test_fresh_critic_predicts_zero(model_dir: str) -> None:
    assert LocalCritic(tiny_training_config(model_dir), Replicated(), 1).values(random_batch().rollout).abs().max() == 0


def test_padding_tokens_change_nothing(model_dir: str) -> None:
    policy = ReferencePolicy(tiny_training_config(model_dir), Replicated())
    batch = random_batch().rollout
    other = replace(batch, input_ids=batch.input_ids.where(batch.attention_mask, 7))
    assert torch.equal(policy.log_probs(batch), policy.log_probs(other))


def test_observation_ids_of_advantages_and_old_log_probs_change_no_metric(model_dir: str) -> None:
    config = tiny_training_config(model_dir)
    batch = random_batch()
    outside = ~batch.rollout.loss_mask
    poisoned = replace(
        batch,
        advantages=batch.advantages.where(~outside, float("nan")),
        old_log_probs=batch.old_log_probs.where(~outside, 1e9),
        ref_log_probs=batch.ref_log_probs.where(~outside, -1e9),
    )
    clean = LocalPolicy(config, Replicated(), 1).update(batch)
    assert LocalPolicy(config, Replicated(), 1).update(poisoned) == clean


def test_a_non_finite_loss_leaves_the_weights_alone_and_is_counted(model_dir: str) -> None:
    policy = LocalPolicy(tiny_training_config(model_dir), Replicated(), 2)
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    batch = random_batch()
    broken = replace(batch, advantages=batch.advantages + float("nan"))
    assert policy.update(broken)["actor/bad_steps"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.weights())
    assert policy.update(batch)["actor/bad_steps"] == 0


def test_a_trajectory_without_a_sampled_token_adds_nothing(model_dir: str) -> None:
    config = tiny_training_config(model_dir, lr=0.0)
    batch = random_batch()
    mask = batch.rollout.loss_mask.clone()
    mask[3] = False
    hollow = replace(batch, rollout=replace(batch.rollout, loss_mask=mask))
    with_it = gradients(LocalPolicy(config, Replicated(), 1), hollow)
    without = gradients(LocalPolicy(config, Replicated(), 1), select_rows(hollow, [0, 1, 2]))
    torch.testing.assert_close(with_it, without, atol=1e-7, rtol=1e-4)


def test_without_old_log_probs_the_ratio_is_one(model_dir: str) -> None:
    metrics = LocalPolicy(tiny_training_config(model_dir), Replicated(), 1).update(
        replace(random_batch(), old_log_probs=None)
    )
    assert metrics["actor/ratio"] == pytest.approx(1.0)
    assert metrics["actor/clip_fraction"] == 0


def test_saved_and_loaded_policy_goes_on_exactly(model_dir: str, tmp_path: Path) -> None:
    config = tiny_training_config(model_dir)
    first, second = (LocalPolicy(config, Replicated(), 10) for _ in range(2))
    first.update(random_batch(seed=1))
    first.save(str(tmp_path / "policy"))
    second.load(str(tmp_path / "policy"))
    assert first.update(random_batch(seed=2)) == second.update(random_batch(seed=2))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first.weights(), second.weights(), strict=True))


def test_saved_and_loaded_critic_goes_on_exactly(model_dir: str, tmp_path: Path) -> None:
    config = tiny_training_config(model_dir)
    first, second = (LocalCritic(config, Replicated(), 10) for _ in range(2))
    first.update(random_batch(seed=1))
    first.save(str(tmp_path / "critic"))
    second.load(str(tmp_path / "critic"))
    assert first.update(random_batch(seed=2)) == second.update(random_batch(seed=2))


def test_a_checkpoint_before_the_first_optimizer_step_changes_no_step(model_dir: str, tmp_path: Path) -> None:
    config = tiny_training_config(model_dir)
    unsaved, saved, loaded, returned = (LocalCritic(config, Replicated(), 10) for _ in range(4))
    saved.save(str(tmp_path / "critic"))
    returned.update(random_batch())
    for critic in (loaded, returned):
        critic.load(str(tmp_path / "critic"))
    for critic in (unsaved, saved, loaded, returned):
        critic.update(random_batch())
    expected = unsaved.module.state_dict()
    for critic in (saved, loaded, returned):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in critic.module.state_dict().items())


def test_saved_folder_tells_older_readers_its_rope_theta(model_dir: str, tmp_path: Path) -> None:
    LocalPolicy(tiny_training_config(model_dir), Replicated(), 1).save_pretrained(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]


def test_update_improves_its_own_objective(model_dir: str) -> None:
    config = with_policy(tiny_training_config(model_dir, lr=1e-3), entropy_coef=0.0)
    policy = LocalPolicy(config, Replicated(), 20)
    batch = replace(random_batch(), ref_log_probs=None)
    batch = replace(batch, old_log_probs=policy.log_probs(batch.rollout))
    losses = [policy.update(batch)["actor/policy_loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.01
