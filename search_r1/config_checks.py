"""Rules on a configuration that a single type cannot express: ranges, and keys that depend on each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from search_r1.config import ClusterConfig, Config, OptimConfig, RolloutConfig, ShardingConfig
from search_r1.errors import ConfigError

_DEFAULTS = Config()
_POSITIVE = (
    "data.train_batch_size",
    "data.val_batch_size",
    "data.max_val_questions",
    "rollout.group_size",
    "rollout.max_start_length",
    "rollout.max_response_length",
    "rollout.max_obs_length",
    "rollout.max_prompt_length",
    "engine.num_engines",
    "engine.tensor_parallel_size",
    "engine.max_batch_size",
    "engine.max_batch_tokens",
    "engine.timeout_s",
    "engine.cpu_cache_gib",
    "validation.top_p",
    "algorithm.kl_target",
    "algorithm.kl_horizon",
    "rollout.max_concurrent_searches",
    "environment.top_k",
    "environment.timeout_s",
    "environment.max_queries_per_request",
    "environment.max_query_chars",
    "environment.tool_timeout_s",
    "environment.max_concurrent_tools",
    "environment.max_calls_per_turn",
    "policy.mini_batch_size",
    "policy.epochs",
    "policy.max_tokens_per_micro_batch",
    "policy.optim.max_grad_norm",
    "critic.mini_batch_size",
    "critic.epochs",
    "critic.max_tokens_per_micro_batch",
    "critic.optim.max_grad_norm",
    "critic.clip_value",
    "cluster.num_workers",
    "cluster.cpus_per_worker",
    "cluster.start_timeout_s",
    "trainer.epochs",
    "trainer.keep_checkpoints",
    "trainer.max_bad_steps",
    "sharding.replicas",
    "model.lora.alpha",
)
"""None passes here and below: it stands for no limit or another default."""
_NOT_NEGATIVE = (
    "rollout.max_turns",
    "rollout.max_staleness",
    "environment.gather_ms",
    "rollout.temperature",
    "validation.temperature",
    "validation.every_steps",
    "environment.max_retries",
    "reward.turn_penalty",
    "reward.structure_score",
    "reward.format_score",
    "reward.retrieval_score",
    "algorithm.kl_coef",
    "policy.optim.lr",
    "policy.optim.weight_decay",
    "policy.entropy_coef",
    "policy.clip_ratio_high",
    "critic.optim.lr",
    "critic.optim.weight_decay",
    "critic.warmup_steps",
    "trainer.save_every_steps",
    "cluster.gpus_per_worker",
    "model.lora.rank",
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
    "policy.optim.min_lr_ratio",
    "critic.optim.min_lr_ratio",
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
    check_seed(config.seed)
    check_optim(config.policy.optim, "policy.optim")
    check_optim(config.critic.optim, "critic.optim")
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
    if policy.dual_clip is not None and not policy.dual_clip > 1:
        raise ConfigError(f"policy.dual_clip={policy.dual_clip} must be above 1 (arXiv:1912.09729 takes 3), or null")
    check_workers(config.sharding, config.cluster, (config.policy.optim.name, config.critic.optim.name))
    _check_weight_transfer(config)
    _check_engines(config)
    _check_staleness(config)
    _check_tools(config)
    return _warnings(config)


def _check_engines(config: Config) -> None:
    engine, cluster = config.engine, config.cluster
    if cluster.gpus_per_worker > 1:
        raise ConfigError(
            f"cluster.gpus_per_worker={cluster.gpus_per_worker:g}: a worker computes on one GPU; set it to 1 and "
            "cluster.num_workers to the GPUs of all nodes that train"
        )
    needed = engine.num_engines * engine.tensor_parallel_size
    if engine.name == "vllm" and 0 < cluster.gpus_per_worker < 1 and needed > cluster.num_workers:
        raise ConfigError(
            f"engine.num_engines={engine.num_engines} times engine.tensor_parallel_size={engine.tensor_parallel_size} "
            f"takes {needed} GPUs, but with cluster.gpus_per_worker={cluster.gpus_per_worker:g} engines share those of "
            f"cluster.num_workers={cluster.num_workers} workers: lower one of the first two, raise the last, or set "
            "cluster.gpus_per_worker=1 to give engines GPUs of their own"
        )


def _check_staleness(config: Config) -> None:
    algorithm, staleness = config.algorithm, config.rollout.max_staleness
    if algorithm.importance_cap is not None and not algorithm.importance_cap > 0:
        raise ConfigError(
            f"algorithm.importance_cap={algorithm.importance_cap} must be above 0, usually 2, or null for the default"
        )
    mask_above = algorithm.importance_mask_above
    if mask_above is not None and not mask_above > 1:
        raise ConfigError(
            f"algorithm.importance_mask_above={mask_above} would leave out tokens that agree: set it above 1, or null"
        )
    clashes = (
        (config.engine.name == "hf", "engine.name=hf generates in the training workers: set engine.name=vllm"),
        (config.rollout.schedule == "lockstep", "rollout.schedule=lockstep holds the driver: set it to async"),
        (
            config.engine.sleep_while_training,
            "engine.sleep_while_training puts the engine to sleep then: set it to false",
        ),
        (
            config.policy.offload_while_generating,
            "policy.offload_while_generating moves the policy away: set it to false",
        ),
    )
    for is_set, reason in clashes:
        if staleness and is_set:
            raise ConfigError(
                f"rollout.max_staleness={staleness} generates the next batch while the policy is updated, and "
                f"{reason}, or rollout.max_staleness=0"
            )


def _check_tools(config: Config) -> None:
    environment = config.environment
    if environment.name != "tools":
        return
    if config.rollout.end_on_eos:
        raise ConfigError(
            "rollout.end_on_eos=true would end a trajectory at its first unreadable call: with environment.name=tools "
            "every turn ends with the end-of-turn token; set it to false"
        )
    if not environment.tools and not environment.retriever_urls:
        raise ConfigError(
            "environment.name=tools has no tool: name modules in environment.tools, or a retrieval server in "
            "environment.retriever_urls for search"
        )


def check_workers(sharding: ShardingConfig, cluster: ClusterConfig, optimizers: Sequence[str]) -> None:
    """Rules on how models lie over workers, for `optim.name` of whatever is trained.

    Raises:
        ConfigError: with key, value and remedy.
    """
    if cluster.launcher == "local" and cluster.num_workers > 1:
        raise ConfigError(
            f"cluster.num_workers={cluster.num_workers} needs cluster.launcher=ray: local runs in one process"
        )
    if sharding.name == "fsdp2" and cluster.launcher == "local":
        raise ConfigError("sharding.name=fsdp2 needs cluster.launcher=ray: it lives on a process group")
    if sharding.name == "fsdp2" and "muon" in optimizers:
        raise ConfigError("optim.name=muon needs whole matrices, which fsdp2 splits: set optim.name=adamw")
    if sharding.name == "fsdp2" and cluster.num_workers % sharding.replicas:
        raise ConfigError(
            f"sharding.replicas={sharding.replicas} does not divide cluster.num_workers={cluster.num_workers}: "
            "each copy of the model is split over the same number of workers"
        )


def _check_weight_transfer(config: Config) -> None:
    way, cluster = config.engine.weight_transfer, config.cluster
    if way == "nccl" and cluster.launcher == "local":
        raise ConfigError(
            "engine.weight_transfer=nccl joins the GPUs of several processes, and cluster.launcher=local has one: set "
            "it to auto, or cluster.launcher=ray"
        )
    if way in ("ipc", "nccl") and cluster.launcher == "ray" and cluster.gpus_per_worker == 0:
        raise ConfigError(
            f"engine.weight_transfer={way} goes from GPU to GPU, and cluster.gpus_per_worker=0 gives the workers none: "
            "set it to auto, or cluster.gpus_per_worker above 0"
        )


def check_seed(seed: int) -> None:
    """
    Raises:
        ConfigError: no seed that every library takes.
    """
    if not 0 <= seed < 2**31:
        raise ConfigError(f"seed={seed} must lie between 0 and {2**31 - 1:,}")


def check_optim(optim: OptimConfig, name: str) -> None:
    """
    Raises:
        ConfigError: moments that do not decay.
    """
    if not all(0 <= beta < 1 for beta in optim.betas):
        raise ConfigError(f"{name}.betas={list(optim.betas)}: both must be at least 0 and below 1")


def check_training(config: Config) -> list[str]:
    """Rules for training only: what evaluation does not need.

    Returns:
        Warnings, as `check` does.

    Raises:
        ConfigError: with key, value and remedy.
    """
    _require(config.model.path, "model.path", "a Hugging Face folder or hub name")
    _require(config.data.train_files, "data.train_files", "a parquet file of training questions (see data_prep.qa)")
    _require(config.data.val_files, "data.val_files", "a parquet file of validation questions (see data_prep.qa)")
    if config.environment.name == "search":
        _require(
            config.environment.retriever_urls, "environment.retriever_urls", "the URL of a running retrieval server"
        )
    if config.trainer.total_steps is not None and config.trainer.total_steps < 1:
        raise ConfigError(f"trainer.total_steps={config.trainer.total_steps} must be at least 1, or null for epochs")
    return training_warnings(config)


def _require(value: str | Sequence[str], key: str, what: str) -> None:
    if not value:
        raise ConfigError(f"{key} is not set: give {what}, e.g. {key}=…")


def _check_ranges(config: Config) -> None:
    for key in _POSITIVE:
        value = value_of(config, key)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{key}={value} must be above 0 and finite")
    for key in _NOT_NEGATIVE:
        value = value_of(config, key)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{key}={value} must not be negative, and must be finite")
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
    engine, sharding, is_hf = config.engine, config.sharding, config.engine.name == "hf"
    uncorrected = config.rollout.max_staleness == 0 and config.algorithm.importance_cap is None
    in_tags, greedy = config.environment.name == "search", config.validation.temperature == 0
    tools_only = " ".join(f"environment.{key}" for key in ("tools", "forced_opening", "executor", "answer_pattern"))
    rules = (
        ("engine.num_engines", is_hf, "with engine.name=hf: every training worker has its engine"),
        ("engine.tensor_parallel_size", is_hf, "with engine.name=hf, which keeps a model whole"),
        ("engine.weight_transfer", is_hf, "with engine.name=hf, which shares a process with the policy"),
        ("engine.sleep_while_training", is_hf, "with engine.name=hf, whose cache is freed anyway"),
        ("engine.sleep_level", not engine.sleep_while_training, "with engine.sleep_while_training=false"),
        ("algorithm.importance_mask_above", uncorrected, "on-policy without algorithm.importance_cap"),
        ("sharding.replicas", sharding.name == "none", "with sharding.name=none: set sharding.name=fsdp2"),
        ("sharding.cpu_offload", sharding.name == "none", "with sharding.name=none: set sharding.name=fsdp2"),
        ("policy.offload_while_generating", sharding.cpu_offload, "with sharding.cpu_offload: the GPU holds nothing"),
        (tools_only, in_tags, "with environment.name=search: set environment.name=tools"),
        ("validation.top_p", greedy, "with validation.temperature=0, which is greedy"),
    )
    found = _without_effect(config, rules)
    if is_hf and config.rollout.schedule == "async":
        found.append("rollout.schedule=async gains nothing with engine.name=hf, which decodes in lockstep")
    return found


def training_warnings(config: Config) -> list[str]:
    """Settings that make training do nothing, or less than they say."""
    algorithm, policy, critic, reward = config.algorithm, config.policy, config.critic, config.reward
    is_grpo, total_steps = algorithm.advantage == "grpo", config.trainer.total_steps
    no_kl = algorithm.kl_placement == "none" or algorithm.kl_coef == 0
    fixed_kl, constant_lr = algorithm.kl_controller == "fixed", "with optim.schedule=constant"
    no_em_format, no_format = reward.function != "em_format", reward.function not in ("em_format", "recall_f1")
    rules = (
        ("critic.warmup_steps model.critic_path", is_grpo, "under GRPO: there is no critic"),
        ("algorithm.gamma algorithm.lam", is_grpo, "under GRPO: an advantage belongs to a whole trajectory"),
        ("algorithm.normalize_by_std", not is_grpo, "under PPO: there are no groups"),
        ("algorithm.kl_target algorithm.kl_horizon", fixed_kl, "with algorithm.kl_controller=fixed"),
        ("algorithm.kl_controller", no_kl, "with algorithm.kl_coef=0, which it would multiply"),
        ("model.reference_path", no_kl, "without KL: see algorithm.kl_placement and algorithm.kl_coef"),
        ("reward.structure_score reward.retrieval_score", no_em_format, "without reward.function=em_format"),
        ("reward.format_score", no_format, "without reward.function=em_format or recall_f1"),
        ("policy.optim.min_lr_ratio", policy.optim.schedule == "constant", constant_lr),
        ("critic.optim.min_lr_ratio", critic.optim.schedule == "constant", constant_lr),
        ("trainer.epochs", total_steps is not None, "beside trainer.total_steps"),
    )
    found = _without_effect(config, rules)
    if is_grpo and config.rollout.group_size == 1:
        found.append("rollout.group_size=1 under GRPO gives every trajectory the advantage 0: nothing is learned")
    if algorithm.kl_placement == "loss" and algorithm.kl_estimator == "k1" and not no_kl:
        found.append(
            "algorithm.kl_estimator=k1 in the loss has the expected gradient 0 and holds nothing: set it to k3, or "
            "algorithm.kl_placement=reward"
        )
    if not is_grpo and total_steps is not None and critic.warmup_steps >= total_steps:
        found.append(
            f"critic.warmup_steps={critic.warmup_steps} is not below trainer.total_steps={total_steps}: the critic "
            "alone is trained, the policy stays as it is"
        )
    if config.data.train_batch_size < policy.mini_batch_size:
        found.append(
            f"policy.mini_batch_size={policy.mini_batch_size} is above data.train_batch_size="
            f"{config.data.train_batch_size}: every pass over a batch is one optimizer step"
        )
    return found


def _without_effect(config: Config, rules: Sequence[tuple[str, bool, str]]) -> list[str]:
    """One sentence for each key of a rule (keys, whether nothing reads them, why) that is not left at its default."""
    return [
        f"{key} has no effect {why}"
        for keys, is_idle, why in rules
        for key in keys.split()
        if is_idle and value_of(config, key) != value_of(_DEFAULTS, key)
    ]
