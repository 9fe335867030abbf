"""The configuration of supervised fine-tuning, in the same manner as config.py. configs/sft.yaml mirrors it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from search_r1.config import ModelConfig, OptimConfig
from search_r1.errors import ConfigError

_STRICT = {"extra": "forbid"}


@dataclass(frozen=True, slots=True)
class SFTDataConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    train_files: tuple[str, ...] = ()
    """Parquet or JSON lines; each row holds `messages` with `role` and `content`."""
    val_files: tuple[str, ...] = ()
    max_length: int = 2048
    """Tokens; a longer example is left out and counted, since its end would be missing."""


@dataclass(frozen=True, slots=True)
class SFTTrainingConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    epochs: int = 1
    total_steps: int | None = None
    """None: `epochs` passes over the examples; a number goes on into further passes or stops within one."""
    batch_tokens: int = 16_384
    """Padded tokens an optimizer step, filled with examples of similar length."""
    max_tokens_per_micro_batch: int = 16_384
    """Hard cap on padded tokens held at once; one longer example goes alone."""
    validate_every_steps: int = 0
    """0 validates only at the end."""
    max_bad_steps: int = 3
    """Non-finite losses or gradients in a row before training stops."""


@dataclass(frozen=True, slots=True)
class SFTConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    output_dir: str = ""
    """Becomes a plain Hugging Face folder, with metrics.jsonl beside the weights."""
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5, warmup_ratio=0.03, schedule="cosine"))
    training: SFTTrainingConfig = field(default_factory=SFTTrainingConfig)


def check_sft(config: SFTConfig) -> None:
    """Apply the rules that a single type cannot express.

    Raises:
        ConfigError: with key, value and remedy.
    """
    for key, value, what in (
        ("model.path", config.model.path, "a Hugging Face folder or hub name"),
        ("data.train_files", config.data.train_files, "a parquet or JSON lines file with a `messages` column"),
        ("output_dir", config.output_dir, "a folder for the trained model"),
    ):
        if not value:
            raise ConfigError(f"{key} is not set: give {what}, e.g. {key}=…")
    training = config.training
    for key, number in (
        ("data.max_length", config.data.max_length),
        ("training.epochs", training.epochs),
        ("training.total_steps", 1 if training.total_steps is None else training.total_steps),
        ("training.batch_tokens", training.batch_tokens),
        ("training.max_tokens_per_micro_batch", training.max_tokens_per_micro_batch),
        ("training.max_bad_steps", training.max_bad_steps),
        ("optim.lr", config.optim.lr),
        ("optim.max_grad_norm", config.optim.max_grad_norm),
    ):
        if number <= 0:
            raise ConfigError(f"{key}={number} must be above 0")
