"""The tool environment: JSON calls in tags go in, results in tags come out, in chat turns."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from search_r1.config import EnvironmentConfig
from search_r1.data.chat_turns import ChatTurns
from search_r1.environments.passages import Decode, Encode, escape_tags, fit_parts
from search_r1.environments.tool_registry import Tool
from search_r1.errors import ConfigError
from search_r1.protocols import Retriever, ToolExecutor
from search_r1.rollout.event_loop import EventLoopThread
from search_r1.rollout.tool_calls import ToolCall, find_answer, parse_tool_turn
from search_r1.types import Action, Completion, Observation, Prompt, ToolResult

CUT_MARK = " [cut]"
"""Ends a call or a result of which only the beginning fits."""
_MAX_CHARS_PER_TOKEN = 32
"""Text beyond this many characters a token of the limit is dropped before it is encoded."""
_JSON_CHARACTERS = re.compile(r"(?:[^\\]|\\u[0-9a-f]{4}|\\[^u])*", re.DOTALL)
"""Characters and whole escapes inside a JSON string."""


class ToolEnvironment:
    """Answers all calls of a turn, over all trajectories, concurrently; a turn without a call ends its trajectory."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        executor: ToolExecutor,
        turns: ChatTurns,
        encode: Encode,
        decode: Decode,
        config: EnvironmentConfig,
        max_obs_length: int,
        retriever: Retriever | None = None,
    ) -> None:
        """`encode` must treat special tokens as plain text; `retriever` is closed with the environment.

        Raises:
            ConfigError: `max_obs_length` has no room for the tags around the results of a turn.
        """
        self._tools = tools
        self._executor = executor
        self._turns = turns
        self._encode = encode
        self._decode = decode
        self._config = config
        self._max_obs_length = max_obs_length
        self._retriever: Any = retriever
        self._thread: EventLoopThread | None = None
        most = config.max_calls_per_turn + 1
        _, frame = self._assemble([CUT_MARK] * 2 * most, ["success"] * most, cut=True)
        if len(frame) > max_obs_length:
            raise ConfigError(
                f"rollout.max_obs_length={max_obs_length} is too small for the results of environment."
                f"max_calls_per_turn={config.max_calls_per_turn} calls, whose tags alone take {len(frame)} tokens: "
                "raise it, or allow fewer calls"
            )

    @property
    def stop(self) -> tuple[str, ...]:
        return tuple(filter(None, (self._turns.end_of_turn, self._turns.turn_start)))

    def parse(self, completion: Completion) -> Action:
        """The calls of a turn; without one its final answer, if there is any.

        A sampled turn-start token ends the trajectory: the policy has begun to write somebody else's turn.
        """
        ids, text = completion.token_ids, completion.text
        ended = bool(ids) and ids[-1] == self._turns.end_id
        if ended:
            text = text.removesuffix(self._turns.end_of_turn)
        began_another = self._turns.start_id in ids
        if began_another:
            text = text.partition(self._turns.turn_start)[0]
        calls, outside = parse_tool_turn(self._turns.header + text)
        if calls and not began_another:
            kind = "tool_call" if any(not call.error for call in calls) else "invalid"
            return Action(kind, "\n".join(call.text for call in calls), cut=not ended)  # type: ignore[arg-type]
        answer = find_answer(outside, self._config.answer_pattern)
        return Action("end") if answer is None else Action("final", answer)

    def step(self, actions: Sequence[Action], prompts: Sequence[Prompt]) -> list[Observation]:
        """The results of all calls of all trajectories, which run concurrently."""
        if self._thread is None:
            self._thread = EventLoopThread("tools")
        return self._thread.submit(self._step(actions, prompts)).result()

    async def _step(self, actions: Sequence[Action], prompts: Sequence[Prompt]) -> list[Observation]:
        return await asyncio.gather(*(self.astep(a, p) for a, p in zip(actions, prompts, strict=True)))

    async def astep(self, action: Action, prompt: Prompt) -> Observation:
        """The results of one trajectory's calls, in order. A failure behind any of them is the observation's."""
        start = perf_counter()
        calls, _ = parse_tool_turn(action.content)
        named = prompt.question.tools
        allowed = [name for name in (self._tools if named is None else named) if name in self._tools]
        most = self._config.max_calls_per_turn
        if len(calls) > most:
            calls = [*calls[:most], ToolCall("", error=f"only the first {most} calls of a turn are run")]
        results = await asyncio.gather(*(self._run(call, allowed) for call in calls))
        failure = next((result.failure for result in results if result.failure), "")
        if failure:
            return Observation("", (), seconds=perf_counter() - start, failure=failure)
        return self._observation(calls, results, action.cut, start)

    async def aclose(self) -> None:
        """Close what the retriever opened on the running event loop."""
        if hasattr(self._retriever, "aclose"):
            await self._retriever.aclose()

    def close(self) -> None:
        """End the thread of `step`."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.submit(self.aclose()).result()
            thread.close()

    async def _run(self, call: ToolCall, allowed: Collection[str]) -> ToolResult:
        if call.error:
            return ToolResult("", "error", call.error)
        if call.name not in allowed:
            names = ", ".join(allowed) or "none"
            return ToolResult("", "error", f"there is no tool {call.name!r}; the tools are {names}")
        return await self._executor.execute(self._tools[call.name], call.arguments)

    def _observation(
        self, calls: Sequence[ToolCall], results: Sequence[ToolResult], cut: bool, start: float
    ) -> Observation:
        """Calls and results within the token limit, each keeping its beginning."""
        most = self._max_obs_length * _MAX_CHARS_PER_TOKEN
        clipped = [replace(result, content=_clip(result.content, most)) for result in results]
        pairs = zip(calls, clipped, strict=True)
        parts = [part for c, r in pairs for part in (_encodable(_clip(c.inner, most)), json_body(r.content))]
        statuses = [result.status for result in results]
        fitted = fit_parts(
            parts,
            lambda kept: self._assemble(kept, statuses, cut),
            self._encode,
            self._decode,
            self._max_obs_length,
            CUT_MARK,
        )
        return Observation(
            fitted.text,
            fitted.token_ids,
            seconds=perf_counter() - start,
            truncated=fitted.truncated or clipped != results,
            calls=tuple(clipped),
        )

    def _assemble(self, parts: Sequence[str], statuses: Sequence[str], cut: bool) -> tuple[str, list[int]]:
        """`parts` are call and content in turn."""
        responses = [
            tool_response(call, status, content)
            for call, content, status in zip(parts[::2], parts[1::2], statuses, strict=True)
        ]
        return self._turns.follow_up("\n".join(responses), cut)


def tool_response(call: str, status: str, body: str) -> str:
    """One result as the model reads it. `body` is a JSON string without its quotes, of which the end may be cut off.

    >>> tool_response('{"name": "now"}', "success", "noon")
    '<tool_response>{"name": "now"}\\n{"status": "success", "content": "noon"}\\n</tool_response>'
    """
    if body.endswith(CUT_MARK):
        whole = _JSON_CHARACTERS.match(body.removesuffix(CUT_MARK))
        body = (whole[0] if whole else "") + CUT_MARK
    return f'<tool_response>{call}\n{{"status": "{status}", "content": "{body}"}}\n</tool_response>'


def _clip(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[:max_chars] + CUT_MARK


def json_body(content: str) -> str:
    """A result as `tool_response` takes it."""
    return _encodable(json.dumps(content, ensure_ascii=False)[1:-1])


def _encodable(text: str) -> str:
    """Tags of the protocol lose their `<`; lone surrogates, which JSON escapes can spell, have no encoding."""
    return escape_tags(text.encode("utf-8", "replace").decode("utf-8"))
