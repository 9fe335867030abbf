"""A tool environment over a small real tokenizer, and an engine that plays texts as a chat model would sample them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from search_r1.config import EnvironmentConfig, RolloutConfig
from search_r1.data.chat_turns import ChatTurns
from search_r1.data.templates import encode_plain
from search_r1.data.tool_prompts import ToolPrompts
from search_r1.environments.executors import PlainExecutor
from search_r1.environments.tool_registry import Tool, tool
from search_r1.environments.tools import ToolEnvironment
from search_r1.protocols import ToolExecutor, Weights
from search_r1.rollout.manager import LLMGenerationManager
from search_r1.types import Action, Completion, Prompt, Question, SamplingConfig, Trajectory
from tests.chat_templates import chat_tokenizer

ROLLOUT = RolloutConfig(
    max_turns=4, max_start_length=4000, max_response_length=400, max_obs_length=1200, max_prompt_length=12_000
)


@tool
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@tool
def fail(message: str) -> str:
    """Fail with a message."""
    raise ValueError(message)


@tool
def repeat(text: str, times: int) -> str:
    """Repeat a text."""
    return text * times


@tool
async def greet(name: str) -> str:
    """Greet someone, asynchronously."""
    return f"Hello {name}!"


TOOLS: dict[str, Tool] = {one.name: one for one in (add, fail, repeat, greet)}


def call(name: str, /, **arguments: Any) -> str:
    """A call as a model writes it."""
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


class ChatEngine:
    """Samples what a function of the context's text says, then the end-of-turn token unless the turn was cut."""

    def __init__(self, tokenizer: Any, respond: Callable[[str], str], end_id: int) -> None:
        self._tokenizer = tokenizer
        self._respond = respond
        self._end_id = end_id
        self.contexts: list[list[list[int]]] = []
        """Token ids, one list a call."""

    def generate(
        self, contexts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        self.contexts.append([list(context) for context in contexts])
        return [self._complete(list(context), sampling.max_new_tokens) for context in contexts]

    def _complete(self, context: list[int], limit: int) -> Completion:
        ids = encode_plain(self._tokenizer, self._respond(self.decode(context)))
        ids = [*ids, self._end_id][:limit]
        reason = "stop" if ids[-1] == self._end_id else "length"
        return Completion(tuple(ids), (-0.5,) * len(ids), self.decode(ids), reason)  # type: ignore[arg-type]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def load_weights(self, weights: Weights) -> None:
        pass

    def close(self) -> None:
        pass


def scripted(*texts: str) -> Callable[[str], str]:
    """The texts one after the other, whatever the context."""
    remaining = iter(texts)
    return lambda context: next(remaining)


def make_environment(
    tools: dict[str, Tool] | None = None,
    executor: ToolExecutor | None = None,
    layout: str = "smollm2",
    max_obs_length: int = ROLLOUT.max_obs_length,
    **settings: Any,
) -> ToolEnvironment:
    tokenizer = chat_tokenizer(layout)
    config = EnvironmentConfig(name="tools", **settings)
    return ToolEnvironment(
        TOOLS if tools is None else tools,
        executor or PlainExecutor(config.tool_timeout_s, config.max_concurrent_tools),
        ChatTurns(tokenizer, config.forced_opening),
        partial(encode_plain, tokenizer),
        partial(tokenizer.decode, skip_special_tokens=False),
        config,
        max_obs_length,
    )


def make_tool_prompt(
    text: str = "Who?",
    tools: Sequence[str] | None = None,
    layout: str = "smollm2",
    opening: str = "",
    group_id: int = 0,
) -> Prompt:
    question = Question("q/1", "made", text, ({"role": "user", "content": text},), ("Paris",))
    question = question if tools is None else replace(question, tools=tuple(tools))
    schemas = {name: one.schema for name, one in TOOLS.items()}
    return Prompt(question, group_id, ToolPrompts(chat_tokenizer(layout), schemas, opening)(question))


def play(environment: ToolEnvironment, *texts: str, layout: str = "smollm2", opening: str = "") -> Trajectory:
    """One trajectory whose turns are these texts."""
    tokenizer = chat_tokenizer(layout)
    engine = ChatEngine(tokenizer, scripted(*texts), ChatTurns(tokenizer).end_id)
    manager = LLMGenerationManager(engine, environment, ROLLOUT)
    prompt = make_tool_prompt(layout=layout, opening=opening)
    try:
        return manager.run_llm_loop([prompt], SamplingConfig(ROLLOUT.max_response_length))[0]
    finally:
        manager.close()


def answer(environment: ToolEnvironment, content: str, tools: Sequence[str] | None = None, cut: bool = False) -> Any:
    """The observation that follows these calls."""
    try:
        return environment.step([Action("tool_call", content, cut)], [make_tool_prompt(tools=tools)])[0]
    finally:
        environment.close()
