"""Reading tool calls, or the final answer, out of the text of one turn. One pass, linear in its length."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

AnswerPattern = Literal["any", "answer", "boxed"]

_OPENING = re.compile(r"<think>|<tool_call>")
_CALL_TAG = re.compile(r"</?tool_call>")
_CALL_START, _CALL_END, _THOUGHT_END = "<tool_call>", "</tool_call>", "</think>"
_SPACE = re.compile(r"\s*")
_MAX_CALL_CHARS = 65_536
"""A call whose JSON is longer cannot be read."""
_ANSWER_TAG = re.compile(r"</?answer>")
_BRACE = re.compile(r"\\boxed\{|\\[{}]|[{}]")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it."""

    text: str
    """Everything from the opening tag on, the closing tag included where there is one."""
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    """Why it cannot be read; empty for a good call."""

    @property
    def inner(self) -> str:
        """What stands between the tags."""
        return self.text.removeprefix(_CALL_START).removesuffix(_CALL_END).strip()


def parse_tool_turn(text: str) -> tuple[list[ToolCall], str]:
    """The calls of a turn in order, and the text outside of them and of closed thoughts.

    A call ends where its JSON ends, so that a string in it may hold any tag. One that cannot be read reaches to the
    next tag of a call and carries its error. Calls inside a closed `<think>…</think>` are none; an unclosed `<think>`
    and a stray closing tag hide nothing. Where there are no `arguments`, `parameters` are, as Llama names them.

    >>> calls, rest = parse_tool_turn('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> done')
    >>> calls[0].name, dict(calls[0].arguments), rest
    ('add', {'a': 1}, ' done')
    """
    calls: list[ToolCall] = []
    outside: list[str] = []
    thoughts_close, position, kept = True, 0, 0
    while tag := _OPENING.search(text, position):
        if tag[0] == _CALL_START:
            outside.append(text[kept : tag.start()])
            call, position = _read_call(text, tag.start())
            calls.append(call)
            kept = position
            continue
        end = text.find(_THOUGHT_END, tag.end()) if thoughts_close else -1
        thoughts_close = end >= 0
        position = tag.end()
        if thoughts_close:
            outside.append(text[kept : tag.start()])
            position = kept = end + len(_THOUGHT_END)
    return calls, "".join([*outside, text[kept:]])


def _read_call(text: str, start: int) -> tuple[ToolCall, int]:
    """The call that opens at `start`, and where the text goes on after it."""
    begin = start + len(_CALL_START)
    value, end, error = _decode(text, begin)
    if not error and text.startswith(_CALL_END, end):
        end += len(_CALL_END)
        return _checked(text[start:end], value), end
    tag = _CALL_TAG.search(text, begin)
    if tag is None:
        return ToolCall(text[start:], error="the call is not closed by </tool_call>"), len(text)
    if tag[0] == _CALL_START:
        return ToolCall(text[start : tag.start()], error="the call is not closed before the next one"), tag.start()
    error = error or "there is more than one JSON object between the tags"
    return ToolCall(text[start : tag.end()], error=error), tag.end()


def _decode(text: str, begin: int) -> tuple[Any, int, str]:
    """A JSON value at `begin`, where it and the white space after it end, and what is wrong with it."""
    start = _skip_space(text, begin)
    try:
        value, length = _DECODER.raw_decode(text[start : start + _MAX_CALL_CHARS])
    except json.JSONDecodeError as error:
        return None, begin, f"the call is no JSON: {error.msg}"
    except (ValueError, RecursionError) as error:
        return None, begin, f"the call is no JSON: {error}"
    return value, _skip_space(text, start + length), ""


def _skip_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return space.end() if space else position


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _checked(text: str, value: Any) -> ToolCall:
    if not isinstance(value, dict):
        return ToolCall(text, error="the call is no JSON object")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return ToolCall(text, error="the call has no name")
    if not isinstance(arguments, dict):
        return ToolCall(text, error="the arguments of the call are no JSON object")
    return ToolCall(text, name, arguments)


def find_answer(text: str, pattern: AnswerPattern = "any") -> str | None:
    r"""The closed `<answer>…</answer>` or `\boxed{…}` that begins last, stripped; None where there is none.

    So a box inside of the tags is the answer, as in ReSearch's form.

    >>> find_answer(r"first \boxed{1}, rather \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    found: list[tuple[int, str]] = []
    if pattern != "boxed":
        found += _last_answer(text)
    if pattern != "answer":
        found += _last_boxed(text)
    return max(found)[1].strip() if found else None


def _last_answer(text: str) -> list[tuple[int, str]]:
    """At most one (begin, content)."""
    begin, last = None, []
    for tag in _ANSWER_TAG.finditer(text):
        if tag[0] == "<answer>":
            begin = tag.end()
        elif begin is not None:
            last = [(begin, text[begin : tag.start()])]
            begin = None
    return last


def _last_boxed(text: str) -> list[tuple[int, str]]:
    r"""At most one (begin, content), that which ends last. Braces balance inside; `\{` and `\}` are characters."""
    opened: list[int | None] = []
    last = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "\\boxed{":
            opened.append(brace.end())
        elif brace[0] == "{":
            opened.append(None)
        elif brace[0] == "}" and opened and (begin := opened.pop()) is not None:
            last = [(begin, text[begin : brace.start()])]
    return last
