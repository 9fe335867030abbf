"""Search-R1's own override names, translated: people bring their launch scripts along.

A key maps to ours, to a function that rewrites key and value, or to the sentence that says why it is gone. What of
their groups is not listed is refused: trained without it, a script would mean something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from search_r1.errors import ConfigError

Rewrite = Callable[[str], str]


def _advantage(value: str) -> str:
    if value not in ("gae", "grpo"):
        raise ConfigError(f"algorithm.adv_estimator={value}: this framework has gae (PPO) and grpo")
    return f"algorithm.advantage={value}"


def _estimator(value: str) -> str:
    names = {"kl": "k1", "low_var_kl": "k3", "mse": "k2", "abs": "abs"}
    if value not in names:
        raise ConfigError(f"KL type {value}: choose one of {', '.join(names)}")
    return f"algorithm.kl_estimator={names[value]}"


def _kl_loss(value: str) -> str:
    return f"algorithm.kl_placement={'loss' if value.lower() == 'true' else 'reward'}"


def _retriever_url(value: str) -> str:
    return f"environment.retriever_urls=[{value}]"


def _files(key: str) -> Rewrite:
    return lambda value: f"{key}={value if value.startswith('[') else f'[{value}]'}"


def _tracking(value: str) -> str:
    return f"tracking.backends={value if value.startswith('[') else f'[{value}]'}"


def _every(key: str) -> Rewrite:
    """-1 means never, which is 0 here."""
    return lambda value: f"{key}={'0' if value == '-1' else value}"


def _refused_if_true(key: str, remedy: str) -> Rewrite:
    """Asks for what another command does; false asks for nothing."""

    def rewrite(value: str) -> str:
        if value.lower() != "false":
            raise ConfigError(f"{key}={value}: {remedy}")
        return ""

    return rewrite


def _format_reward(theirs: str, ours: str) -> Rewrite:
    def rewrite(value: str) -> str:
        raise ConfigError(f"reward_model.{theirs}={value}: set reward.function=em_format and reward.{ours}={value}")

    return rewrite


def _engine(value: str) -> str:
    return f"engine.name={value}"


def _timeout(value: str) -> str:
    return f"environment.timeout_s={value}"


LEGACY_KEYS: dict[str, str | Rewrite] = {
    "algorithm.adv_estimator": _advantage,
    "algorithm.kl_penalty": _estimator,
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coef",
    "algorithm.kl_ctrl.type": "algorithm.kl_controller",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl_target",
    "algorithm.kl_ctrl.horizon": "algorithm.kl_horizon",
    "data.train_files": _files("data.train_files"),
    "data.val_files": _files("data.val_files"),
    "data.shuffle_train_dataloader": "data.shuffle",
    "data.max_start_length": "rollout.max_start_length",
    "data.max_response_length": "rollout.max_response_length",
    "data.max_obs_length": "rollout.max_obs_length",
    "data.max_prompt_length": "rollout.max_prompt_length",
    "max_turns": "rollout.max_turns",
    "retriever.url": _retriever_url,
    "retriever.topk": "environment.top_k",
    "retriever.timeout": _timeout,
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "actor_rollout_ref.actor.optim.lr": "policy.optim.lr",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "policy.optim.warmup_ratio",
    "actor_rollout_ref.actor.optim.weight_decay": "policy.optim.weight_decay",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "policy.mini_batch_size",
    "actor_rollout_ref.actor.ppo_epochs": "policy.epochs",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "policy.max_tokens_per_micro_batch",
    "actor_rollout_ref.actor.grad_clip": "policy.optim.max_grad_norm",
    "actor_rollout_ref.actor.clip_ratio": "policy.clip_ratio",
    "actor_rollout_ref.actor.entropy_coeff": "policy.entropy_coef",
    "actor_rollout_ref.actor.use_kl_loss": _kl_loss,
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_coef",
    "actor_rollout_ref.actor.kl_loss_type": _estimator,
    "actor_rollout_ref.rollout.name": _engine,
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "actor_rollout_ref.rollout.n_agent": "rollout.group_size",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.rollout.enforce_eager": "engine.enforce_eager",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "engine.gpu_memory_utilization",
    "actor_rollout_ref.rollout.max_num_batched_tokens": "engine.max_batch_tokens",
    "actor_rollout_ref.rollout.max_num_seqs": "engine.max_batch_size",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "engine.tensor_parallel_size",
    "critic.optim.lr_warmup_steps_ratio": "critic.optim.warmup_ratio",
    "critic.model.path": "model.critic_path",
    "critic.ppo_mini_batch_size": "critic.mini_batch_size",
    "critic.ppo_epochs": "critic.epochs",
    "critic.cliprange_value": "critic.clip_value",
    "trainer.critic_warmup": "critic.warmup_steps",
    "trainer.total_training_steps": "trainer.total_steps",
    "trainer.total_epochs": "trainer.epochs",
    "trainer.save_freq": _every("trainer.save_every_steps"),
    "trainer.test_freq": _every("validation.every_steps"),
    "trainer.logger": _tracking,
    "trainer.project_name": "tracking.project",
    "trainer.experiment_name": "tracking.run_name",
    "trainer.default_local_dir": "run_dir",
    "trainer.val_before_train": "validation.before_training",
    "trainer.default_hdfs_dir": "no upload to HDFS: checkpoints are written to run_dir",
    "trainer.val_only": _refused_if_true("trainer.val_only", "use ./evaluate.sh, which needs no trainer"),
    "trainer.n_gpus_per_node": "workers are counted over all nodes: cluster.num_workers and cluster.gpus_per_worker=1",
    "trainer.nnodes": "workers are counted over all nodes: cluster.num_workers",
    "data.train_data_num": "write a smaller parquet with data_prep.qa --limit",
    "data.val_data_num": "data.max_val_questions limits validation",
    "algorithm.no_think_rl": "the template decides what the model writes: data.template",
    "do_search": "searching is what the search environment does; rollout.max_turns=0 never searches",
    "actor_rollout_ref.actor.state_masking": "observations are never trained on",
    "actor_rollout_ref.model.use_remove_padding": "micro-batches are cut to their length already",
    "critic.model.use_remove_padding": "micro-batches are cut to their length already",
    "critic.model.enable_gradient_checkpointing": "model.gradient_checkpointing holds for the critic too",
    "actor_rollout_ref.actor.use_dynamic_bsz": "micro-batches always follow a token budget",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "set policy.max_tokens_per_micro_batch (tokens a worker)",
    "critic.ppo_micro_batch_size": "set critic.max_tokens_per_micro_batch (tokens a worker)",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": "log-probs follow policy.max_tokens_per_micro_batch",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": "log-probs follow policy.max_tokens_per_micro_batch",
    **{
        f"{role}.fsdp_config.{what}_offload": "policy.offload_while_generating moves weights and optimizers away"
        for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic.model")
        for what in ("param", "grad", "optimizer")
    },
    "reranker.do_rerank": _refused_if_true(
        "reranker.do_rerank",
        "the retrieval server reranks, see docs/retriever.md; leave reranker.* out, and let retriever.topk count the "
        "passages that are shown",
    ),
    "reranker.url": "the retrieval server reranks",
    "reranker.topk": "the retrieval server reranks",
    "reward_model.structure_format_score": _format_reward("structure_format_score", "structure_score"),
    "reward_model.final_format_score": _format_reward("final_format_score", "format_score"),
    "reward_model.retrieval_score": _format_reward("retrieval_score", "retrieval_score"),
}

_THEIR_GROUPS = ("actor_rollout_ref.", "reward_model.", "critic.model.", "reranker.")
_N, _N_AGENT = "actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.n_agent"
_ACTOR = "actor_rollout_ref.actor."
_USE_KL_LOSS = f"{_ACTOR}use_kl_loss"
_KL_KEYS = {
    "loss": (f"{_ACTOR}kl_loss_type", f"{_ACTOR}kl_loss_coef"),
    "reward": ("algorithm.kl_penalty", *(key for key in LEGACY_KEYS if key.startswith("algorithm.kl_ctrl."))),
}
_KL_ESTIMATORS = {"loss": "k3", "reward": "k1"}
"""Upstream's defaults."""


