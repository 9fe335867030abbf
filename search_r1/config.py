"""The configuration as frozen dataclasses: every key, its unit and its default. configs/base.yaml mirrors it.

Sizes are global: a batch counts questions over all workers, per-worker sizes are computed. `check` holds the rules
that span keys. `compose.py` fills these classes; nothing below the entry points sees Hydra or OmegaConf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from search_r1.errors import ConfigError

_STRICT = {"extra": "forbid"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    path: str = ""
    """Hugging Face folder or hub name of the policy."""
    critic_path: str | None = None
    """The critic's trunk; None starts from the policy's weights."""
    reference_path: str | None = None
    """The reference's weights; None means the policy as it was at the start."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward pass; master weights and the optimizer stay float32."""
    attention: Literal["auto", "flash_attention_2", "sdpa", "eager"] = "auto"
    """`auto` takes flash-attn on CUDA where it is installed, else SDPA."""
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class DataConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    train_files: tuple[str, ...] = ()
    val_files: tuple[str, ...] = ()
    train_batch_size: int = 512
    """Questions a step; trajectories are this times `rollout.group_size`."""
    val_batch_size: int = 256
    shuffle: bool = True
    template: str = "dataset"
    """`dataset` keeps the prompt column; a name from prompts.py renders the bare question anew."""
    max_val_questions: int | None = None


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    schedule: Literal["auto", "lockstep", "async"] = "auto"
    group_size: int = 1
    """Trajectories a question (GRPO's G)."""
    temperature: float = 1.0
    top_p: float = 1.0
    max_turns: int = 2
    """Turns that may act; one last generation, whose search is not executed, follows them."""
    max_start_length: int = 2048
    """Tokens of the first prompt; a longer one ends OUT_OF_TOKENS, it is never cut."""
    max_response_length: int = 500
    """Sampled tokens a turn."""
    max_obs_length: int = 500
    """Tokens an observation, its tags included; passages are cut inside the tags."""
    max_prompt_length: int = 4096
    """Context budget in tokens: prompt, completions and observations together."""
    end_on_eos: bool = False
    """A turn that ends with the end-of-text token and no action ends the trajectory."""
    max_void_share: float = 0.1
    """Largest share of trajectories lost to infrastructure failures before a step stops with an error."""


@dataclass(frozen=True, slots=True)
class ValidationConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    temperature: float = 0.0
    top_p: float = 1.0
    before_training: bool = True
    every_steps: int = 50
    """0 validates only at the end."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    name: Literal["hf", "vllm"] = "vllm"
    num_engines: int = 1
    """vLLM engines side by side; the HF engine lives in every training worker instead."""
    tensor_parallel_size: int = 1
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` is `model.dtype`."""
    max_batch_size: int = 256
    """Sequences decoded together by one engine."""
    max_batch_tokens: int | None = None
    """HF: cached tokens at a time (rows times length); vLLM: its max_num_batched_tokens. None: no further limit."""
    gpu_memory_utilization: float = 0.5
    cpu_cache_gib: float = 2.0
    """vLLM on a CPU: GiB of key/value cache."""
    enforce_eager: bool = False
    max_parity_error: float = 0.05
    """Largest mean absolute difference between engine and trainer log-probs of a step's sampled tokens."""


@dataclass(frozen=True, slots=True)
class EnvironmentConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    name: Literal["search"] = "search"
    retriever_urls: tuple[str, ...] = ("http://127.0.0.1:8000/retrieve",)
    top_k: int = 3
    timeout_s: float = 30.0
    max_retries: int = 4
    """After the first attempt, over all URLs, with exponential backoff and jitter."""
    max_queries_per_request: int = 256
    max_query_chars: int = 2000
    """A longer query is cut before it is sent."""


