"""Rollouts of the tool environment as demonstrations: the conversation that was had, calls and results as they were."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from search_r1.environments.search_tool import search_tool
from search_r1.environments.tool_registry import load_tools
from search_r1.rewards.exact_match import em

_RESPONSES = re.compile(r"<tool_response>.*</tool_response>", re.DOTALL)


def calls_tools(rollout: Mapping[str, Any]) -> bool:
    """It was answered by tools at least once."""
    return any(turn.get("calls") for turn in rollout.get("turns") or ())


def tool_fault(rollout: Mapping[str, Any]) -> str:
    """Why a rollout is no demonstration, as `traces.fault`: a call failed, no answer, or not exactly a golden one."""
    *acting, last = rollout["turns"]
    calls = [call for turn in acting for call in turn.get("calls") or ()]
    if rollout.get("status") != "answered" or last.get("observation") or any(c["status"] != "success" for c in calls):
        return "not well formed"
    if not all(_RESPONSES.search(turn.get("observation") or "") for turn in acting):
        return "not well formed"
    return "" if em(rollout.get("answer") or "", rollout["golden_answers"]) else "wrong answer"


def tool_messages(rollout: Mapping[str, Any], end_of_text: re.Pattern[str]) -> list[dict[str, str]]:
    """The question's messages, then turns and responses; `end_of_text` is left out, the chat template writes it."""
    messages = [dict(message) for message in rollout["prompt"]]
    for turn in rollout["turns"]:
        messages.append({"role": "assistant", "content": end_of_text.sub("", turn["completion"])})
        if responses := _RESPONSES.search(turn.get("observation") or ""):
            messages.append({"role": "user", "content": responses[0]})
    return messages


def tool_schemas(modules: Sequence[str], search_top_k: int | None) -> str:
    """JSON of the schemas that the rollouts' prompts told, in that order; search where `search_top_k` is given."""
    nobody: Any = None  # only the schema is wanted
    first = [search_tool(nobody, search_top_k, max_query_chars=0)] if search_top_k else []
    return json.dumps([tool.schema for tool in load_tools(modules, first=first).values()])
