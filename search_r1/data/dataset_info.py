"""LLaMA-Factory's `dataset_info.json`: which files there are, and how their rows become conversations.

Forms: alpaca (instruction, input, output), sharegpt (turns with `from` and `value`), openai (turns with `role` and
`content`, calls in `tool_calls`). The last one is also what files without a `dataset_info.json` hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_r1.data.conversations import Conversation, Row, Turn, conversation
from search_r1.errors import DataError
from search_r1.llamafactory_keys import nearest

Convert = Callable[[Row], Conversation]

_ALPACA_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
_SHARED_COLUMNS = {"system": "system", "tools": "tools"}
_TURN_COLUMNS = {"sharegpt": {"messages": "conversations"}, "openai": {"messages": "messages"}}
_TAGS = {
    "sharegpt": {
        "role_tag": "from",
        "content_tag": "value",
        "user_tag": "human",
        "assistant_tag": "gpt",
        "observation_tag": "observation",
        "function_tag": "function_call",
        "system_tag": "system",
    },
    "openai": {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "observation_tag": "tool",
        "function_tag": "function",
        "system_tag": "system",
    },
}
_HUBS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_KEYS = {"file_name", "formatting", "columns", "tags", "ranking", "num_samples", *_HUBS}


@dataclass(frozen=True, slots=True)
class Dataset:
    """Files of one form."""

    files: tuple[Path, ...]
    convert: Convert


def plain_dataset(file: str) -> Dataset:
    """A file whose rows hold `messages` in OpenAI's form, and perhaps `tools`."""
    return Dataset((Path(file),), _turns_form("openai", {}, {}, "a file of conversations"))


def load_datasets(info: str, names: Sequence[str]) -> list[Dataset]:
    """The named datasets of a `dataset_info.json`, whose paths count from its folder.

    Raises:
        DataError: no such file or name, a dataset without its file, a form, column or tag that is not known.
    """
    path = Path(info)
    if not path.is_file():
        raise DataError(f"{path} does not exist: dataset_dir must be the folder that holds dataset_info.json")
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error})") from error
    if not isinstance(entries, Mapping):
        raise DataError(f"{path} must hold an object: a name and a description for each dataset")
    for name in names:
        if not isinstance(entries.get(name), Mapping):
            raise DataError(f"{path} describes no dataset {name!r}{nearest(name, list(entries))}")
    return [_dataset(path, name, entries[name]) for name in names]


def _dataset(path: Path, name: str, entry: Mapping[str, Any]) -> Dataset:
    where = f"{path}: dataset {name!r}"
    _check_known(where, "key", entry, _KEYS)
    if hub := next((key for key in _HUBS if entry.get(key)), None):
        raise DataError(f"{where} lies elsewhere ({hub}): fetch it, and name the file in file_name")
    if entry.get("ranking"):
        raise DataError(f"{where} holds rankings, which supervised fine-tuning cannot learn from")
    if entry.get("num_samples"):
        raise DataError(f"{where}: num_samples draws at random; cut the file, or set max_samples in the training file")
    file = path.parent / str(entry.get("file_name") or "")
    if not entry.get("file_name") or not file.exists():
        raise DataError(f"{where} points at {file}, which does not exist: put it there, or correct file_name")
    files = tuple(sorted(child for child in file.iterdir() if child.is_file())) if file.is_dir() else (file,)
    return Dataset(files, _form(where, entry))


def _form(where: str, entry: Mapping[str, Any]) -> Convert:
    formatting = entry.get("formatting", "alpaca")
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    if formatting == "alpaca":
        _check_known(where, "column", columns, _ALPACA_COLUMNS | _SHARED_COLUMNS)
        return _alpaca_form(columns, where)
    if formatting not in _TAGS:
        raise DataError(f"{where}: formatting={formatting!r} is none of alpaca, sharegpt, openai")
    _check_known(where, "column", columns, _TURN_COLUMNS[formatting] | _SHARED_COLUMNS)
    _check_known(where, "tag", tags, _TAGS[formatting])
    return _turns_form(formatting, columns, tags, where)


def _check_known(where: str, what: str, given: Mapping[str, Any], known: Mapping[str, Any] | set[str]) -> None:
    for name in given:
        if name not in known:
            raise DataError(f"{where}: {what} {name!r} is not supported{nearest(name, sorted(known))}")


def _alpaca_form(columns: Mapping[str, str], where: str) -> Convert:
    """Columns that are not named in `columns` are not read; without any, all have their usual names."""
    names = dict(columns or _ALPACA_COLUMNS | _SHARED_COLUMNS)
    prompt, response = names.get("prompt", ""), names.get("response", "")

    def convert(row: Row) -> Conversation:
        if prompt not in row or response not in row:
            raise DataError(f"no column {(prompt if prompt not in row else response)!r}; name it in columns ({where})")
        turns = _system(row.get(names.get("system", "")))
        for pair in row.get(names.get("history", "")) or ():
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise DataError(f"history holds {str(pair)[:80]!r}, where a question and its answer are expected")
            turns += [Turn("user", pair[0]), Turn("assistant", pair[1])]
        query = [row[prompt], row.get(names.get("query", ""))]
        turns.append(Turn("user", "\n".join(str(text) for text in query if text)))
        turns.append(Turn("assistant", row[response]))
        return conversation(turns, row.get(names.get("tools", "")))

    return convert


def _turns_form(formatting: str, columns: Mapping[str, str], tags: Mapping[str, str], where: str) -> Convert:
    names = dict(columns or _TURN_COLUMNS[formatting] | _SHARED_COLUMNS)
    tag = {**_TAGS[formatting], **tags}
    column = names.get("messages", "")
    kinds = {
        tag["user_tag"]: "user",
        tag["assistant_tag"]: "assistant",
        tag["observation_tag"]: "result",
        tag["function_tag"]: "call",
        tag["system_tag"]: "system",
    }

    def turn(number: int, message: Any) -> Turn:
        role = message.get(tag["role_tag"]) if isinstance(message, Mapping) else None
        if role not in kinds:
            what = f"the role {role!r}" if role else f"no {tag['role_tag']!r}"
            raise DataError(f"turn {number} has {what}; the roles are {', '.join(kinds)}")
        content = _joined(message.get(tag["content_tag"]))
        if calls := message.get("tool_calls"):
            return Turn("call", calls, before=content or "")
        return Turn(kinds[role], content)  # type: ignore[arg-type]

    def convert(row: Row) -> Conversation:
        messages = row.get(column)
        if not messages:
            raise DataError(f"no `{column}`: it must hold the turns of a conversation ({where})")
        turns = [turn(number, message) for number, message in enumerate(messages, start=1)]
        if turns[0].kind == "system":
            turns = _system(turns[0].content) + turns[1:]
        else:
            turns = _system(row.get(names.get("system", ""))) + turns
        return conversation(turns, row.get(names.get("tools", "")))

    return convert


def _system(text: Any) -> list[Turn]:
    return [Turn("system", text)] if text and str(text).strip() else []


def _joined(content: Any) -> Any:
    """Text parts as one text."""
    if isinstance(content, list) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        return "".join(str(part.get("text") or "") for part in content)
    return content
