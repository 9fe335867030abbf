"""What a row of demonstrations says, whatever form it came in: messages of three roles, and the tools they call."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from search_r1.environments.tools import json_body, tool_response
from search_r1.errors import DataError

Message = Mapping[str, str]
Row = Mapping[str, Any]
Kind = Literal["system", "user", "assistant", "call", "result"]
_Named = tuple[str, str]
"""The id of a call, perhaps empty, and the call or its result."""

_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Roles in turn: perhaps `system`, then `user` and `assistant`, ending with `assistant`."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Function schemas in OpenAI's form, shown to the model as in a rollout."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a row."""

    kind: Kind
    content: Any
    """As it stands there: a text, or one or several tool calls, perhaps as JSON."""
    before: str = ""
    """What the assistant says before its calls."""
    call_id: str = ""
    """Which call a result answers, where it says so."""


def conversation(turns: Sequence[Turn], tools: Any = None) -> Conversation:
    """Messages as a rollout would hold them: calls and results in the tags of the tool environment.

    Raises:
        DataError: what is wrong with the row, without its place.
    """
    messages: list[dict[str, str]] = []
    state, calls, results = "start", list[_Named](), list[_Named]()
    for number, turn in enumerate(turns, start=1):
        kind, content = turn.kind, turn.content
        if results and kind != "result":
            messages.append({"role": "user", "content": _results(calls, results, number)})
            state, results = "asked", []
        state = _next_state(state, kind, number)
        if kind == "result":
            results.append((turn.call_id, _text(content, number, of_tool=True)))
        elif kind == "call":
            thought, calls = _calls(content, number)
            text = "\n".join(f"<tool_call>{call}</tool_call>" for _, call in calls)
            before = _text(turn.before, number) + "\n" if turn.before else ""
            messages.append({"role": "assistant", "content": _text(before + thought + text, number)})
        else:
            calls = [] if kind == "assistant" else calls
            messages.append({"role": kind, "content": _text(content, number)})
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError("no assistant turn to learn from")
    if state not in ("spoke", "called"):
        raise DataError("roles out of order: the last turn is not the assistant's")
    return Conversation(tuple(messages), _schemas(tools))


def _next_state(state: str, kind: Kind, number: int) -> str:
    """After this turn; a result may follow calls, results, or what the assistant says."""
    allowed = {
        "start": {"system": "told", "user": "asked"},
        "told": {"user": "asked"},
        "asked": {"assistant": "spoke", "call": "called"},
        "spoke": {"user": "asked", "result": "answered"},
        "called": {"result": "answered"},
        "answered": {"result": "answered"},
    }
    if kind not in allowed[state]:
        what = {"call": "a tool call", "result": "a tool's result"}.get(kind, kind)
        after = " or ".join(sorted(allowed[state]))
        raise DataError(f"roles out of order: turn {number} is {what}, where {after} is expected")
    return allowed[state][kind]


def _text(content: Any, number: int, of_tool: bool = False) -> str:
    if not isinstance(content, str):
        raise DataError(f"turn {number} holds {str(content)[:80]!r} where a text is expected")
    if of_tool:  # may be empty, and `json_body` replaces what has no encoding
        return content
    if not content.strip():
        raise DataError(f"turn {number} is empty")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"turn {number} holds {content[error.start]!r}, which is half of a character") from error
    return content


def _calls(content: Any, number: int) -> tuple[str, list[_Named]]:
    """A thought before the calls, and each call as the JSON that a rollout parses, with its id."""
    thought = ""
    if isinstance(content, str):
        found = _THOUGHT.match(content)
        thought = found[0] if found else ""
        content = _json(content[len(thought) :], f"turn {number}: the tool call")
    calls = []
    for call in content if isinstance(content, list) else [content]:
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise DataError(f"turn {number}: a tool call needs a name and arguments, found {str(call)[:80]}")
        arguments = inner.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _json(arguments, f"turn {number}: the arguments of {inner['name']}")
        text = json.dumps({"name": inner["name"], "arguments": arguments}, ensure_ascii=False)
        calls.append((str(call.get("id") or ""), text))
    if not calls:
        raise DataError(f"turn {number}: the list of tool calls is empty")
    return thought, calls


