from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from search_r1.compose import CONFIG_DIR, build_config, compose_config, compose_dict, known_keys, to_yaml
from search_r1.config import Config
from search_r1.config_checks import full_context_length, training_warnings
from search_r1.errors import ConfigError
from search_r1.legacy_keys import LEGACY_KEYS, translate
from search_r1.sft_config import SFTConfig

PRODUCT = Path(__file__).parents[2]


def test_base_yaml_holds_every_key_with_its_default() -> None:
    assert build_config(Config, compose_dict("base", [])) == Config()


def test_every_key_in_base_yaml_has_a_comment() -> None:
    lines = (CONFIG_DIR / "base.yaml").read_text().splitlines()
    for above, line in pairwise(lines):
        is_key = line.strip() and not line.strip().startswith("#") and not line.rstrip().endswith(":")
        assert not is_key or above.strip().startswith("#"), f"no comment above {line!r}"


def test_sft_yaml_holds_the_defaults_with_a_comment_on_each() -> None:
    assert build_config(SFTConfig, compose_dict("sft", [])) == SFTConfig()
    lines = (CONFIG_DIR / "sft.yaml").read_text().splitlines()
    for above, line in pairwise(lines):
        is_key = line.strip() and not line.strip().startswith("#") and not line.rstrip().endswith(":")
        assert not is_key or above.strip().startswith("#"), f"no comment above {line!r}"


@pytest.mark.parametrize("key", sorted(known_keys(Config)))
def test_every_key_is_read_somewhere(key: str) -> None:
    name = key.rsplit(".", 1)[-1]
    sources = [
        p
        for p in (PRODUCT / "search_r1").rglob("*.py")
        if p.name not in ("config.py", "config_checks.py", "legacy_keys.py")
    ]
    assert any(re.search(rf"\.{name}\b", path.read_text()) for path in sources), f"nobody reads {key}"


@pytest.mark.parametrize("name", ["grpo", "ppo", "eval"])
def test_shipped_configs_compose_without_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config = compose_config(name, ["rollout.group_size=5"])
    assert not caplog.records
    assert not training_warnings(config)


