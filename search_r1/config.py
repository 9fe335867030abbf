"""The configuration as frozen dataclasses: every key, its unit and its default. configs/base.yaml mirrors it.

Sizes are global: a batch counts questions over all workers, per-worker sizes are computed. The rules that span keys
are in `config_checks.py`. `compose.py` fills these classes; nothing below the entry points sees Hydra or OmegaConf.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

_STRICT = {"extra": "forbid"}


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685) of policy and critic; the base weights stay as they are."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    rank: int = 0
    """0 trains all weights."""
    alpha: float = 16.0
    """The adapters' product counts `alpha / rank` times."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of linear modules, e.g. q_proj; never the output head."""


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
    attention: Literal["auto", "flash_attention_2", "varlen", "sdpa", "eager"] = "auto"
    """`auto` in bfloat16 on CUDA is flash-attn where installed, else torch's own (`varlen`); elsewhere SDPA."""
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)


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
    max_concurrent_searches: int = 256
    """Trajectories that wait for the environment at once, in the asynchronous schedule."""
    max_staleness: int = 0
    """Updates that may lie between the weights a batch was begun under and those that train on it.

    0 is strictly on-policy; with 1 or more the next batches are generated while the policy is updated.
    """


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
    timeout_s: float = 600.0
    """Of one completion in the asynchronous schedule, of a turn of all in lockstep, of a weight transfer between GPUs.

    A trajectory that waits longer is VOID.
    """
    cpu_cache_gib: float = 2.0
    """vLLM on a CPU: GiB of key/value cache."""
    enforce_eager: bool = False
    max_parity_error: float = 0.05
    """Largest mean absolute difference between engine and trainer log-probs of the same tokens."""
    sleep_while_training: bool = False
    """vLLM on a GPU: give its memory back until the next rollout."""
    sleep_level: Literal[1, 2] = 1
    """1 keeps a copy of the engine's weights in host memory, 2 gives them up and sends them again."""
    weight_transfer: Literal["auto", "shm", "ipc", "nccl"] = "auto"
    """vLLM: `shm` through host memory, `ipc` where engine and worker share a GPU, `nccl` where they have their own."""


@dataclass(frozen=True, slots=True)
class EnvironmentConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    name: Literal["search", "tools"] = "search"
    """`search` speaks in tags, `tools` in JSON calls of chat models."""
    retriever_urls: tuple[str, ...] = ("http://127.0.0.1:8000/retrieve",)
    """Tools: an empty list leaves out the tool named search."""
    top_k: int = 3
    timeout_s: float = 30.0
    max_retries: int = 4
    """After the first attempt, over all URLs, with exponential backoff and jitter."""
    max_queries_per_request: int = 256
    gather_ms: float = 5.0
    """Milliseconds in which the queries of concurrent trajectories are gathered into one request."""
    max_query_chars: int = 2000
    """A longer query is cut before it is sent."""
    tools: tuple[str, ...] = ()
    """Modules whose `@tool` functions may be called, `package.module`, beside search."""
    executor: Literal["plain", "langgraph"] = "plain"
    """Tools: `langgraph` runs them, and LangChain tools, through its ToolNode."""
    tool_timeout_s: float = 30.0
    """Of one call; search keeps the deadlines of its retriever instead."""
    max_concurrent_tools: int = 256
    max_calls_per_turn: int = 8
    """Further calls of a turn are not run, and told so."""
    forced_opening: str = ""
    """Tools: follows every assistant header, e.g. `<think>`; never trained on."""
    answer_pattern: Literal["any", "answer", "boxed"] = "any"
    """Tools: the answer is the last `<answer>…</answer>`, the last `\\boxed{…}`, or whichever begins last."""


@dataclass(frozen=True, slots=True)
class RewardConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    function: str = "em"
    """A name from rewards/, or `package.module:function`."""
    structure_score: float = 0.2
    format_score: float = 0.1
    retrieval_score: float = 0.0
    turn_penalty: float = 0.0
    """Taken off any reward for every turn that the environment answered."""


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
    importance_cap: float | None = None
    """Truncates the weight exp(old - rollout log-prob) that corrects a token sampled by other weights or kernels.

    None: no correction on-policy, 2.0 with `rollout.max_staleness` above 0.
    """
    importance_mask_above: float | None = None
    """Tokens whose weight lies above it, or below its inverse, are left out of the loss; None keeps all."""


@dataclass(frozen=True, slots=True)
class OptimConfig:
    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    name: Literal["adamw", "muon"] = "adamw"
    """`muon` orthogonalizes the steps of hidden matrices: quick on models trained from random weights."""
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
    """Hard cap on tokens, padding included, that a worker holds at once; one longer sequence goes alone."""
    packing: Literal["auto", "padded", "packed"] = "auto"
    """Of policy, reference and critic. `packed` lays sequences end to end, without padding; `auto` packs on CUDA."""
    clip_ratio: float = 0.2
    clip_ratio_high: float | None = None
    """Upper clip range; None is `clip_ratio`."""
    dual_clip: float | None = None
    """Lower bound factor for negative advantages (arXiv:1912.09729), e.g. 3.0; None is off."""
    entropy_coef: float = 0.0
    offload_while_generating: bool = False
    """On a GPU: weights and optimizer of policy, reference and critic wait in host memory during rollouts."""
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
    replicas: int = 1
    """fsdp2: copies of the model, each split over `num_workers / replicas` workers. 1 is full, more is hybrid."""
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
