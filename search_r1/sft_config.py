"""The configuration of supervised fine-tuning, in the same manner as config.py. configs/sft.yaml mirrors it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from search_r1.config import ClusterConfig, ModelConfig, OptimConfig, ShardingConfig, TrackingConfig
from search_r1.config_checks import check_optim, check_seed, check_workers, value_of
from search_r1.errors import ConfigError

_STRICT = {"extra": "forbid"}


@dataclass(frozen=True, slots=True)
class SFTDataConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    train_files: tuple[str, ...] = ()
    """Parquet, JSON or JSON lines; each row holds `messages` with `role` and `content`, and perhaps `tools`."""
    val_files: tuple[str, ...] = ()
    dataset_info: str = ""
    """A LLaMA-Factory `dataset_info.json`; `train_files` and `val_files` then name datasets in it."""
    val_size: float = 0.0
    """Without `val_files`: examples held out of training, a share below 1 or a number."""
    max_rows: int | None = None
    """The first rows taken of each file or dataset; None takes all."""
    max_length: int = 2048
    """Tokens; a longer example is left out and counted, since its end would be missing."""
    max_bad_share: float = 0.01
    """Largest share of rows that cannot be used; above it the run does not start."""
    chat_template: str = "auto"
    """`auto` is the tokenizer's own; one of LLaMA-Factory's names is checked, or supplied where there is none."""


@dataclass(frozen=True, slots=True)
class SFTTrainingConfig:
    """What is learned, and in which steps."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    epochs: float = 1.0
    total_steps: int | None = None
    """None: `epochs` passes over the examples; a number goes on into further passes or stops within one."""
    batch_size: int | None = None
    """Examples an optimizer step, drawn at random; None fills `batch_tokens` instead."""
    batch_tokens: int = 16_384
    """Padded tokens an optimizer step, filled with examples of similar length."""
    max_tokens_per_micro_batch: int = 16_384
    """Hard cap on padded tokens that a worker holds at once; one longer example goes alone."""
    packing: Literal["auto", "padded", "packed"] = "auto"
    """`packed` lays examples end to end, without padding, none seeing another; `auto` packs on CUDA."""
    validate_every_steps: int = 0
    """0 validates only at the end."""
    max_bad_steps: int = 3
    """Non-finite losses or gradients in a row before training stops."""


@dataclass(frozen=True, slots=True)
class SFTTrainerConfig:
    """How the run is kept."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    save_every_steps: int = 500
    """Checkpoints to go on from; 0 writes none. The trained model is always saved at the end."""
    keep_checkpoints: int = 1
    resume: str = "auto"
    """`auto` goes on from the newest checkpoint in `output_dir`, `never` starts anew (also over a finished run), a path
    takes that checkpoint."""


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
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    cluster: ClusterConfig = field(default_factory=lambda: ClusterConfig(launcher="local"))
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


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
    for key in _POSITIVE:
        number = value_of(config, key)
        if number is not None and number <= 0:
            raise ConfigError(f"{key}={number} must be above 0")
    for key in ("data.val_size", "trainer.save_every_steps", "training.validate_every_steps"):
        if value_of(config, key) < 0:
            raise ConfigError(f"{key}={value_of(config, key)} must not be negative")
    for key in ("data.max_bad_share", "optim.warmup_ratio", "optim.min_lr_ratio"):
        if not 0 <= value_of(config, key) <= 1:
            raise ConfigError(f"{key}={value_of(config, key)} must lie between 0 and 1")
    if config.data.val_files and config.data.val_size:
        raise ConfigError("data.val_size holds examples out of training, data.val_files brings others: set one of them")
    for key in ("model.critic_path", "model.reference_path"):
        if value_of(config, key):
            raise ConfigError(f"{key} has no effect in supervised fine-tuning: leave it out")
    check_seed(config.seed)
    check_optim(config.optim, "optim")
    check_workers(config.sharding, config.cluster, [config.optim.name])


_POSITIVE = (
    "data.max_length",
    "data.max_rows",
    "training.epochs",
    "training.total_steps",
    "training.batch_size",
    "training.batch_tokens",
    "training.max_tokens_per_micro_batch",
    "training.max_bad_steps",
    "trainer.keep_checkpoints",
    "optim.lr",
    "optim.max_grad_norm",
    "cluster.num_workers",
    "cluster.cpus_per_worker",
    "sharding.replicas",
    "model.lora.alpha",
)
"""None passes: it stands for no limit."""