def test_quick_start_sets_ppo_apart_only_in_ppo() -> None:
    assert compose_config("ppo", ["experiment=quickstart"]).critic.warmup_steps > 0
    assert compose_config("grpo", ["experiment=quickstart"]).critic.warmup_steps == 0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("policy.optim.lrr=1", "did you mean policy.optim.lr"),
        ("temperature=1", "did you mean rollout.temperature"),
        ("data.train_batch_size=x", "data.train_batch_size='x'"),
        ("engine.name=sglang", "'hf' or 'vllm'"),
        ("engine=sglang", "hf"),
        ("experiment=quickstar", "quickstart"),
        ("rollout.top_p=0.9", "top_p=1"),
        ("rollout.temperature=0", "above 0"),
        ("rollout.temperature=-1", "must not be negative"),
        ("algorithm.kl_controller=adaptive", "kl_placement=reward"),
        ("policy.dual_clip=0.5", "above 1"),
        ("algorithm.importance_cap=0", "above 0, usually 2"),
        ("algorithm.importance_mask_above=0.5", "set it above 1"),
        ("rollout.max_staleness=-1", "must not be negative"),
        ("model.lora.rank=-1", "must not be negative"),
        ("model.lora.alpha=0", "above 0"),
        ("model.lora.ranks=8", "did you mean model.lora.rank"),
        ("policy.packing=pack", "'packed'"),
        ("engine.weight_transfer=nccl", "set it to auto, or cluster.gpus_per_worker above 0"),
        ("engine.sleep_level=3", "1"),
        ("rollout.max_void_share=1.5", "between 0 and 1"),
        ("rollout.max_prompt_length=100", "leaves no room"),
        ("data.train_batch_size=0", "above 0"),
        ("this is no override", "override"),
    ],
)
def test_a_wrong_setting_is_named_with_its_remedy(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        compose_config("grpo", [override])


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("engine.name=hf", "set engine.name=vllm, or rollout.max_staleness=0"),
        ("rollout.schedule=lockstep", "set it to async, or rollout.max_staleness=0"),
        ("engine.sleep_while_training=true", "set it to false, or rollout.max_staleness=0"),
        ("policy.offload_while_generating=true", "set it to false, or rollout.max_staleness=0"),
    ],
)
def test_what_cannot_overlap_with_the_update_is_refused_with_a_remedy(override: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        compose_config("grpo", ["engine.name=vllm", "rollout.max_staleness=1", override])
    compose_config("grpo", ["engine.name=vllm", "rollout.max_staleness=1"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.importance_mask_above=5", "no effect on-policy"),
        ("rollout.group_size=1", "nothing is learned"),
        ("critic.warmup_steps=3", "no critic"),
        ("environment.tools=[kit]", "set environment.name=tools"),
        ("data.train_batch_size=8", "every pass over a batch is one optimizer step"),
        ("sharding.replicas=2", "sharding.name=fsdp2"),
        ("sharding.cpu_offload=true", "sharding.name=fsdp2"),
        ("engine.sleep_level=2", "no effect with engine.sleep_while_training=false"),
        ("engine.tensor_parallel_size=2", "keeps a model whole"),
        ("algorithm.gamma=0.9", "algorithm.gamma has no effect under GRPO"),
        ("algorithm.kl_horizon=5", "algorithm.kl_horizon has no effect with algorithm.kl_controller=fixed"),
        ("reward.structure_score=0.5", "without reward.function=em_format"),
        ("reward.format_score=0.5", "without reward.function=em_format or recall_f1"),
        ("policy.optim.min_lr_ratio=0.1", "with optim.schedule=constant"),
        ("validation.top_p=0.5", "which is greedy"),
        ("environment.answer_pattern=boxed", "set environment.name=tools"),
        ("algorithm.kl_estimator=k1", "expected gradient 0"),
    ],
)
def test_a_setting_without_effect_is_a_warning(override: str, words: str, caplog: pytest.LogCaptureFixture) -> None:
    config = compose_config("grpo", ["engine.name=hf", override])
    assert words in " ".join([caplog.text, *training_warnings(config)])


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("ppo", ["algorithm.kl_controller=adaptive", "algorithm.kl_coef=0"], "which it would multiply"),
        ("ppo", ["algorithm.normalize_by_std=false"], "under PPO: there are no groups"),
        ("ppo", ["critic.warmup_steps=50", "trainer.total_steps=50"], "the policy stays as it is"),
        ("grpo", ["algorithm.kl_placement=none", "model.reference_path=/m"], "model.reference_path has no effect"),
        ("grpo", ["algorithm.kl_coef=0", "model.reference_path=/m"], "model.reference_path has no effect"),
        ("grpo", ["trainer.total_steps=3", "trainer.epochs=5"], "beside trainer.total_steps"),
    ],
)
def test_settings_that_silence_one_another_are_a_warning(name: str, overrides: list[str], words: str) -> None:
    (warning,) = training_warnings(compose_config(name, overrides))
    assert words in warning


def test_a_setting_that_is_read_is_no_warning() -> None:
    read = ["reward.structure_score=0.5", "policy.optim.schedule=cosine", "policy.optim.min_lr_ratio=0.1"]
    config = compose_config("ppo", ["reward.function=em_format", "algorithm.gamma=0.9", "trainer.epochs=5", *read])
    assert training_warnings(config) == []


