"""Launch scripts written for Search-R1 run here, or say in one sentence why not."""

from __future__ import annotations

import logging
import re

import pytest

from search_r1.compose import compose_config
from search_r1.errors import ConfigError
from search_r1.legacy_keys import translate

BOTH = """
data.train_files=data/nq_search/train.parquet data.val_files=data/nq_search/test.parquet data.train_data_num=null
data.val_data_num=null data.train_batch_size=512 data.val_batch_size=256 data.max_prompt_length=4096
data.max_response_length=500 data.max_start_length=2048 data.max_obs_length=500 data.shuffle_train_dataloader=True
actor_rollout_ref.model.path=Qwen/Qwen2.5-3B actor_rollout_ref.model.enable_gradient_checkpointing=true
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size=64
actor_rollout_ref.actor.fsdp_config.param_offload=true actor_rollout_ref.actor.fsdp_config.grad_offload=true
actor_rollout_ref.actor.fsdp_config.optimizer_offload=true actor_rollout_ref.rollout.log_prob_micro_batch_size=128
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.ref.log_prob_micro_batch_size=128
actor_rollout_ref.ref.fsdp_config.param_offload=True actor_rollout_ref.rollout.temperature=1
actor_rollout_ref.actor.state_masking=true algorithm.no_think_rl=false trainer.logger=['wandb']
+trainer.val_only=false +trainer.val_before_train=true trainer.default_hdfs_dir=null trainer.n_gpus_per_node=8
trainer.nnodes=1 trainer.save_freq=100 trainer.test_freq=50 trainer.project_name=Search-R1
trainer.experiment_name=nq-search-r1 trainer.total_epochs=15 trainer.default_hdfs_dir=null
trainer.default_local_dir=verl_checkpoints/nq-search-r1 max_turns=2 retriever.url=http://127.0.0.1:8000/retrieve
retriever.topk=3
"""
GRPO = """
algorithm.adv_estimator=grpo actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285
actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.rollout.n_agent=5 trainer.total_training_steps=1005
"""
PPO = """
algorithm.adv_estimator=gae actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285
actor_rollout_ref.rollout.n_agent=1 critic.optim.lr=1e-5 critic.model.use_remove_padding=True
critic.optim.lr_warmup_steps_ratio=0.015 critic.model.path=Qwen/Qwen2.5-3B
critic.model.enable_gradient_checkpointing=true critic.ppo_micro_batch_size=8
critic.model.fsdp_config.param_offload=true critic.model.fsdp_config.grad_offload=true
critic.model.fsdp_config.optimizer_offload=true algorithm.kl_ctrl.kl_coef=0.001 trainer.critic_warmup=0
trainer.total_training_steps=1005
"""


def test_all_overrides_of_the_published_grpo_launcher_are_understood() -> None:
    config = compose_config("grpo", (BOTH + GRPO).split())
    assert (config.algorithm.advantage, config.rollout.group_size) == ("grpo", 5)
    assert (config.algorithm.kl_placement, config.algorithm.kl_estimator) == ("loss", "k3")
    assert (config.policy.optim.lr, config.policy.optim.warmup_ratio) == (1e-6, 0.285)
    assert (config.trainer.total_steps, config.trainer.save_every_steps) == (1005, 100)
    assert (config.validation.every_steps, config.validation.before_training) == (50, True)
    assert config.tracking.backends == ("wandb",)
    assert config.model.gradient_checkpointing


def test_all_overrides_of_the_published_ppo_launcher_are_understood() -> None:
    config = compose_config("ppo", (BOTH + PPO).split())
    assert (config.algorithm.advantage, config.rollout.group_size) == ("gae", 1)
    assert (config.critic.optim.lr, config.critic.optim.warmup_ratio) == (1e-5, 0.015)
    assert (config.model.critic_path, config.algorithm.kl_coef) == ("Qwen/Qwen2.5-3B", 0.001)
    assert config.run_dir == "verl_checkpoints/nq-search-r1"


