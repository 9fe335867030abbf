"""The one file that reads which implementation the configuration chose."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from search_r1.config import Config
from search_r1.data.chat_turns import ChatTurns
from search_r1.data.questions import check_prompt_lengths, load_questions, spread
from search_r1.data.templates import PromptEncoder, encode_plain
from search_r1.data.tool_prompts import ToolPrompts, check_tools
from search_r1.environments.async_retriever import GatheringRetrieverClient
from search_r1.environments.executors import PlainExecutor
from search_r1.environments.retriever_client import MAX_PAUSE_S
from search_r1.environments.search import SearchEnvironment
from search_r1.environments.search_tool import search_tool
from search_r1.environments.tool_registry import Tool, load_tools
from search_r1.environments.tools import ToolEnvironment
from search_r1.errors import ConfigError
from search_r1.protocols import Critic, Environment, Policy, Reference, RolloutEngine, Scorer, ToolExecutor
from search_r1.rewards import resolve_reward
from search_r1.rollout.async_schedule import AsyncLimits
from search_r1.rollout.manager import LLMGenerationManager
from search_r1.trainer.life_cycle import LifeCycle
from search_r1.trainer.parity import Resend, build_parity
from search_r1.trainer.run_folder import RunFolder
from search_r1.trainer.step import Roles
from search_r1.trainer.trainer import Trainer, optimizer_steps
from search_r1.types import Question

EncodePrompt = Callable[[Question], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What rolling out needs, with or without a trainer."""

    manager: LLMGenerationManager
    encode_prompt: EncodePrompt


def needs_reference(config: Config) -> bool:
    return config.algorithm.kl_placement != "none" and config.algorithm.kl_coef > 0


