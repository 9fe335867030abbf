"""Rows in the forms others use, as the messages that a rollout would hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from search_r1.data.conversations import Conversation, read_rows
from search_r1.data.dataset_info import Dataset, load_datasets, plain_dataset
from search_r1.errors import DataError

CALL = {"name": "search", "arguments": {"query": "Oslo"}}
SCHEMA = {"name": "search", "description": "d", "parameters": {"type": "object", "properties": {}}}
ONE_ANSWER = (
    f"<tool_response>{json.dumps(CALL)}\n" + '{"status": "success", "content": "Norway"}' + "\n</tool_response>"
)


def write_info(folder: Path, rows: list[Any], **entry: Any) -> str:
    """A dataset named `mine` of these rows."""
    (folder / "rows.json").write_text(json.dumps(rows))
    info = folder / "dataset_info.json"
    info.write_text(json.dumps({"mine": {"file_name": "rows.json", **entry}}))
    return str(info)


def convert(dataset: Dataset) -> list[Conversation | DataError]:
    found: list[Conversation | DataError] = []
    for file in dataset.files:
        for _, row in read_rows(file):
            try:
                found.append(row if isinstance(row, DataError) else dataset.convert(row))
            except DataError as error:
                found.append(error)
    return found


def read(folder: Path, row: Any, **entry: Any) -> Conversation:
    (found,) = convert(load_datasets(write_info(folder, [row], **entry), ["mine"])[0])
    if isinstance(found, DataError):
        raise found
    return found


def said(found: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in found.messages]


def test_alpaca_joins_instruction_and_input_behind_system_and_history(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief.", "history": [["Hi", "Hello"]]}
    assert said(read(tmp_path, row)) == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Add.\n1 2"),
        ("assistant", "3"),
    ]


def test_alpaca_columns_by_other_names_leave_out_what_is_not_named(tmp_path: Path) -> None:
    row = {"q": "Add.", "a": "3", "input": "not read", "system": "not read"}
    assert said(read(tmp_path, row, columns={"prompt": "q", "response": "a"})) == [("user", "Add."), ("assistant", "3")]


def test_sharegpt_turns_keep_their_order_and_tools(tmp_path: Path) -> None:
    turns = [("human", "Where is Oslo?"), ("function_call", json.dumps(CALL)), ("observation", "Norway"), ("gpt", "N.")]
    row = {
        "conversations": [{"from": role, "value": text} for role, text in turns],
        "system": "",
        "tools": json.dumps([SCHEMA]),
    }
    found = read(tmp_path, row, formatting="sharegpt")
    assert said(found) == [
        ("user", "Where is Oslo?"),
        ("assistant", f"<tool_call>{json.dumps(CALL)}</tool_call>"),
        ("user", ONE_ANSWER),
        ("assistant", "N."),
    ]
    assert found.tools == ({"type": "function", "function": SCHEMA},)


def test_sharegpt_tags_and_columns_may_have_other_names(tmp_path: Path) -> None:
    row = {"talk": [{"who": "me", "what": "Hi"}, {"who": "you", "what": "Hello"}], "conversations": "not read"}
    tags = {"role_tag": "who", "content_tag": "what", "user_tag": "me", "assistant_tag": "you"}
    found = read(tmp_path, row, formatting="sharegpt", columns={"messages": "talk"}, tags=tags)
    assert said(found) == [("user", "Hi"), ("assistant", "Hello")]


def test_openai_calls_become_tags_and_results_answer_them_one_by_one(tmp_path: Path) -> None:
    two = [{"type": "function", "function": {"name": "search", "arguments": json.dumps({"query": q})}} for q in "ab"]
    row = {
        "messages": [
            {"role": "system", "content": "Search."},
            {"role": "user", "content": [{"type": "text", "text": "Whe"}, {"type": "text", "text": "re?"}]},
            {"role": "assistant", "content": "Two at once.", "tool_calls": two},
            {"role": "tool", "content": "A"},
            {"role": "tool", "content": 'B "quoted"'},
            {"role": "assistant", "content": "There."},
        ],
        "tools": [{"type": "function", "function": SCHEMA}],
    }
    calls = [json.dumps({"name": "search", "arguments": {"query": query}}) for query in "ab"]
    found = read(tmp_path, row, formatting="openai")
    assert said(found)[2:4] == [
        ("assistant", "Two at once.\n" + "\n".join(f"<tool_call>{call}</tool_call>" for call in calls)),
        (
            "user",
            f'<tool_response>{calls[0]}\n{{"status": "success", "content": "A"}}\n</tool_response>\n'
            f'<tool_response>{calls[1]}\n{{"status": "success", "content": "B \\"quoted\\""}}\n</tool_response>',
        ),
    ]
    assert said(found)[:2] == [("system", "Search."), ("user", "Where?")]


def openai(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, *messages, {"role": "assistant", "content": "a"}]}


def named_call(name: str) -> dict[str, Any]:
    return {"id": f"of {name}", "type": "function", "function": {"name": name, "arguments": "{}"}}


def result_of(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"of {name}", "content": f"result of {name}"}


def test_results_answer_the_calls_whose_ids_they_name(tmp_path: Path) -> None:
    both = {"role": "assistant", "content": None, "tool_calls": [named_call("f"), named_call("g")]}
    for results in ("fg", "gf"):
        text = said(read(tmp_path, openai(both, *map(result_of, results)), formatting="openai"))[2][1]
        first, second = text.split("\n<tool_response>")
        assert "result of f" in first
        assert "result of g" in second
    for wrong in ("gh", "ff", "f"):
        with pytest.raises(DataError, match=r"before turn \d results answer the calls of .*, where of f, of g were"):
            read(tmp_path, openai(both, *map(result_of, wrong)), formatting="openai")


def test_a_tool_may_answer_with_nothing_or_with_half_a_character(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [named_call("f")]}
    for answer, shown in (("", ""), ("\ud800", "?")):
        found = read(tmp_path, openai(call, {"role": "tool", "content": answer}), formatting="openai")
        assert f'{{"status": "success", "content": "{shown}"}}' in said(found)[2][1]


def test_what_other_rows_of_a_parquet_file_have_is_neither_called_nor_told(tmp_path: Path) -> None:
    def row(name: str, argument: str) -> dict[str, Any]:
        call = {"function": {"name": name, "arguments": {argument: 1}}}
        properties = {argument: {"type": "integer"}}
        schema = {"name": name, "parameters": {"type": "object", "properties": properties}}
        turns = openai({"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "r"})
        return {**turns, "tools": [{"type": "function", "function": schema}]}

    rows = [row("f", "a"), row("g", "b")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    parquet, written = (convert(plain_dataset(f"{tmp_path}/rows.{kind}")) for kind in ("parquet", "json"))
    assert parquet == written
    assert isinstance(parquet[0], Conversation)
    assert '"arguments": {"a": 1}' in said(parquet[0])[1][1]


def test_one_observation_of_several_calls_is_a_list_or_answers_all_of_them(tmp_path: Path) -> None:
    def answers(observation: str) -> str:
        turns = [
            ("human", "q"),
            ("function_call", json.dumps([CALL, CALL])),
            ("observation", observation),
            ("gpt", "a"),
        ]
        row = {"conversations": [{"from": role, "value": text} for role, text in turns]}
        return said(read(tmp_path, row, formatting="sharegpt"))[2][1]

    assert answers('["x", {"y": 1}]').count("<tool_response>") == 2
    assert '"content": "{\\"y\\": 1}"' in answers('["x", {"y": 1}]')
    assert answers("both").count("<tool_response>") == 1


def test_a_thought_before_a_call_stays_before_it(tmp_path: Path) -> None:
    value = f"<think> Look. </think>\n{json.dumps(CALL)}"
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": value}]}
    text = said(read(tmp_path, row, formatting="sharegpt"))[1][1]
    assert text == f"<think> Look. </think>\n<tool_call>{json.dumps(CALL)}</tool_call>"


def turns(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": value} for role, value in pairs]}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (turns(("human", "q")), "no assistant turn to learn from"),
        (turns(("gpt", "a")), "roles out of order: turn 1 is assistant, where system or user is expected"),
        (turns(("human", "q"), ("human", "q")), "turn 2 is user, where assistant or call is expected"),
        (turns(("human", "q"), ("gpt", "a"), ("gpt", "a")), "turn 3 is assistant"),
        (turns(("human", "q"), ("gpt", "a"), ("human", "q")), "the last turn is not the assistant's"),
        (turns(("human", "q"), ("observation", "o"), ("gpt", "a")), "turn 2 is a tool's result"),
        (turns(("human", "q"), ("system", "s"), ("gpt", "a")), "turn 2 is system"),
        (turns(("human", "q"), ("robot", "a")), "turn 2 has the role 'robot'; the roles are human, gpt"),
        (turns(("human", "q"), ("gpt", " ")), "turn 2 is empty"),
        (turns(("human", "q"), ("gpt", 3)), "turn 2 holds '3' where a text is expected"),
        (turns(("human", "q"), ("function_call", "search(Oslo)")), "turn 2: the tool call is not JSON"),
        (turns(("human", "q"), ("function_call", '{"arguments": {}}')), "a tool call needs a name"),
        ({"conversations": []}, "no `conversations`"),
        ({"conversations": 5}, "no `conversations`"),
        ({"conversations": [{"from": ["human"], "value": "q"}]}, r"turn 1 has the role \['human'\]"),
        (turns(("human", "q"), ("gpt", "a \ud800")), r"turn 2 holds '\\ud800', which is half of a character"),
        (turns(("human", "q"), ("function_call", '{"name": "f\\ud800"}')), "turn 2 holds .* half of a character"),
        ({**turns(("human", "q"), ("gpt", "a")), "tools": True}, "a list of schemas is expected, found True"),
        ({**turns(("human", "q"), ("gpt", "a")), "tools": [SCHEMA, SCHEMA]}, "two schemas have the name 'search'"),
        ({**turns(("human", "q"), ("gpt", "a")), "tools": "{"}, "tools is not JSON"),
        ({**turns(("human", "q"), ("gpt", "a")), "tools": ['{"description": "d"}']}, "a schema needs a name"),
    ],
)
def test_what_is_wrong_with_a_row_is_told_in_words(tmp_path: Path, row: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        read(tmp_path, row, formatting="sharegpt")


@pytest.mark.parametrize(
    ("key", "harmless", "other", "says"),
    [
        ("reasoning_content", "", "hm", "turn 1 has reasoning_content='hm', which is not read: write the thought into"),
        ("weight", 1, 0, "turn 1 has weight='0', which is not read: every assistant turn is learned"),
    ],
)
def test_keys_that_would_change_what_is_learned_are_refused(
    tmp_path: Path, key: str, harmless: Any, other: Any, says: str
) -> None:
    question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    for value in (None, harmless):
        read(tmp_path, {"messages": [{**question, key: value}, answer]}, formatting="openai")
    with pytest.raises(DataError, match=says):
        read(tmp_path, {"messages": [{**question, key: other}, answer]}, formatting="openai")


def test_a_history_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="history holds '5', where a question and its answer are expected"):
        read(tmp_path, {"instruction": "q", "output": "a", "history": 5})


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"file_name": "gone.json"}, r"dataset 'mine' points at .*gone\.json, which does not exist: put it there"),
        ({"file_name": None}, "points at"),
        ({"hf_hub_url": "me/mine"}, "lies elsewhere"),
        ({"ranking": True}, "rankings"),
        ({"formatting": "vicuna"}, "none of alpaca, sharegpt, openai"),
        ({"columns": {"images": "image"}}, "column 'images' is not supported"),
        ({"formatting": "sharegpt", "tags": {"user_tags": "x"}}, "did you mean 'user_tag'"),
        ({"colums": {}}, "did you mean 'columns'"),
        ({"num_samples": 5}, "num_samples draws at random"),
        ({"formatting": ["alpaca"]}, r"formatting=\['alpaca'\] is none of"),
        ({"columns": ["prompt"]}, r"columns must hold a name for each of its keys, found \['prompt'\]"),
        ({"columns": {"prompt": ["x"]}}, "columns must hold a name for each"),
        ({"formatting": "sharegpt", "tags": {"role_tag": 5}}, "tags must hold a name for each"),
        ({"split": "test"}, "split='test', where a file has no splits"),
    ],
)
def test_a_wrong_description_names_dataset_and_remedy(tmp_path: Path, entry: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        load_datasets(write_info(tmp_path, [], **entry), ["mine"])


def test_a_name_that_is_not_described_and_a_missing_description_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"describes no dataset 'mime', did you mean 'mine'"):
        load_datasets(write_info(tmp_path, []), ["mime"])
    with pytest.raises(DataError, match="dataset_dir must be the folder"):
        load_datasets(str(tmp_path / "other.json"), ["mine"])


def test_a_folder_as_file_name_means_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for name in ("b.jsonl", "a.jsonl"):
        (tmp_path / "parts" / name).write_text(json.dumps({"instruction": name, "input": "", "output": "x"}) + "\n")
    info = write_info(tmp_path, [], file_name="parts")
    (dataset,) = load_datasets(info, ["mine"])
    assert [said(found)[0][1] for found in convert(dataset) if isinstance(found, Conversation)] == [
        "a.jsonl",
        "b.jsonl",
    ]


def test_lines_that_are_no_rows_are_told_with_their_number(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"messages": []}\n\n{broken\n"text"\n')
    found = list(read_rows(file))
    assert [where for where, _ in found] == [f"{file}, line {n}" for n in (1, 3, 4)]
    assert "not JSON" in str(found[1][1])
    assert str(found[2][1]) == "not a JSON object"
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"\.csv: rows are read from"):
        list(read_rows(tmp_path / "rows.csv"))
    file.write_text("[{},\n")
    with pytest.raises(DataError, match="is not JSON"):
        list(read_rows(file))
    (tmp_path / "rows.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read as Parquet"):
        list(read_rows(tmp_path / "rows.parquet"))


def test_a_byte_order_mark_changes_nothing(tmp_path: Path) -> None:
    for name, text in (("a.json", '[\n{"a": 1}]'), ("a.jsonl", '{"a": 1}\n')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert [row for _, row in read_rows(tmp_path / name)] == [{"a": 1}]


def test_a_description_may_name_the_only_split_and_leave_columns_empty(tmp_path: Path) -> None:
    columns = {"prompt": "instruction", "query": "", "response": "output", "history": None}
    found = read(tmp_path, {"instruction": "q", "output": "a"}, split="train", columns=columns)
    assert said(found) == [("user", "q"), ("assistant", "a")]


def test_a_plain_file_holds_openai_messages(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}))
    (found,) = convert(plain_dataset(str(file)))
    assert isinstance(found, Conversation)
    assert said(found) == [("user", "q"), ("assistant", "a")]