@dataclass(frozen=True, slots=True)
class RewardConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    function: str = "em"
    """A name from rewards/, or `package.module:function`."""
    structure_score: float = 0.2
    format_score: float = 0.1
    retrieval_score: float = 0.0


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    advantage: Literal["grpo", "gae"] = "grpo"
    """`gae` is PPO with a critic."""
    gamma: float = 1.0
    lam: float = 1.0
    normalize_by_std: bool = True
    """GRPO: divide by the group's standard deviation."""
    kl_placement: Literal["none", "loss", "reward"] = "loss"
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    kl_coef: float = 0.001
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` moves the coefficient towards `kl_target` (KL in the reward only)."""
    kl_target: float = 6.0
    kl_horizon: int = 10_000


@dataclass(frozen=True, slots=True)
class OptimConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    lr: float = 1e-6
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    warmup_ratio: float = 0.0
    """Share of all optimizer steps spent on linear warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    min_lr_ratio: float = 0.0
    max_grad_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    optim: OptimConfig = field(default_factory=OptimConfig)
    mini_batch_size: int = 256
    """Questions an optimizer step."""
    epochs: int = 1
    """Passes over a step's batch."""
    max_tokens_per_micro_batch: int = 16_384
    """Hard cap on padded tokens a worker holds at once; one longer sequence goes alone."""
    clip_ratio: float = 0.2
    clip_ratio_high: float | None = None
    """Upper clip range; None is `clip_ratio`."""
    dual_clip: float | None = None
    """Lower bound factor for negative advantages (arXiv:1912.09729), e.g. 3.0; None is off."""
    entropy_coef: float = 0.0
    loss_aggregation: Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"] = "token-mean"


@dataclass(frozen=True, slots=True)
class CriticConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    mini_batch_size: int = 256
    epochs: int = 1
    max_tokens_per_micro_batch: int = 16_384
    clip_value: float = 0.5
    warmup_steps: int = 0
    """First steps that train the critic alone."""


@dataclass(frozen=True, slots=True)
class ShardingConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    name: Literal["none", "fsdp2"] = "none"
    cpu_offload: bool = False


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    launcher: Literal["ray", "local"] = "ray"
    """`local` runs everything in the driver's process: one worker, no Ray."""
    address: str | None = None
    """Of a running Ray cluster; None takes RAY_ADDRESS, else starts one on this machine."""
    num_workers: int = 1
    cpus_per_worker: int = 1
    """Cores a worker reserves; also its number of threads."""
    gpus_per_worker: float = 0.0
    start_timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    total_steps: int | None = None
    """None: `epochs` passes over the training questions."""
    epochs: int = 1
    save_every_steps: int = 100
    """0 saves only the final step."""
    keep_checkpoints: int = 2
    resume: str = "auto"
    """`auto` goes on from the newest checkpoint of `run_dir`, `never` starts anew, a path takes that checkpoint."""
    max_bad_steps: int = 3
    """Non-finite losses or gradients in a row before training stops."""


@dataclass(frozen=True, slots=True)
class TrackingConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    backends: tuple[Literal["console", "wandb", "tensorboard"], ...] = ("console",)
    """metrics.jsonl is always written."""
    project: str = "search-r1"
    run_name: str | None = None
    log_trajectories: bool = True


@dataclass(frozen=True, slots=True)
class Config:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    experiment: str = "default"
    run_dir: str | None = None
    """None: runs/<experiment>/<timestamp>."""
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


_POSITIVE = (
    "data.train_batch_size",
    "data.val_batch_size",
    "rollout.group_size",
    "rollout.max_start_length",
    "rollout.max_response_length",
    "rollout.max_obs_length",
    "rollout.max_prompt_length",
    "engine.num_engines",
    "engine.tensor_parallel_size",
    "engine.max_batch_size",
    "environment.top_k",
    "environment.timeout_s",
    "environment.max_queries_per_request",
    "environment.max_query_chars",
    "policy.mini_batch_size",
    "policy.epochs",
    "policy.max_tokens_per_micro_batch",
    "policy.optim.max_grad_norm",
    "critic.mini_batch_size",
    "critic.epochs",
    "critic.max_tokens_per_micro_batch",
    "critic.optim.max_grad_norm",
    "cluster.num_workers",
    "cluster.cpus_per_worker",
    "trainer.epochs",
    "trainer.keep_checkpoints",
    "trainer.max_bad_steps",
)
_NOT_NEGATIVE = (
    "rollout.max_turns",
    "rollout.temperature",
    "validation.temperature",
    "validation.every_steps",
    "environment.max_retries",
    "algorithm.kl_coef",
    "policy.optim.lr",
    "policy.optim.weight_decay",
    "policy.entropy_coef",
    "critic.optim.lr",
    "critic.warmup_steps",
    "trainer.save_every_steps",
    "cluster.gpus_per_worker",
)
_SHARES = (
    "rollout.top_p",
    "rollout.max_void_share",
    "validation.top_p",
    "engine.gpu_memory_utilization",
    "algorithm.gamma",
    "algorithm.lam",
    "policy.optim.warmup_ratio",
    "critic.optim.warmup_ratio",
    "policy.clip_ratio",
)


def value_of(config: object, key: str) -> float:
    """The value behind a dotted key."""
    value = config
    for part in key.split("."):
        value = getattr(value, part)
    return value  # type: ignore[return-value]


def check(config: Config) -> list[str]:
    """Apply the rules that a single type cannot express.

    Returns:
        Warnings: settings that have no effect in the chosen mode, one sentence each.

    Raises:
        ConfigError: with key, value and remedy.
    """
    _check_ranges(config)
    _check_lengths(config.rollout)
    algorithm, policy, rollout = config.algorithm, config.policy, config.rollout
    if rollout.temperature == 0:
        raise ConfigError(
            "rollout.temperature=0 samples greedily, so a group has no spread to learn from: set it above 0"
        )
    if rollout.top_p != 1.0:
        raise ConfigError(
            f"rollout.top_p={rollout.top_p}: the trainer's log-probs are those of the full distribution, so training "
            "samples with top_p=1 (validation.top_p is free)"
        )
    if algorithm.kl_controller == "adaptive" and algorithm.kl_placement != "reward":
        raise ConfigError(
            "algorithm.kl_controller=adaptive steers KL in the reward: set algorithm.kl_placement=reward or "
            "algorithm.kl_controller=fixed"
        )
    if policy.dual_clip is not None and policy.dual_clip <= 1:
        raise ConfigError(f"policy.dual_clip={policy.dual_clip} must be above 1 (arXiv:1912.09729 takes 3), or null")
    if config.cluster.launcher == "local" and config.cluster.num_workers > 1:
        raise ConfigError(
            f"cluster.num_workers={config.cluster.num_workers} needs cluster.launcher=ray: local runs in one process"
        )
    if config.sharding.name == "fsdp2" and config.cluster.launcher == "local":
        raise ConfigError("sharding.name=fsdp2 needs cluster.launcher=ray: it lives on a process group")
    return _warnings(config)


def check_training(config: Config) -> None:
    """Rules for training only: what evaluation does not need."""
    _require(config.model.path, "model.path", "a Hugging Face folder or hub name")
    _require(config.data.train_files, "data.train_files", "a parquet file of training questions (see data_prep.qa)")
    _require(config.data.val_files, "data.val_files", "a parquet file of validation questions (see data_prep.qa)")
    _require(config.environment.retriever_urls, "environment.retriever_urls", "the URL of a running retrieval server")
    if config.trainer.total_steps is not None and config.trainer.total_steps < 1:
        raise ConfigError(f"trainer.total_steps={config.trainer.total_steps} must be at least 1, or null for epochs")


def _require(value: str | Sequence[str], key: str, what: str) -> None:
    if not value:
        raise ConfigError(f"{key} is not set: give {what}, e.g. {key}=…")


def _check_ranges(config: Config) -> None:
    for key in _POSITIVE:
        if value_of(config, key) <= 0:
            raise ConfigError(f"{key}={value_of(config, key)} must be above 0")
    for key in _NOT_NEGATIVE:
        if value_of(config, key) < 0:
            raise ConfigError(f"{key}={value_of(config, key)} must not be negative")
    for key in _SHARES:
        if not 0 <= value_of(config, key) <= 1:
            raise ConfigError(f"{key}={value_of(config, key)} must lie between 0 and 1")


def _check_lengths(rollout: RolloutConfig) -> None:
    needed = rollout.max_start_length + rollout.max_response_length
    if needed > rollout.max_prompt_length:
        raise ConfigError(
            f"rollout.max_prompt_length={rollout.max_prompt_length} leaves no room for one turn: "
            f"max_start_length + max_response_length = {needed}; raise it to at least that "
            f"(all turns: {full_context_length(rollout)})"
        )


def full_context_length(rollout: RolloutConfig) -> int:
    """Tokens of the longest trajectory: no turn and no observation runs out of room below it."""
    turns, observation = rollout.max_turns, rollout.max_obs_length
    return rollout.max_start_length + rollout.max_response_length * (turns + 1) + observation * turns


def _warnings(config: Config) -> list[str]:
    found = []
    algorithm = config.algorithm
    if algorithm.advantage == "grpo" and config.rollout.group_size == 1:
        found.append("rollout.group_size=1 under GRPO gives every trajectory the advantage 0: nothing is learned")
    if algorithm.advantage == "grpo" and config.critic.warmup_steps:
        found.append("critic.warmup_steps has no effect under GRPO: there is no critic")
    if algorithm.advantage == "grpo" and config.model.critic_path:
        found.append("model.critic_path has no effect under GRPO: there is no critic")
    if config.engine.name == "hf" and config.engine.num_engines > 1:
        found.append("engine.num_engines has no effect with engine.name=hf: every training worker has its engine")
    if config.engine.name == "hf" and config.rollout.schedule == "async":
        found.append("rollout.schedule=async gains nothing with engine.name=hf, which decodes in lockstep")
    if config.data.train_batch_size < config.policy.mini_batch_size:
        found.append(
            f"policy.mini_batch_size={config.policy.mini_batch_size} is above data.train_batch_size="
            f"{config.data.train_batch_size}: every step makes one optimizer step"
        )
    return found