def test_legacy_overrides_of_a_published_launcher_are_understood() -> None:
    overrides = [
        "data.train_files=/d/train.parquet",
        "data.val_files=/d/test.parquet",
        "data.train_data_num=null",
        "data.train_batch_size=512",
        "data.max_prompt_length=4096",
        "data.max_response_length=500",
        "data.max_start_length=2048",
        "data.max_obs_length=500",
        "data.shuffle_train_dataloader=True",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.model.path=/m",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.001",
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
        "actor_rollout_ref.rollout.n_agent=5",
        "actor_rollout_ref.actor.state_masking=true",
        "trainer.total_training_steps=1005",
        "max_turns=4",
        "retriever.url=http://127.0.0.1:8000/retrieve",
        "retriever.topk=3",
    ]
    config = compose_config("grpo", overrides)
    assert config.data.train_files == ("/d/train.parquet",)
    assert (config.rollout.group_size, config.rollout.max_turns) == (5, 4)
    assert (config.algorithm.kl_placement, config.algorithm.kl_estimator) == ("loss", "k3")
    assert config.environment.retriever_urls == ("http://127.0.0.1:8000/retrieve",)
    assert config.trainer.total_steps == 1005


def test_each_translation_is_told_and_gone_meanings_say_so() -> None:
    translated, notes = translate(["max_turns=2", "actor_rollout_ref.actor.state_masking=true", "seed=1"])
    assert translated == ["rollout.max_turns=2", "seed=1"]
    assert notes[0] == "max_turns=2 became rollout.max_turns=2"
    assert "never trained on" in notes[1]


def test_every_legacy_key_leads_to_a_key_that_exists() -> None:
    known = set(known_keys(Config))
    for key, target in LEGACY_KEYS.items():
        if isinstance(target, str) and " " not in target:
            assert target in known, f"{key} leads to {target}"


def test_the_shown_configuration_can_be_read_back() -> None:
    from omegaconf import OmegaConf

    config = compose_config("ppo", ["experiment=quickstart"])
    assert build_config(Config, OmegaConf.to_container(OmegaConf.create(to_yaml(config)))) == config  # type: ignore[arg-type]


def test_default_lengths_follow_the_sizing_rule_of_the_field() -> None:
    rollout = Config().rollout
    assert full_context_length(rollout) == 2048 + 500 * 3 + 500 * 2


def test_replicas_must_share_the_workers_evenly() -> None:
    settings = ["sharding.name=fsdp2", "cluster.launcher=ray", "rollout.group_size=5", "sharding.replicas=2"]
    assert compose_config("grpo", [*settings, "cluster.num_workers=4"]).sharding.replicas == 2
    with pytest.raises(ConfigError, match=r"sharding\.replicas=2 does not divide cluster\.num_workers=3"):
        compose_config("grpo", [*settings, "cluster.num_workers=3"])


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (["engine.num_engines=3"], "takes 3 GPUs"),
        (["engine.tensor_parallel_size=4"], "takes 4 GPUs"),
        (["cluster.gpus_per_worker=8"], "set it to 1 and cluster.num_workers to the GPUs of all nodes"),
    ],
)
def test_engines_that_have_no_gpus_to_share_are_refused_with_a_remedy(settings: list[str], remedy: str) -> None:
    two = ["engine.name=vllm", "cluster.num_workers=2", "cluster.gpus_per_worker=0.5"]
    with pytest.raises(ConfigError, match=remedy):
        compose_config("grpo", [*two, *settings])
    compose_config("grpo", [*two, "engine.num_engines=2"])
    compose_config("grpo", [*two, "engine.num_engines=3", "cluster.gpus_per_worker=1"])


def test_lora_targets_are_a_name_or_a_list() -> None:
    assert compose_config("grpo", ["rollout.group_size=5"]).model.lora.targets == "all-linear"
    listed = compose_config("grpo", ["rollout.group_size=5", "model.lora.targets=[q_proj,v_proj]"])
    assert listed.model.lora.targets == ("q_proj", "v_proj")
    with pytest.raises(ConfigError, match="targets"):
        compose_config("grpo", ["model.lora.targets=q_proj"])
