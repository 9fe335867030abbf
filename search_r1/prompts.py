"""Named question templates: a bare question becomes the messages of the first prompt."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from search_r1.errors import ConfigError

Messages = tuple[dict[str, str], ...]

_SEARCH_R1 = (
    "Answer the given question. "
    "You must conduct reasoning inside <think> and </think> first every time you get new information. "
    "After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query </search> "
    "and it will return the top searched results between <information> and </information>. "
    "You can search as many times as your want. "
    "If you find no further external knowledge needed, you can directly provide the answer inside <answer> and "
    "</answer>, without detailed illustrations. For example, <answer> Beijing </answer>. Question: {question}\n"
)

_TOOLS = (
    "Answer the given question. Reason inside <think> and </think> before every step. Call tools when you need them, "
    "as often as you want. When you know the answer, give it inside <answer> and </answer>, without further calls and "
    "without detailed illustrations. For example, <answer> Beijing </answer>. Question: {question}\n"
)

TOOL_PROMPT = (
    "You can call these tools. Each line is the JSON schema of one:\n"
    "{schemas}\n"
    "Write a call as a JSON object between tags; several calls may follow one another:\n"
    '<tool_call>{"name": "tool name", "arguments": {"argument name": "value"}}</tool_call>\n'
    "Each result comes back between <tool_response> and </tool_response>."
)
"""Tells a model of its tools where its chat template has no place for them."""

TEMPLATES: dict[str, str] = {
    "search_r1": _SEARCH_R1,
    "tools": _TOOLS,
    "short": "Question: {question}\n",
    "bare": "{question}",
}
"""`search_r1` is, to the letter, the text that published checkpoints were trained on; `tools` goes with
`environment.name=tools`; `short` suits tiny models."""


def normalize_question(question: str) -> str:
    """Stripped and ending in a question mark, as every template shows it."""
    question = question.strip()
    return question if question.endswith("?") else question + "?"


def check_template(template: str, also: tuple[str, ...] = ()) -> None:
    """Raises `ConfigError`, with the nearest name, when `template` is neither in `TEMPLATES` nor in `also`."""
    names = (*TEMPLATES, *also)
    if template not in names:
        near = difflib.get_close_matches(template, names, n=1, cutoff=0)[0]
        raise ConfigError(f"there is no prompt template {template!r}; did you mean {near!r}? ({', '.join(names)})")


def prompt_messages(template: str, question: str) -> Messages:
    """The chat messages that ask `question` (one user message).

    Raises:
        ConfigError: no such template.
    """
    check_template(template)
    content = TEMPLATES[template].replace("{question}", normalize_question(question))
    return ({"role": "user", "content": content},)


def with_tool_prompt(
    messages: Sequence[Mapping[str, str]], schemas: Sequence[Mapping[str, Any]], role: str = "system"
) -> Messages:
    """`messages` with `TOOL_PROMPT` added to the first message of that role, or put before all as a new one.

    `schemas` are function schemas in OpenAI's form, as chat templates take them.
    """
    lines = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in schemas)
    text = TOOL_PROMPT.replace("{schemas}", lines)
    if messages and messages[0]["role"] == role:
        first, rest = dict(messages[0]), messages[1:]
        parts = (first["content"], text) if role == "system" else (text, first["content"])
        first["content"] = "\n\n".join(parts)
        return (first, *map(dict, rest))
    return ({"role": role, "content": text}, *map(dict, messages))