def translate(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Translate the overrides that carry one of Search-R1's names.

    Returns:
        The overrides in our names, and one sentence a translation.

    Raises:
        ConfigError: it asks for what this framework does not do, or does another way.
    """
    values = _values(overrides)
    given, notes = _with_one_kl(_with_one_group_size(overrides))
    translated = []
    for override in given:
        key, separator, value = override.partition("=")
        key = key.lstrip("+")
        target = LEGACY_KEYS.get(key) if separator else None
        if target is None:
            if key.startswith(_THEIR_GROUPS):
                raise ConfigError(f"{override}: there is no such setting here; leave it out, or see configs/base.yaml")
            translated.append(override)
            continue
        if callable(target):
            ours = target(value)
        elif " " in target:
            notes.append(f"{override} has no effect here: {target}")
            continue
        else:
            ours = f"{target}={value}"
        if ours:
            translated.append(ours)
        if ours and ours.partition("=")[0] != key:
            notes.append(f"{override} became {ours}")
    for name, ours in (("ppo_mini_batch_size", "critic.mini_batch_size"), ("ppo_epochs", "critic.epochs")):
        if _ACTOR + name in values and not values.keys() & {f"critic.{name}", ours}:
            translated.append(f"{ours}={values[_ACTOR + name]}")
            notes.append(f"{translated[-1]} as the actor's, where no critic.{name} is given")
    no_entropy = not values.keys() & {f"{_ACTOR}entropy_coeff", "policy.entropy_coef"}
    if no_entropy and any(key.startswith(_ACTOR) for key in values):
        notes.append("policy.entropy_coef is 0 where none is given, Search-R1's is 0.001 (see docs/decisions.md)")
    return translated, list(dict.fromkeys(notes))


def _values(overrides: Sequence[str]) -> dict[str, str]:
    return dict(override.lstrip("+").partition("=")[::2] for override in overrides)


def _with_one_group_size(overrides: Sequence[str]) -> list[str]:
    """Upstream's group size is `n_agent`, with an `n` of 1 beside it; without `n_agent` it is `n`."""
    values = _values(overrides)
    n, n_agent = values.get(_N), values.get(_N_AGENT)
    if n is None or n_agent is None:
        return list(overrides)
    if n not in ("1", n_agent):
        raise ConfigError(f"{_N}={n} and {_N_AGENT}={n_agent}: both are rollout.group_size here; give one of them")
    return [override for override in overrides if override.lstrip("+").partition("=")[0] != _N]


def _with_one_kl(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """KL counts in the loss or in the reward. Upstream has keys for either: those of the other are passed over, with a
    note. Where no estimator is given, it is upstream's default for that place."""
    values, placement = _values(overrides), ""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key in (_USE_KL_LOSS, "algorithm.kl_placement"):
            placement = value if key != _USE_KL_LOSS else _kl_loss(value).partition("=")[2]
    if not placement:
        both = [next((key for key in keys if key in values), "") for keys in _KL_KEYS.values()]
        if all(both):
            raise ConfigError(
                f"{' and '.join(both)}: one is for KL in the loss, the other for KL in the reward; say which by "
                f"{_USE_KL_LOSS}=true or false"
            )
        return list(overrides), []
    idle = {key: place for place, keys in _KL_KEYS.items() if place != placement for key in keys}
    kept = [override for override in overrides if override.lstrip("+").partition("=")[0] not in idle]
    notes = [
        f"{key}={values[key]} has no effect here: it is for KL in the {place}, and algorithm.kl_placement={placement}"
        for key, place in idle.items()
        if key in values
    ]
    estimator = f"algorithm.kl_estimator={_KL_ESTIMATORS.get(placement)}"
    is_open = placement in _KL_KEYS and not values.keys() & {"algorithm.kl_estimator", _KL_KEYS[placement][0]}
    if is_open and _USE_KL_LOSS in values:
        notes.append(f"{estimator} as Search-R1's, where no {_KL_KEYS[placement][0]} is given")
    if is_open and (_USE_KL_LOSS in values or placement == "loss"):
        kept.append(estimator)
    return kept, notes