def test_each_setting_without_effect_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        compose_config("ppo", (BOTH + PPO).split())
    messages = [record.message for record in caplog.records]
    assert len(messages) == len(set(messages))
    assert any(message.startswith("critic.ppo_micro_batch_size=8 has no effect here") for message in messages)
    assert not any("val_only" in message for message in messages)


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "+actor_rollout_ref.rollout.load_format=dummy_dtensor",
        "reward_model.enable=True",
        "critic.model.tokenizer_path=/m",
    ],
)
def test_what_is_not_known_of_their_groups_is_refused_by_its_whole_name(override: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(override)):
        compose_config("grpo", [override])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+trainer.val_only=true", "use ./evaluate.sh"),
        ("trainer.val_only=True", "use ./evaluate.sh"),
        ("reranker.do_rerank=true", "the retrieval server reranks"),
        ("reward_model.structure_format_score=0.2", "reward.function=em_format and reward.structure_score=0.2"),
    ],
)
def test_what_another_place_does_is_refused_with_its_place(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        compose_config("grpo", [override])


def test_one_logger_may_be_written_without_brackets() -> None:
    assert compose_config("grpo", ["trainer.logger=wandb", "rollout.group_size=5"]).tracking.backends == ("wandb",)


def test_minus_one_means_never_as_it_does_upstream() -> None:
    config = compose_config("grpo", ["trainer.save_freq=-1", "trainer.test_freq=-1", "rollout.group_size=5"])
    assert (config.trainer.save_every_steps, config.validation.every_steps) == (0, 0)


@pytest.mark.parametrize("one_first", [True, False])
def test_the_group_size_is_n_agent_where_n_of_one_stands_beside_it(one_first: bool) -> None:
    overrides = ["actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.n_agent=5"]
    translated, _ = translate(overrides if one_first else overrides[::-1])
    assert translated == ["rollout.group_size=5"]
    assert translate(["actor_rollout_ref.rollout.n=4"])[0] == ["rollout.group_size=4"]


def test_two_different_group_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        translate(["actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.n_agent=5"])


LOSS, COEF, TYPE = (f"actor_rollout_ref.actor.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"))


@pytest.mark.parametrize(
    ("name", "overrides", "placement", "estimator", "coefficient"),
    [
        ("ppo", [f"{LOSS}=True"], "loss", "k3", 0.001),
        ("ppo", ["algorithm.kl_placement=loss"], "loss", "k3", 0.001),
        ("ppo", ["algorithm.kl_placement=loss", "algorithm.kl_estimator=k2"], "loss", "k2", 0.001),
        ("grpo", [f"{LOSS}=False"], "reward", "k1", 0.001),
        ("grpo", [f"{LOSS}=False", f"{TYPE}=mse", "algorithm.kl_penalty=low_var_kl"], "reward", "k3", 0.001),
        ("grpo", [f"{LOSS}=True", f"{TYPE}=low_var_kl", "algorithm.kl_penalty=kl"], "loss", "k3", 0.001),
        ("grpo", [f"{LOSS}=True", f"{COEF}=0.05", "+algorithm.kl_ctrl.kl_coef=0.002"], "loss", "k3", 0.05),
        ("grpo", [f"{LOSS}=True", "algorithm.kl_ctrl.type=adaptive"], "loss", "k3", 0.001),
        ("ppo", [f"{LOSS}=False", f"{COEF}=0.05", "algorithm.kl_ctrl.kl_coef=0.002"], "reward", "k1", 0.002),
    ],
)
def test_where_kl_counts_decides_which_of_their_kl_settings_count(
    name: str, overrides: list[str], placement: str, estimator: str, coefficient: float
) -> None:
    algorithm = compose_config(name, overrides).algorithm
    found = (algorithm.kl_placement, algorithm.kl_estimator, algorithm.kl_coef, algorithm.kl_controller)
    assert found == (placement, estimator, coefficient, "fixed")


def test_kl_settings_that_are_passed_over_are_told_and_both_without_a_place_are_refused() -> None:
    both = [f"{COEF}=0.05", "algorithm.kl_ctrl.kl_coef=0.001"]
    _, notes = translate([f"{LOSS}=true", *both])
    assert notes[0].startswith("algorithm.kl_ctrl.kl_coef=0.001 has no effect here: it is for KL in the reward")
    with pytest.raises(ConfigError, match=rf"say which by {LOSS}=true or false"):
        translate(both)


def test_the_critic_takes_epochs_and_mini_batches_from_the_actor_unless_it_has_its_own() -> None:
    actor = ["actor_rollout_ref.actor.ppo_epochs=4", "actor_rollout_ref.actor.ppo_mini_batch_size=64"]
    config = compose_config("ppo", actor)
    assert (config.critic.epochs, config.critic.mini_batch_size) == (4, 64)
    config = compose_config("ppo", [*actor, "critic.ppo_epochs=2", "critic.mini_batch_size=32"])
    assert (config.critic.epochs, config.critic.mini_batch_size) == (2, 32)


def test_a_launcher_without_an_entropy_coefficient_hears_that_ours_is_another() -> None:
    actor = ["actor_rollout_ref.actor.clip_ratio=0.2"]
    assert any("policy.entropy_coef is 0" in note for note in translate(actor)[1])
    for named in ("actor_rollout_ref.actor.entropy_coeff=0.001", "policy.entropy_coef=0"):
        assert not any("policy.entropy_coef is 0" in note for note in translate([*actor, named])[1])
