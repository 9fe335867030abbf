"""The seams. An implementation never imports another implementation, only these.

Each protocol has one contract suite in tests/contract, run over every implementation, and a fake in tests/fakes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from search_r1.types import (
    Action,
    Completion,
    Observation,
    Passage,
    RolloutBatch,
    SamplingConfig,
    ToolResult,
    TrainBatch,
    Trajectory,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

Metrics = dict[str, float]
"""`area/name` to a number."""
Weights = Iterable[tuple[str, "Tensor"]]
"""Hugging Face parameter names with full (unsharded) tensors, streamed one by one."""
State = dict[str, Any]
"""A checkpoint part: nested containers of tensors and plain values."""


class RolloutEngine(Protocol):
    """Samples from the current policy: vLLM, Hugging Face, several of either, or a fake in tests."""

    def generate(
        self, contexts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        """One completion a context, in order. No contexts: an empty list.

        `seeds` (one a context) make each row's draws independent of its batch-mates and of the number of workers.
        A context that leaves no room in the model's window, or an empty one, raises `EngineError`.
        """
        ...

    def load_weights(self, weights: Weights) -> None:
        """Replace the policy's weights in place; whatever was cached under the old ones is dropped."""
        ...

    def close(self) -> None: ...


class ScoringEngine(Protocol):
    """What an engine has beside `RolloutEngine` so that its log-probs can be compared with the trainer's."""

    def score(
        self, contexts: Sequence[Sequence[int]], candidates: Sequence[Sequence[int]], sampling: SamplingConfig
    ) -> list[list[float]]:
        """Log-probs of each context's candidates as its next token, as `generate` would report them: with the same
        cache, head and sampling parameters. What they rule out may have -inf."""
        ...

    def forget(self) -> None:
        """Drop what was cached of earlier contexts."""
        ...


class SleepingEngine(Protocol):
    """What an engine has beside `RolloutEngine` when it can give device memory back for a while."""

    def sleep(self, level: int = 1) -> None:
        """1 keeps the weights in host memory, 2 gives them up. Until it is awake again, and after level 2 has its
        weights again, sampling raises `EngineError`."""
        ...

    def wake_up(self, weights_only: bool = False) -> None:
        """`weights_only` makes room for new weights, not yet for sampling."""
        ...


class AsyncRolloutEngine(Protocol):
    """What an engine has beside `RolloutEngine` when it can sample single contexts, many at once."""

    async def agenerate(self, context: Sequence[int], sampling: SamplingConfig, seed: int) -> Completion:
        """As `RolloutEngine.generate` for one context. Cancelling it stops the sampling."""
        ...


class Environment(Protocol):
    """Reads actions out of completions and answers them."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings that end a turn."""
        ...

    def parse(self, completion: Completion) -> Action: ...

    def step(self, actions: Sequence[Action], prompts: Sequence[Any]) -> list[Observation]:
        """Answer one action of each of many trajectories at once, in order. Never called with an answer.

        `prompts` are the `Prompt`s of the same trajectories. An infrastructure failure comes back as an
        observation whose `failure` names the cause.
        """
        ...


class AsyncEnvironment(Protocol):
    """What an environment has beside `Environment` when it can answer single actions, many at once."""

    async def astep(self, action: Action, prompt: Any) -> Observation:
        """As `Environment.step` for one action. Called on one event loop only."""
        ...


class ToolExecutor(Protocol):
    """Runs one tool of `environments.tool_registry`; it never sees the prompt."""

    async def execute(self, tool: Any, arguments: Mapping[str, Any]) -> ToolResult:
        """Whatever the tool does, wrong arguments, exceptions and endless runs included, becomes a result."""
        ...


class Retriever(Protocol):
    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Best passages first, one list a query, in order. Raises `RetrieverError` when it cannot be had."""
        ...


class AsyncRetriever(Protocol):
    """What a retriever has beside `Retriever` when it can take single queries, many at once."""

    async def asearch(self, query: str, top_k: int) -> list[Passage]:
        """As `Retriever.search` for one query. Called on one event loop only."""
        ...


class Reward(Protocol):
    def __call__(self, trajectory: Trajectory) -> float | Mapping[str, float]:
        """The reward, or a mapping with `reward` and the parts it is made of."""
        ...


class Reference(Protocol):
    """A frozen policy that only scores."""

    def log_probs(self, batch: RolloutBatch) -> Tensor:
        """(B, T) at the sampling temperature, 0 outside the loss mask."""
        ...


class Policy(Reference, Protocol):
    """The trainable actor."""

    def update(self, batch: TrainBatch) -> Metrics: ...

    def save(self, folder: str) -> None:
        """Write a Hugging Face folder, and beside the weights what going on exactly needs (optimizer, schedule)."""
        ...

    def load(self, folder: str) -> None: ...


class Critic(Protocol):
    def values(self, batch: RolloutBatch) -> Tensor:
        """(B, T): the value of the state before each token, 0 outside the loss mask."""
        ...

    def update(self, batch: TrainBatch) -> Metrics: ...

    def save(self, folder: str) -> None: ...

    def load(self, folder: str) -> None: ...


class Scorer(Protocol):
    def __call__(self, batch: RolloutBatch, roles: Sequence[str]) -> dict[str, Tensor]:
        """(B, T) of each named role in one go: log-probs of `policy` and `reference`, values of `critic`."""
        ...


class WeightSync(Protocol):
    def __call__(self) -> Metrics:
        """Carry the policy's weights to the engine. Afterwards every completion is sampled under them."""
        ...


class Sharding(Protocol):
    """How a model lies over the workers: replicated or FSDP2."""

    @property
    def world_size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> Any:
        """The torch.device that computes."""
        ...

    @property
    def home(self) -> Any:
        """The torch.device where weights rest between passes: `device`, or the host."""
        ...

    @property
    def lowers_precision(self) -> bool:
        """Forward passes already run in the configured dtype; otherwise they need autocast."""
        ...

    @property
    def reads_weights(self) -> bool:
        """This rank reads models from their files. The others make them on the meta device for `wrap`."""
        ...

    def read(self, work: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """What `work` finds where weights are read, nothing elsewhere. Its `SearchR1Error` is raised on every rank."""
        ...

    def wrap(self, model: nn.Module) -> nn.Module:
        """Put a model, whose weights are in host memory, where this sharding holds it."""
        ...

    def accumulate(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Around each micro-batch: gradients are reduced (summed over the workers) only on the last one."""
        ...

    def finish_gradients(self, model: nn.Module) -> None:
        """Called once before clipping: whatever reduction the last backward did not do."""
        ...

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> float:
        """The global gradient norm before clipping."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum of a small tensor over the workers."""
        ...

    def max(self, values: Tensor) -> Tensor: ...

    def full_weights(self, model: nn.Module, names: Container[str] | None = None) -> Weights:
        """Unsharded weights of these names (None: all). Every rank must iterate it; each is gathered when reached."""
        ...

    def load_full_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """What `read` found. Names that are missing keep their weights; shapes must have been checked."""
        ...

    def full_optimizer_state(self, model: nn.Module, optimizer: Any) -> State:
        """Unsharded, on rank 0 (empty elsewhere), loadable on any number of workers."""
        ...

    def load_full_optimizer_state(self, model: nn.Module, optimizer: Any, state: State) -> None: ...


class Tracker(Protocol):
    def log(self, metrics: Metrics, step: int) -> None: ...

    def close(self) -> None: ...
