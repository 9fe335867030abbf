"""LLaMA-Factory's `dataset_info.json`: which files there are, and how their rows become conversations.

Forms: alpaca (instruction, input, output), sharegpt (turns with `from` and `value`), openai (turns with `role` and
`content`, calls in `tool_calls`). The last one is also what files without a `dataset_info.json` hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
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
_KEYS = {"file_name", "formatting", "columns", "tags", "ranking", "num_samples", "split", *_HUBS}
_NOT_READ = {
    "reasoning_content": ((None, ""), "write the thought into the text as <think>…</think>"),
    "weight": ((None, 1), "every assistant turn is learned; leave the key out, or the row"),
}
"""Keys of a turn that would change what is learned, the values under which they would not, and the remedy."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Files of one form."""

    files: tuple[Path, ...]
    convert: Convert
    where: str = ""
    """Words for the description."""
    columns: tuple[str, ...] = ()
    """Columns that the description names."""

    def check_columns(self, found: Collection[str]) -> None:
        """Raise a DataError if the description names a column that none of the rows has: it would be lost silently."""
        for column in self.columns:
            if found and column not in found:
                raise DataError(
                    f"{self.where}: correct or leave out the column {column!r}, which no row has"
                    f"{nearest(column, sorted(found))}"
                )


def plain_dataset(file: str) -> Dataset:
    """A file whose rows hold `messages` in OpenAI's form, and perhaps `tools`."""
    other_forms = "describe rows of alpaca's, sharegpt's or another form in a dataset_info.json, data.dataset_info"
    return Dataset((Path(file),), _turns_form("openai", {}, {}, other_forms))


def load_datasets(info: str, names: Sequence[str]) -> list[Dataset]:
    """The named datasets of a `dataset_info.json`, whose paths count from its folder.

    Raises:
        DataError: no such file or name, a dataset without its file, a form, column or tag that is not known.
    """
    path = Path(info)
    if not path.is_file():
        raise DataError(f"{path} does not exist: dataset_dir must be the folder that holds dataset_info.json")
    try:
        entries = json.loads(path.read_bytes())
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
    if entry.get("split") not in (None, "train"):
        raise DataError(f"{where}: split={entry['split']!r}, where a file has no splits: name a file of those rows")
    file = path.parent / str(entry.get("file_name") or "")
    if not entry.get("file_name") or not file.exists():
        raise DataError(f"{where} points at {file}, which does not exist: put it there, or correct file_name")
    files = tuple(sorted(child for child in file.iterdir() if child.is_file())) if file.is_dir() else (file,)
    columns, tags = (_names(where, key, entry.get(key)) for key in ("columns", "tags"))
    convert = _form(where, entry.get("formatting", "alpaca"), columns, tags)
    return Dataset(files, convert, where, tuple(columns.values()))


def _names(where: str, key: str, given: Any) -> dict[str, str]:
    """`columns` or `tags`, without those that are left empty."""
    if not isinstance(given or {}, Mapping) or not all(isinstance(name or "", str) for name in (given or {}).values()):
        raise DataError(f"{where}: {key} must hold a name for each of its keys, found {str(given)[:80]}")
    return {what: name for what, name in (given or {}).items() if name}


def _form(where: str, formatting: Any, columns: Mapping[str, str], tags: Mapping[str, str]) -> Convert:
    if formatting == "alpaca":
        _check_known(where, "column", columns, _ALPACA_COLUMNS | _SHARED_COLUMNS)
        return _alpaca_form(columns, where)
    if formatting not in list(_TAGS):
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
        history = row.get(names.get("history", "")) or ()
        for pair in history if isinstance(history, list | tuple) else [history]:
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
        if not isinstance(role, str) or role not in kinds:
            what = f"the role {role!r}" if role else f"no {tag['role_tag']!r}"
            raise DataError(f"turn {number} has {what}; the roles are {', '.join(kinds)}")
        for key, (harmless, remedy) in _NOT_READ.items():
            if message.get(key) not in harmless:
                raise DataError(f"turn {number} has {key}={str(message[key])[:80]!r}, which is not read: {remedy}")
        content = _joined(message.get(tag["content_tag"]))
        if calls := message.get("tool_calls"):
            return Turn("call", calls, before=content or "")
        return Turn(kinds[role], content, call_id=str(message.get("tool_call_id") or ""))  # type: ignore[arg-type]

    def convert(row: Row) -> Conversation:
        messages = row.get(column)
        if not messages or not isinstance(messages, list):
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
