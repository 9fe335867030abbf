"""The nouns of the framework. Every other module speaks in these types.

Shapes: B trajectories in a batch, T tokens of the longest one (right-padded). `token_ids` are ragged Python
sequences, `input_ids` padded tensors. Index `t` of every (B, T) tensor speaks of token `input_ids[:, t]` given
what stands before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Question:
    """One dataset row: what to ask and which answers count as right."""

    question_id: str
    """Unique over all data sources, e.g. "nq/train/17"."""
    data_source: str
    text: str
    """The bare question, for logs, retrieval studies and reports."""
    prompt_messages: tuple[Mapping[str, str], ...]
    """Chat messages with `role` and `content`, as the policy's template receives them."""
    golden_answers: tuple[str, ...]
    tools: tuple[str, ...] | None = None
    """Names of the registered tools this row may call (tool environment only); None allows all of them."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question on its way into a rollout. Siblings of a group share `group_id`."""

    question: Question
    group_id: int
    """Given by the trainer, never read from a dataset row."""
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How an engine samples one turn."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """A turn ends as soon as its text contains one of these; the token that completed it is kept as sampled."""
    seed: int = 0
    """Base of every random draw; with equal seeds a rollout is repeated."""


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Completion:
    """What the policy sampled in one turn, to the token."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Of the sampled tokens, at the sampling temperature (at temperature 1 when greedy)."""
    text: str
    """`token_ids` decoded, special tokens included."""
    finish_reason: FinishReason
    """`stop`: a stop string or the end-of-text token; `length`: the token limit."""


ActionKind = Literal["search", "answer", "tool_call", "final", "end", "invalid"]


@dataclass(frozen=True, slots=True)
class Action:
    """What a completion asks for.

    In tags: `search`, `answer` or `invalid`. With tools: `tool_call` (`content` is the raw text of all calls),
    `invalid` (none of the calls can be read), and for a turn without any call, which ends the trajectory, `final`
    (`content` is its answer) or `end` (there is none).
    """

    kind: ActionKind
    content: str = ""
    cut: bool = False
    """Tools only: the turn lacks its end-of-turn token, so that the observation has to begin with one."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A retrieved passage, its title as the corpus writes it (wiki-18 puts it in quotes)."""

    title: str
    text: str
    passage_id: str = ""
    score: float | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What became of one tool call."""

    tool: str
    """Name of the registered tool; empty where none was run: an unreadable call, an unknown or forbidden name."""
    status: Literal["success", "error"]
    content: str
    seconds: float = 0.0
    """Wall-clock seconds the function ran, waiting for its turn or its thread not included; 0 where none was run."""
    failure: str = ""
    """Names the cause when the infrastructure behind the tool failed; the trajectory becomes VOID."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the environment appends after an action. Never trained on."""

    text: str
    token_ids: tuple[int, ...]
    passages: tuple[Passage, ...] = ()
    seconds: float = 0.0
    """Wall-clock seconds the environment took, shared by all observations of one request."""
    truncated: bool = False
    """Passages or tool results did not fit into the observation's token limit and were cut."""
    failure: str = ""
    """Names the cause when the infrastructure failed; the trajectory becomes VOID."""
    calls: tuple[ToolResult, ...] = ()
    """Tools only: one a call of the turn, in order."""


class Status(StrEnum):
    """How a trajectory stands. Only RUNNING is not final."""

    RUNNING = "running"
    ANSWERED = "answered"
    OUT_OF_TURNS = "out_of_turns"
    OUT_OF_TOKENS = "out_of_tokens"
    VOID = "void"


@dataclass(slots=True)
class Turn:
    """One completion, the action read from it, and the observation that followed (None after the last one)."""

    completion: Completion
    action: Action
    observation: Observation | None = None


@dataclass(slots=True)
class Trajectory:
    """One rollout: sampled tokens and observations, interleaved and append-only."""

    prompt: Prompt
    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    """Parallel to `response_ids`; True exactly where the policy sampled the token."""
    log_probs: list[float] = field(default_factory=list)
    """Parallel to `response_ids`; the engine's log-probs, 0.0 where not sampled."""
    turns: list[Turn] = field(default_factory=list)
    status: Status = Status.RUNNING
    policy_version: int = 0
    """The weights that sampled it: those after so many steps. Steps of the critic's warm-up count, though these leave
    the weights as they are."""
    failure: str = ""
    """The cause, when the status is VOID."""

    @property
    def context_ids(self) -> list[int]:
        """All tokens the policy sees now: prompt and response."""
        return [*self.prompt.token_ids, *self.response_ids]

    @property
    def answer(self) -> str | None:
        """The content of the action that answered, in tags or with tools; None when there is none."""
        last = self.turns[-1].action if self.turns else None
        return last.content if last is not None and last.kind in ("answer", "final") else None


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Scored trajectories as tensors, right-padded."""

    input_ids: Tensor
    """(B, T) int64."""
    attention_mask: Tensor
    """(B, T) bool, False on padding."""
    loss_mask: Tensor
    """(B, T) bool, True on sampled tokens."""
    rollout_log_probs: Tensor
    """(B, T) float32, the engine's; 0 outside `loss_mask`."""
    rewards: Tensor
    """(B,) float32."""
    group_ids: Tensor
    """(B,) int64."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """All that one optimizer phase needs. Token tensors are (B, T) float32, aligned with `rollout.input_ids`."""

    rollout: RolloutBatch
    advantages: Tensor
    """0 outside `loss_mask`."""
    old_log_probs: Tensor | None = None
    """The trainer's log-probs before the update. None: the update makes one optimizer step, so that they equal
    the current ones and are not computed twice."""
    ref_log_probs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    importance_weights: Tensor | None = None
    """Correction for tokens sampled by another policy than the trainer's; None means 1."""