def build_worker_roles(config: Config, policy_steps: int, critic_steps: int) -> dict[str, Any]:
    """The roles of one training worker; runs inside it, after it joined the process group."""
    import torch

    from search_r1.backends.critic import LocalCritic
    from search_r1.backends.policy import LocalPolicy, RecastPolicy, build_reference
    from search_r1.backends.sharding import build_sharding

    torch.manual_seed(config.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sharding = build_sharding(config.sharding, config.model.dtype, device)
    policy = LocalPolicy(config, sharding, policy_steps)
    roles: dict[str, Any] = {"policy": policy, "recast_policy": RecastPolicy(policy, rollout_dtype(config))}
    if needs_reference(config):
        roles["reference"] = build_reference(config, sharding, policy)
    if config.algorithm.advantage == "gae":
        roles["critic"] = LocalCritic(config, sharding, critic_steps)
    if config.engine.name == "hf":
        roles["engine"] = build_hf_engine(config, device)
    if config.cluster.launcher == "ray":
        from search_r1.cluster.weight_sync import build_sender

        way, dtype = weight_transfer(config), rollout_dtype(config)
        roles["sender"] = build_sender(config, policy, roles.get("engine"), way, dtype)
    return roles


def rollout_dtype(config: Config) -> str:
    return config.model.dtype if config.engine.dtype == "auto" else config.engine.dtype


def weight_transfer(config: Config) -> Literal["shm", "ipc", "nccl"]:
    """The way of the weights: `auto` takes what the GPUs allow, and host memory where there are none."""
    way, cluster = config.engine.weight_transfer, config.cluster
    if way != "auto":
        return way
    if cluster.launcher == "local":
        import torch

        return "ipc" if torch.cuda.is_available() else "shm"
    if cluster.gpus_per_worker == 0:
        return "shm"
    return "ipc" if cluster.gpus_per_worker < 1 else "nccl"


def build_hf_engine(config: Config, device: str) -> RolloutEngine:
    import torch

    from search_r1.backends.model import load_causal_lm
    from search_r1.backends.tokenizer import load_tokenizer
    from search_r1.engines.hf_engine import HFEngine

    attention = "sdpa" if config.model.attention == "varlen" else config.model.attention
    plain = replace(config.model, gradient_checkpointing=False, attention=attention)
    return HFEngine(
        load_causal_lm(config.model.path, plain).to(device),  # type: ignore[arg-type]
        load_tokenizer(config.model.path, config.model.trust_remote_code),
        max_batch_size=config.engine.max_batch_size,
        max_batch_tokens=config.engine.max_batch_tokens,
        dtype=torch.bfloat16 if rollout_dtype(config) == "bfloat16" else None,
    )


def build_vllm_engine(config: Config) -> RolloutEngine:
    from search_r1.engines.vllm_engine import VLLMEngine

    engine = config.engine
    return VLLMEngine(
        config.model.path,
        dtype=rollout_dtype(config),
        max_batch_size=engine.max_batch_size,
        max_batch_tokens=engine.max_batch_tokens,
        max_model_len=config.rollout.max_prompt_length,
        tensor_parallel_size=engine.tensor_parallel_size,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        cpu_cache_gib=engine.cpu_cache_gib,
        enforce_eager=engine.enforce_eager,
        weight_transfer=weight_transfer(config),
        sleep_mode=engine.sleep_while_training,
        seed=config.seed,
        trust_remote_code=config.model.trust_remote_code,
    )


def engine_factories(config: Config) -> Iterator[Callable[[], RolloutEngine]]:
    """One an engine, with a seed of its own: on a CPU vLLM draws an engine's requests from one stream."""
    for seed in itertools.count(config.seed):
        yield partial(build_vllm_engine, replace(config, seed=seed))


def build_rollouts(config: Config, engine: RolloutEngine, tokenizer: Any) -> Rollouts:
    environment, encode_prompt = build_environment(config, tokenizer)
    return Rollouts(LLMGenerationManager(engine, environment, config.rollout, async_limits(config)), encode_prompt)


def async_limits(config: Config) -> AsyncLimits:
    environment = config.environment
    return AsyncLimits(
        max_generations=config.engine.max_batch_size * config.engine.num_engines,
        max_searches=config.rollout.max_concurrent_searches,
        generation_timeout_s=config.engine.timeout_s,
        search_timeout_s=(environment.timeout_s + MAX_PAUSE_S) * (environment.max_retries + 1)
        + environment.tool_timeout_s,
    )


def build_environment(config: Config, tokenizer: Any) -> tuple[Environment, EncodePrompt]:
    """The environment, and what makes the prompts that speak its language."""
    encode = partial(encode_plain, tokenizer)
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    max_obs_length = config.rollout.max_obs_length
    if config.environment.name == "search":
        retriever = build_retriever(config)
        render = PromptEncoder(tokenizer)
        search = SearchEnvironment(retriever, encode, decode, config.environment, max_obs_length)
        return search, lambda question: render(question.prompt_messages)
    opening = config.environment.forced_opening
    turns = ChatTurns(tokenizer, opening)
    client = build_retriever(config) if config.environment.retriever_urls else None
    tools = build_tools(config, client)
    executor = build_executor(config, tools)
    environment = ToolEnvironment(tools, executor, turns, encode, decode, config.environment, max_obs_length, client)
    return environment, ToolPrompts(tokenizer, {name: tool.schema for name, tool in tools.items()}, opening)


def build_tools(config: Config, retriever: GatheringRetrieverClient | None) -> dict[str, Tool]:
    """Search, where there is a retriever, and the tools of the configured modules."""
    environment, adopt = config.environment, None
    if environment.executor == "langgraph":
        try:
            from search_r1.environments.langgraph_executor import adopt_langchain_tool as adopt
        except ImportError as error:
            raise ConfigError(
                f"environment.executor=langgraph needs the extra search_r1[tools] ({error}): "
                "pip install langgraph langchain-core"
            ) from error
    first = [search_tool(retriever, environment.top_k, environment.max_query_chars)] if retriever else []
    return load_tools(environment.tools, adopt, first)


def build_executor(config: Config, tools: dict[str, Tool]) -> ToolExecutor:
    environment = config.environment
    if environment.executor == "plain":
        return PlainExecutor(environment.tool_timeout_s, environment.max_concurrent_tools)
    from search_r1.environments.langgraph_executor import LangGraphExecutor

    return LangGraphExecutor(tools, environment.tool_timeout_s, environment.max_concurrent_tools)


def build_retriever(config: Config) -> GatheringRetrieverClient:
    environment = config.environment
    return GatheringRetrieverClient(
        environment.retriever_urls,
        gather_s=environment.gather_ms / 1000,
        timeout_s=environment.timeout_s,
        max_retries=environment.max_retries,
        max_queries_per_request=environment.max_queries_per_request,
    )


def build_engine(config: Config) -> RolloutEngine:
    """An engine in this process, for evaluation and the local launcher."""
    if config.engine.name == "vllm":
        return build_vllm_engine(config)
    import torch

    return build_hf_engine(config, "cuda" if torch.cuda.is_available() else "cpu")


def check_inputs(config: Config) -> None:
    """Everything that can be wrong with the outside world, told before anything heavy starts.

    Raises:
        ConfigError, RetrieverError: with the remedy.
    """
    from search_r1.backends.model import check_model_folder, check_tensor_parallel, context_window

    check_model_folder(config.model.path)
    for other in filter(None, (config.model.reference_path, config.model.critic_path)):
        check_model_folder(other, with_tokenizer=False)
    check_tensor_parallel(config.model.path, config.engine.tensor_parallel_size, config.model.trust_remote_code)
    window = context_window(config.model.path, config.model.trust_remote_code)
    if config.rollout.max_prompt_length > window:
        raise ConfigError(
            f"rollout.max_prompt_length={config.rollout.max_prompt_length} exceeds the {window} positions of "
            f"{config.model.path}: lower it, and max_start_length or max_turns with it"
        )
    resolve_reward(config.reward)
    if config.environment.retriever_urls:
        build_retriever(config).check()


def check_questions(config: Config, tokenizer: Any, questions: Sequence[Question]) -> None:
    """Make one prompt of every list of tools that the questions name, and measure some; what is wrong is told now.

    Raises:
        ConfigError, DataError: with the remedy.
    """
    _, encode_prompt = build_environment(config, tokenizer)
    check_tools(questions, encode_prompt)
    check_prompt_lengths(questions, encode_prompt, config.rollout.max_start_length)


def build_trainer(config: Config, run_path: Path, settings: dict[str, Any], stack: ExitStack) -> Trainer:
    """Wire a trainer; what must be shut down is pushed on `stack`."""
    from search_r1.backends.tokenizer import load_tokenizer
    from search_r1.trainer.tracking import build_trackers

    train_questions = load_questions(config.data.train_files, config.data.template)
    val_questions = spread(load_questions(config.data.val_files, config.data.template), config.data.max_val_questions)
    check_inputs(config)
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    check_questions(config, tokenizer, [*train_questions, *val_questions])
    steps = optimizer_steps(config, len(train_questions))
    trackers = build_trackers(config.tracking, run_path, settings)
    for tracker in trackers:
        stack.callback(tracker.close)
    build = build_local_roles if config.cluster.launcher == "local" else partial(build_ray_roles, run_path=run_path)
    roles = build(config, tokenizer, steps, stack)
    folder = RunFolder(run_path)
    stack.enter_context(folder.hold())
    return Trainer(
        config,
        roles,
        train_questions,
        val_questions,
        folder,
        trackers,
        tokenizer.save_pretrained,
    )


def build_local_roles(config: Config, tokenizer: Any, steps: tuple[int, int], stack: ExitStack) -> Roles:
    """Everything in this process, no Ray."""
    from search_r1.backends.policy import score_roles
    from search_r1.engines.weights import edited

    local = build_worker_roles(config, *steps)
    policy = local["policy"]

    def sync_weights(edit: str = "") -> dict[str, float]:
        engine.load_weights(edited(policy.weights(), edit))
        return {}

    def offload() -> None:
        for name in local.keys() - {"engine"}:
            local[name].offload()

    if config.policy.offload_while_generating:
        offload()  # vLLM starts only where its whole share of the GPU is free
    engine = local.get("engine") or build_vllm_engine(config)
    stack.callback(engine.close)
    trainer = Trained(policy, partial(score_roles, local), offload, local.get("reference"), local.get("critic"))
    return _roles(config, tokenizer, engine, trainer, sync_weights, stack)


def build_ray_roles(config: Config, tokenizer: Any, steps: tuple[int, int], stack: ExitStack, run_path: Path) -> Roles:
    """Workers on Ray, here or on a cluster."""
    from search_r1.backends.model import sequence_cost
    from search_r1.cluster import placement, remote
    from search_r1.cluster.engine_pool import EnginePool
    from search_r1.cluster.worker_group import WorkerGroup, start_engines

    config = absolute_paths(config)
    stack.callback(placement.connect(config.cluster))
    group = WorkerGroup(config.cluster, partial(build_worker_roles, config, *steps))
    stack.callback(group.close)
    group.check_shared(run_path)
    if config.policy.offload_while_generating:
        group.offload()  # vLLM starts only where its whole share of the GPU is free
    if config.engine.name == "hf":
        engine: RolloutEngine = remote.WorkerEngines(group)
        sync: Any = remote.LocalEngineSync(group)
    else:
        places = placement.engine_places(config, group.homes)
        stack.callback(places.close)
        start = partial(start_engines, config.cluster, config.engine.max_batch_size, places, engine_factories(config))
        engine = EnginePool(start, config.engine.num_engines, config.cluster.start_timeout_s, places.give_back)
        sync = remote.StreamingSync(group, engine)
        stack.callback(engine.close)
    size = config.rollout.group_size
    scorer = remote.RemoteScorer(group, sequence_cost(config.model.path, config.model.trust_remote_code))
    policy = remote.RemotePolicy(scorer, config.policy.mini_batch_size * size)
    reference = remote.RemoteReference(scorer) if needs_reference(config) else None
    is_ppo = config.algorithm.advantage == "gae"
    critic = remote.RemoteCritic(scorer, config.critic.mini_batch_size * size) if is_ppo else None
    return _roles(config, tokenizer, engine, Trained(policy, scorer, group.offload, reference, critic), sync, stack)


def absolute_paths(config: Config) -> Config:
    """Workers start in another folder: relative model folders must be found from there too."""

    def absolute(path: str | None) -> str | None:
        return os.path.abspath(path) if path and Path(path).is_dir() else path

    model = config.model
    return replace(
        config,
        model=replace(
            model,
            path=absolute(model.path) or "",
            critic_path=absolute(model.critic_path),
            reference_path=absolute(model.reference_path),
        ),
    )


@dataclass(frozen=True, slots=True)
class Trained:
    """The trainer's side, in this process or on workers."""

    policy: Policy
    score: Scorer
    offload: Callable[[], None]
    reference: Reference | None
    critic: Critic | None


def _roles(config: Config, tokenizer: Any, engine: Any, trained: Trained, sync: Resend, stack: ExitStack) -> Roles:
    rollouts = build_rollouts(config, engine, tokenizer)
    stack.callback(rollouts.manager.close)
    turns: dict[str, Any] = {}
    if config.engine.sleep_while_training and config.engine.name == "vllm":
        level = config.engine.sleep_level
        turns |= {"sleep": partial(engine.sleep, level), "wake_up": engine.wake_up}
        turns |= {"resend": sync} if level == 2 else {}
    if config.policy.offload_while_generating:
        turns["offload"] = trained.offload
    if config.rollout.max_staleness == 0:  # else requests in flight would be computed anew
        turns["forget"] = engine.forget
    life_cycle = LifeCycle(**turns)
    life_cycle.rest()
    return Roles(
        policy=trained.policy,
        score=trained.score,
        manager=rollouts.manager,
        reward=resolve_reward(config.reward, tokenizer.decode),
        sync_weights=life_cycle.awake(sync),
        encode_prompt=rollouts.encode_prompt,
        pad_token_id=tokenizer.pad_token_id or 0,
        reference=trained.reference,
        critic=trained.critic,
        life_cycle=life_cycle,
        parity=build_parity(config, tokenizer, engine, trained.score, life_cycle, sync),
    )
