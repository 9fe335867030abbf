"""LLaMA-Factory's training files, translated: `python -m search_r1.sft --llamafactory file.yaml`.

A key maps to ours, is refused where it would change the result in a way we do not have, or is passed over with a note
where it changes nothing that is learned. Keys that a file leaves out have LLaMA-Factory's defaults.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from search_r1.errors import ConfigError

Settings = dict[str, Any]
"""Our dotted keys with their values."""

_SAME: dict[str, tuple[str, Any]] = {
    "model_name_or_path": ("model.path", ""),
    "trust_remote_code": ("model.trust_remote_code", False),
    "cutoff_len": ("data.max_length", 2048),
    "max_samples": ("data.max_rows", None),
    "val_size": ("data.val_size", 0.0),
    "output_dir": ("output_dir", ""),
    "seed": ("seed", 42),
    "learning_rate": ("optim.lr", 5e-5),
    "weight_decay": ("optim.weight_decay", 0.0),
    "max_grad_norm": ("optim.max_grad_norm", 1.0),
    "warmup_ratio": ("optim.warmup_ratio", 0.0),
    "num_train_epochs": ("training.epochs", 3.0),
    "save_steps": ("trainer.save_every_steps", 500),
    "save_total_limit": ("trainer.keep_checkpoints", 2),
    "run_name": ("tracking.run_name", None),
    "template": ("data.chat_template", "auto"),
}
"""Their key: ours, and their default."""

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "stage": (("sft",), "search_r1.main trains with PPO and GRPO"),
    "do_train": ((True,), "search_r1.evaluate evaluates"),
    "do_predict": ((False,), "search_r1.evaluate evaluates"),
    "predict_with_generate": ((False,), "search_r1.evaluate evaluates"),
    "fp16": ((False,), "set bf16: true"),
    "pure_bf16": ((False,), "bf16: true computes in bfloat16 and keeps float32 master weights"),
    "quantization_bit": ((), "weights are trained unquantized; leave it out"),
    "adapter_name_or_path": ((), "merge it with search_r1.merge_adapter, and name the merged folder"),
    "lora_dropout": ((0, 0.0), "adapters are trained without dropout; set it to 0"),
    "use_dora": ((False,), "plain LoRA is trained"),
    "use_rslora": ((False,), "plain LoRA is trained; multiply lora_alpha by the root of lora_rank instead"),
    "pissa_init": ((False,), "plain LoRA is trained"),
    "additional_target": ((), "only adapters are trained with LoRA"),
    "loraplus_lr_ratio": ((), "both factors have one learning rate"),
    "train_on_prompt": ((False,), "the loss covers what the assistant wrote"),
    "mask_history": ((False,), "the loss covers all assistant turns; cut the rows instead"),
    "adam_epsilon": ((1e-8,), "it is 1e-8 here"),
    "label_smoothing_factor": ((0, 0.0), "set it to 0"),
    "neftune_noise_alpha": ((), "leave it out"),
    "group_by_length": ((False,), "rows are drawn at random; training.batch_tokens fills steps by length"),
    "disable_shuffling": ((False,), "rows are shuffled by seed"),
    "dataloader_drop_last": ((False,), "the last rows of an epoch are trained on too"),
    "load_best_model_at_end": ((False,), "the last model is saved; validation/loss tells which checkpoint was best"),
    "streaming": ((False,), "files are read whole"),
    "mix_strategy": (("concat",), "datasets are read one after the other and shuffled"),
    "interleave_probs": ((), "datasets are read one after the other and shuffled"),
    "tokenized_path": ((), "rows are encoded anew; leave it out"),
    "default_system": ((), "give the rows a system column"),
    "tool_format": ((), "calls are written as the tool environment writes them"),
    "rope_scaling": ((), "change the model's own config.json"),
    "resize_vocab": ((False,), "the vocabulary stays as it is"),
    "split_special_tokens": ((False,), "control tokens in a row's text are text anyway"),
    "lr_scheduler_kwargs": (({},), "optim.min_lr_ratio=… after the file's name sets where decay ends"),
    "model_revision": (("main",), "fetch that revision, and name its folder"),
    "push_to_hub": ((False,), "nothing is uploaded"),
}
"""Values that change nothing here, and what to do about all others."""

_PASSED_OVER = {
    "cache_dir", "data_shared_file_system", "dataloader_num_workers", "dataloader_pin_memory",
    "ddp_find_unused_parameters", "ddp_timeout", "deepspeed", "disable_tqdm", "do_eval", "enable_liger_kernel",
    "eval_accumulation_steps", "eval_delay", "eval_on_start", "fsdp", "fsdp_config", "image_max_pixels",
    "image_min_pixels", "include_num_input_tokens_seen", "include_tokens_per_second", "log_level", "logging_dir",
    "logging_first_step", "logging_steps", "logging_strategy", "low_cpu_mem_usage", "metric_for_best_model",
    "overwrite_cache", "per_device_eval_batch_size", "plot_loss",
    "preprocessing_batch_size", "preprocessing_num_workers", "print_param_status", "save_only_model",
    "save_safetensors", "tf32", "torch_compile", "upcast_layernorm", "use_fast_tokenizer", "use_unsloth",
    "use_unsloth_gc", "video_max_pixels", "video_min_pixels",
}  # fmt: skip
"""Kernels, logging and file handling: nothing of it is learned."""

_RENAMED = {"evaluation_strategy": "eval_strategy"}
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
_ATTENTION = {"auto": "auto", "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_hf")
_TRACKERS = ("wandb", "tensorboard")


def translate_llamafactory(values: Mapping[str, Any], num_workers: int = 1) -> tuple[Settings, list[str]]:
    """Our settings, and a note for each key that was passed over.

    `num_workers` stand for the devices over which LLaMA-Factory would multiply `per_device_train_batch_size`.

    Raises:
        ConfigError: keys that are unknown or cannot be honoured, all of them in one message.
    """
    given = {_RENAMED.get(key, key): value for key, value in values.items() if value is not None}
    wrong = [problem for key, value in given.items() if (problem := _problem(key, value))]
    if wrong:
        raise ConfigError("; ".join(wrong))
    settings: Settings = {ours: given.get(key, default) for key, (ours, default) in _SAME.items()}
    for group in _GROUPS:
        settings |= group(given, num_workers)
    notes = [f"{key} is passed over: it changes nothing that is learned" for key in given if key in _PASSED_OVER]
    if given.get("eval_strategy") == "epoch" or given.get("save_strategy") == "epoch":
        notes.append("validation and checkpoints go by steps: training.validate_every_steps, trainer.save_every_steps")
    if settings["training.packing"] == "packed":
        notes.append("packed rows do not see one another (LLaMA-Factory's neat_packing)")
    return settings, notes


def nearest(word: str, names: Iterable[str]) -> str:
    """ ", did you mean x?" or nothing."""
    matches = difflib.get_close_matches(word, list(names), n=1)
    return f", did you mean {matches[0]!r}?" if matches else ""


def _problem(key: str, value: Any) -> str:
    if key in _REFUSED:
        harmless, remedy = _REFUSED[key]
        return "" if value in harmless else f"{key}={value} is not supported: {remedy}"
    known = [*_SAME, *_READ, *_PASSED_OVER]
    if key in known:
        return ""
    return f"{key} is no key of LLaMA-Factory known here{nearest(key, [*known, *_REFUSED])} (take it out to go on)"


def _choice(given: Mapping[str, Any], key: str, default: str, choices: Mapping[str, str]) -> str:
    value = str(given.get(key, default))
    if value not in choices:
        raise ConfigError(f"{key}={value} is not supported: choose one of {', '.join(choices)}")
    return choices[value]


def _number(given: Mapping[str, Any], key: str, default: Any) -> Any:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key}={value!r} must be a number")
    return value


def _names(value: Any) -> list[str]:
    listed = value.split(",") if isinstance(value, str) else list(value or ())
    return [str(name).strip() for name in listed]


def _data(given: Mapping[str, Any], num_workers: int) -> Settings:
    folder = str(given.get("dataset_dir", "data"))
    if not given.get("dataset"):
        raise ConfigError("dataset is not set: name datasets of dataset_info.json, e.g. dataset: mine")
    return {
        "data.dataset_info": f"{folder.rstrip('/')}/dataset_info.json",
        "data.train_files": _names(given["dataset"]),
        "data.val_files": _names(given.get("eval_dataset")),
    }


def _model(given: Mapping[str, Any], num_workers: int) -> Settings:
    method = _choice(given, "finetuning_type", "lora", {"lora": "lora", "full": "full"})
    rank = _number(given, "lora_rank", 8)
    targets = _names(given.get("lora_target", "all"))
    checkpointing = given.get("gradient_checkpointing", False) and not given.get("disable_gradient_checkpointing")
    return {
        "model.dtype": "bfloat16" if given.get("bf16") else "float32",
        "model.attention": _choice(given, "flash_attn", "auto", _ATTENTION),
        "model.gradient_checkpointing": bool(checkpointing),
        "model.lora.rank": rank if method == "lora" else 0,
        "model.lora.alpha": _number(given, "lora_alpha", 2 * rank),
        "model.lora.targets": "all-linear" if targets == ["all"] else targets,
    }


def _optimizer(given: Mapping[str, Any], num_workers: int) -> Settings:
    _choice(given, "optim", "adamw_torch", dict.fromkeys(_OPTIMIZERS, "adamw"))
    total = _number(given, "max_steps", -1)
    settings: Settings = {
        "optim.name": "adamw",
        "optim.betas": [given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.999)],
        "optim.schedule": _choice(given, "lr_scheduler_type", "linear", _SCHEDULES),
        "optim.min_lr_ratio": 0.0,
        "training.total_steps": total if total > 0 else None,
    }
    warmup = _number(given, "warmup_steps", 0)
    if 0 < warmup < 1:
        settings["optim.warmup_ratio"] = warmup
    elif warmup and total > 0:
        settings["optim.warmup_ratio"] = warmup / total
    elif warmup:
        raise ConfigError(f"warmup_steps={warmup} needs max_steps: give warmup_ratio, a share of all steps, instead")
    if given.get("lr_scheduler_type") == "constant":
        settings["optim.warmup_ratio"] = 0.0
    return settings


def _batches(given: Mapping[str, Any], num_workers: int) -> Settings:
    """Rows a step; or tokens, where rows are packed up to `cutoff_len`."""
    rows, length = _number(given, "per_device_train_batch_size", 8), _number(given, "cutoff_len", 2048)
    rows_a_step = rows * _number(given, "gradient_accumulation_steps", 1) * num_workers
    packed = bool(given.get("packing") or given.get("neat_packing"))
    return {
        "training.packing": "packed" if packed else "auto",
        "training.batch_size": None if packed else rows_a_step,
        "training.batch_tokens": rows_a_step * length,
        "training.max_tokens_per_micro_batch": rows * length,
    }


def _run(given: Mapping[str, Any], num_workers: int) -> Settings:
    resume = given.get("resume_from_checkpoint", not given.get("overwrite_output_dir"))
    trackers = _names(given.get("report_to", "none"))
    unknown = [name for name in trackers if name not in (*_TRACKERS, "none")]
    if unknown:
        raise ConfigError(f"report_to={unknown[0]} is not supported: choose {' or '.join(_TRACKERS)}, or none")
    saves, validates = given.get("save_strategy", "steps"), given.get("eval_strategy", "no")
    settings: Settings = {
        "trainer.resume": resume if isinstance(resume, str) else "auto" if resume else "never",
        "tracking.backends": ["console", *(name for name in _TRACKERS if name in trackers)],
        "training.validate_every_steps": _number(given, "eval_steps", 500) if validates == "steps" else 0,
    }
    return settings | ({"trainer.save_every_steps": 0} if saves in ("no", False) else {})  # YAML reads no as False


_GROUPS: tuple[Callable[[Mapping[str, Any], int], Settings], ...] = (_data, _model, _optimizer, _batches, _run)
_READ = {
    "dataset", "dataset_dir", "eval_dataset", "finetuning_type", "lora_rank", "lora_alpha", "lora_target", "bf16",
    "flash_attn", "gradient_checkpointing", "disable_gradient_checkpointing", "optim", "max_steps", "adam_beta1",
    "adam_beta2", "lr_scheduler_type", "warmup_steps", "per_device_train_batch_size",
    "gradient_accumulation_steps", "packing", "neat_packing", "resume_from_checkpoint", "overwrite_output_dir",
    "report_to", "save_strategy", "eval_strategy", "eval_steps",
}  # fmt: skip
"""What the groups read."""
