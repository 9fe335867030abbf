"""Training files of LLaMA-Factory, as settings of ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from search_r1.compose import known_keys
from search_r1.errors import ConfigError
from search_r1.llamafactory_keys import translate_llamafactory
from search_r1.sft import compose_sft
from search_r1.sft_config import SFTConfig

LORA = """
model_name_or_path: models/base
trust_remote_code: false
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_en_demo
template: qwen
cutoff_len: 1024
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
output_dir: saves/mine
logging_steps: 10
save_steps: 250
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 1.5
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 50
seed: 7
"""
MINIMAL = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o"}


def test_a_published_training_file_means_here_what_it_means_there(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(LORA)
    config = compose_sft([], str(tmp_path / "train.yaml"))
    assert (config.model.path, config.model.dtype, config.output_dir) == ("models/base", "bfloat16", "saves/mine")
    lora = config.model.lora
    assert (lora.rank, lora.alpha, lora.targets) == (8, 16, "all-linear")
    data = config.data
    assert (data.dataset_info, data.train_files) == ("data/dataset_info.json", ("identity", "alpaca_en_demo"))
    assert (data.max_length, data.max_rows, data.val_size, data.chat_template) == (1024, 1000, 0.1, "qwen")
    optim = config.optim
    assert (optim.lr, optim.weight_decay, optim.schedule, optim.warmup_ratio) == (1e-4, 0.0, "cosine", 0.1)
    training = config.training
    assert (training.epochs, training.batch_size, training.max_tokens_per_micro_batch) == (1.5, 16, 2048)
    assert (training.validate_every_steps, config.trainer.save_every_steps, config.seed) == (50, 250, 7)


def test_overrides_stand_above_the_file_and_workers_multiply_the_batch(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(LORA)
    overrides = ["optim.lr=3e-5", "cluster.launcher=ray", "cluster.num_workers=4"]
    config = compose_sft(overrides, str(tmp_path / "train.yaml"))
    assert (config.optim.lr, config.training.batch_size) == (3e-5, 64)


def test_what_a_file_leaves_out_has_the_defaults_of_llama_factory() -> None:
    settings, notes = translate_llamafactory(MINIMAL)
    assert notes == []
    expected = {
        "model.lora.rank": 8,
        "model.lora.alpha": 16,
        "optim.lr": 5e-5,
        "optim.schedule": "linear",
        "optim.weight_decay": 0.0,
        "training.epochs": 3.0,
        "training.batch_size": 8,
        "seed": 42,
        "model.dtype": "float32",
        "trainer.save_every_steps": 500,
    }
    assert {key: settings[key] for key in expected} == expected


def test_every_translation_leads_to_a_key_that_exists() -> None:
    assert translate_llamafactory(MINIMAL)[0].keys() <= set(known_keys(SFTConfig))


def test_packing_counts_tokens_and_says_that_rows_stay_apart() -> None:
    settings, notes = translate_llamafactory({**MINIMAL, "packing": True, "cutoff_len": 100})
    assert (settings["training.packing"], settings["training.batch_size"]) == ("packed", None)
    assert settings["training.batch_tokens"] == 800
    assert "do not see one another" in notes[0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"finetuning_type": "full"}, {"model.lora.rank": 0}),
        ({"lora_target": "q_proj, v_proj"}, {"model.lora.targets": ["q_proj", "v_proj"]}),
        ({"max_steps": 200, "warmup_steps": 20}, {"training.total_steps": 200, "optim.warmup_ratio": 0.1}),
        ({"warmup_steps": 0.05}, {"optim.warmup_ratio": 0.05}),
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.1}, {"optim.warmup_ratio": 0.0}),
        ({"eval_strategy": "no", "eval_steps": 10}, {"training.validate_every_steps": 0}),
        ({"evaluation_strategy": "steps", "eval_steps": 10}, {"training.validate_every_steps": 10}),
        ({"resume_from_checkpoint": "saves/x"}, {"trainer.resume": "saves/x"}),
        ({"resume_from_checkpoint": False}, {"trainer.resume": "never"}),
        ({"report_to": ["wandb"]}, {"tracking.backends": ["console", "wandb"]}),
        ({"dataset_dir": "mine/", "eval_dataset": "e"}, {"data.dataset_info": "mine/dataset_info.json"}),
        ({"flash_attn": "fa2"}, {"model.attention": "flash_attention_2"}),
        ({"save_strategy": "no"}, {"trainer.save_every_steps": 0}),
        ({"packing": True, "neat_packing": False}, {"training.packing": "packed"}),
        ({"neat_packing": True, "packing": False}, {"training.packing": "packed"}),
        ({"packing": False, "neat_packing": False}, {"training.packing": "auto"}),
        ({"overwrite_output_dir": True}, {"trainer.resume": "never"}),
        ({"overwrite_output_dir": False}, {"trainer.resume": "auto"}),
        ({"overwrite_output_dir": True, "resume_from_checkpoint": "saves/x"}, {"trainer.resume": "saves/x"}),
    ],
)
def test_keys_with_a_meaning_of_their_own(given: dict[str, Any], expected: dict[str, Any]) -> None:
    settings, _ = translate_llamafactory({**MINIMAL, **given})
    assert {key: settings[key] for key in expected} == expected


def test_a_strategy_of_no_without_quotes_turns_saving_and_validating_off(tmp_path: Path) -> None:
    text = LORA.replace("eval_strategy: steps", "eval_strategy: no\nsave_strategy: no")
    (tmp_path / "train.yaml").write_text(text)
    config = compose_sft([], str(tmp_path / "train.yaml"))
    assert (config.trainer.save_every_steps, config.training.validate_every_steps) == (0, 0)


def test_keys_that_change_nothing_are_passed_over_with_a_line_each() -> None:
    _, notes = translate_llamafactory({**MINIMAL, "logging_steps": 5, "plot_loss": True, "cache_dir": None})
    assert [note.split()[0] for note in notes] == ["logging_steps", "plot_loss"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"stage": "dpo"}, "stage=dpo is not supported"),
        ({"finetuning_type": "freeze"}, "choose one of lora, full"),
        ({"lora_dropout": 0.1}, "lora_dropout=0.1 is not supported: adapters are trained without dropout"),
        ({"fp16": True}, "set bf16: true"),
        ({"quantization_bit": 4}, "unquantized"),
        ({"learning_rat": 1e-4}, "learning_rat is no key of LLaMA-Factory known here, did you mean 'learning_rate'?"),
        ({"warmup_steps": 20}, "needs max_steps: give warmup_ratio"),
        ({"optim": "lion_32bit"}, "optim=lion_32bit is not supported"),
        ({"lr_scheduler_type": "polynomial"}, "choose one of linear, cosine"),
        ({"report_to": "swanlab"}, "report_to=swanlab"),
        ({"dataset": ""}, "dataset is not set"),
        ({"per_device_train_batch_size": "two"}, "must be a number"),
    ],
)
def test_keys_that_would_change_the_result_are_refused_with_a_remedy(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        translate_llamafactory({**MINIMAL, **given})


def test_all_wrong_keys_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"lora_dropout.*neftune_noise_alpha"):
        translate_llamafactory({**MINIMAL, "lora_dropout": 0.1, "neftune_noise_alpha": 5})