def _results(named_calls: Sequence[_Named], named_results: Sequence[_Named], number: int) -> str:
    """One response a call where they can be told apart, else all results behind all calls."""
    calls = [call for _, call in named_calls]
    results = [result for _, result in _in_order(named_calls, named_results, number)]
    if len(results) == 1 and len(calls) > 1:
        try:
            listed = json.loads(results[0])
        except ValueError:
            listed = None
        if isinstance(listed, list) and len(listed) == len(calls):
            results = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in listed]
    if len(results) != len(calls):
        calls, results = ["\n".join(calls)], ["\n".join(results)]
    pairs = zip(calls, results, strict=True)
    return "\n".join(tool_response(call, "success", json_body(result)) for call, result in pairs)


def _in_order(calls: Sequence[_Named], results: Sequence[_Named], number: int) -> Sequence[_Named]:
    """Results in the order of their calls where all have ids, else as they stand."""
    asked, answered = [name for name, _ in calls], [name for name, _ in results]
    if not calls or not all(asked + answered) or len(set(asked)) < len(asked):
        return results
    if sorted(asked) != sorted(answered):
        raise DataError(
            f"before turn {number} results answer the calls {', '.join(answered)}, where {', '.join(asked)} were "
            "called: each call needs one result with its id"
        )
    by_id = dict(results)
    return [(name, by_id[name]) for name in asked]


def _schemas(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if isinstance(tools, str):
        tools = _json(tools, "tools") if tools.strip() else None
    if tools is not None and not isinstance(tools, list | tuple):
        raise DataError(f"tools: a list of schemas is expected, found {str(tools)[:80]}")
    schemas, names = [], set[str]()
    for tool in tools or ():
        if isinstance(tool, str):
            tool = _json(tool, "tools")
        schema = tool if isinstance(tool, Mapping) and "function" in tool else {"type": "function", "function": tool}
        function = schema["function"]
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"tools: a schema needs a name, found {str(tool)[:80]}")
        if function["name"] in names:
            raise DataError(f"tools: two schemas have the name {function['name']!r}; rename or remove one")
        names.add(function["name"])
        schemas.append(schema)
    return tuple(schemas)


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{what} is not JSON ({error})") from error


def read_rows(file: Path) -> Iterator[tuple[str, Row | DataError]]:
    """Rows of a parquet, JSON or JSON lines file, each with the words for where it stands; the unreadable as errors.

    Raises:
        DataError: missing, empty, damaged, or of another kind.
    """
    if not file.is_file():
        raise DataError(f"{file} does not exist")
    rows: Iterator[tuple[str, Any]]
    if file.suffix == ".parquet":
        rows = _numbered(file, _parquet_rows(file))
    elif file.suffix in (".json", ".jsonl"):
        rows = _json_rows(file)
    else:
        raise DataError(f"{file}: rows are read from .parquet, .json and .jsonl files; convert it")
    empty = True
    for where, row in rows:
        empty = False
        yield where, row if isinstance(row, Mapping | DataError) else DataError("not a JSON object")
    if empty:
        raise DataError(f"{file} has no rows")


def _parquet_rows(file: Path) -> list[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(file).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet ({error}): write it anew") from error
    return [{column: _without_nulls(value) for column, value in row.items()} for row in rows]


def _without_nulls(value: Any) -> Any:
    """Structs of one column share their keys in Parquet: null stands for what a row does not have."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """A JSON array, or one object a line."""
    with file.open("rb") as lines:  # bytes, so that only \n ends a line
        head = next((line for line in lines if line.strip()), b"").removeprefix(codecs.BOM_UTF8).lstrip()
        if head.startswith(b"["):
            try:
                yield from _numbered(file, json.loads(file.read_bytes()))
            except ValueError as error:
                raise DataError(f"{file} is not JSON ({error})") from error
            return
        lines.seek(0)
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    row = DataError(f"not JSON ({error})")
                yield f"{file}, line {number}", row


def _numbered(file: Path, rows: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows, start=1):
        yield f"{file}, row {number}", row
