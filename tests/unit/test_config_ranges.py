"""Values that would crash later, or train wrongly without a word, are refused before anything starts."""

from __future__ import annotations

import re

import pytest

from search_r1.compose import compose_config
from search_r1.config import ModelConfig
from search_r1.config_checks import check_training, training_warnings
from search_r1.errors import ConfigError
from search_r1.evaluate import expand
from search_r1.sft_config import OptimConfig, SFTConfig, SFTDataConfig, check_sft

REQUIRED = ["model.path=/m", "data.train_files=[a]", "data.val_files=[b]", "rollout.group_size=5"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.max_val_questions=0", "above 0"),
        ("data.max_val_questions=-1", "above 0"),
        ("algorithm.kl_target=0", "above 0"),
        ("algorithm.kl_horizon=0", "above 0"),
        ("policy.optim.betas=[1.5,0.9]", "at least 0 and below 1"),
        ("critic.optim.betas=[0.9,-0.1]", "at least 0 and below 1"),
        ("seed=99999999999999999999999", "between 0 and 2,147,483,647"),
        ("seed=-1", "between 0 and 2,147,483,647"),
        ("policy.clip_ratio_high=-1", "must not be negative"),
        ("critic.clip_value=-1", "above 0"),
        ("policy.optim.min_lr_ratio=-3", "between 0 and 1"),
        ("critic.optim.min_lr_ratio=2", "between 0 and 1"),
        ("critic.optim.weight_decay=-1", "must not be negative"),
        ("engine.max_batch_tokens=-5", "above 0"),
        ("engine.cpu_cache_gib=0", "above 0"),
        ("validation.top_p=0", "above 0"),
        ("cluster.start_timeout_s=0", "above 0"),
        ("policy.optim.lr=nan", "finite"),
        ("reward.structure_score=nan", "finite"),
        ("reward.format_score=inf", "finite"),
        ("reward.retrieval_score=-1", "must not be negative"),
        ("policy.dual_clip=nan", "above 1"),
        ("algorithm.importance_cap=nan", "above 0"),
        ("policy.optim.max_grad_norm=inf", "finite"),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_its_key(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(override.partition('=')[0])}.*{re.escape(words)}"):
        compose_config("grpo", [override])


@pytest.mark.parametrize(
    "override", ["data.max_val_questions=null", "engine.max_batch_tokens=null", "policy.clip_ratio_high=null"]
)
def test_null_stands_for_no_limit(override: str) -> None:
    assert compose_config("grpo", [override]) == compose_config("grpo", [])


def test_no_questions_to_evaluate_are_refused_by_their_short_name_too() -> None:
    with pytest.raises(ConfigError, match=r"data\.max_val_questions=0"):
        compose_config("eval", list(expand(["limit=0"])))


def test_evaluation_hears_nothing_of_what_matters_in_training_alone(caplog: pytest.LogCaptureFixture) -> None:
    config = compose_config("eval", ["critic.warmup_steps=3", "data.train_batch_size=8"])
    assert not caplog.records
    assert len(training_warnings(config)) == 3


def test_training_is_warned_of_what_teaches_nothing() -> None:
    config = compose_config("grpo", [*REQUIRED, "rollout.group_size=1"])
    (warning,) = check_training(config)
    assert "nothing is learned" in warning
    assert check_training(compose_config("grpo", REQUIRED)) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"seed": 2**40}, "seed"),
        ({"optim": OptimConfig(betas=(1.0, 0.9))}, "betas"),
        ({"optim": OptimConfig(min_lr_ratio=-3)}, "min_lr_ratio"),
    ],
)
def test_fine_tuning_refuses_the_same(settings: dict[str, object], words: str) -> None:
    needed = {"output_dir": "/o", "model": ModelConfig(path="/m"), "data": SFTDataConfig(train_files=("a",))}
    config = SFTConfig(**needed, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        check_sft(config)
