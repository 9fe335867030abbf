"""Rollouts of the tool environment as demonstrations that repeat them to the token."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from data_prep.tool_traces import tool_messages
from data_prep.traces import main, select
from search_r1.compose import to_yaml
from search_r1.config import EnvironmentConfig
from search_r1.data.dataset_info import plain_dataset
from search_r1.data.sft_examples import ConversationEncoder
from search_r1.environments.search_tool import search_tool
from search_r1.errors import DataError
from search_r1.rollout.records import trajectory_record
from search_r1.types import Passage
from tests.chat_templates import chat_tokenizer
from tests.fakes import FakeRetriever
from tests.tool_kit import TOOLS, call, make_environment, play

SCHEMAS = {name: tool.schema for name, tool in TOOLS.items()}


def played(*texts: str, layout: str = "smollm2", opening: str = "", tools: Any = None) -> dict[str, Any]:
    """The record of a right trajectory, which ends with its answer after these turns."""
    environment = make_environment(tools, layout=layout, forced_opening=opening)
    turns = [text.removeprefix(opening) for text in (*texts, r"<think>ok</think>\boxed{Paris}")]
    trajectory = play(environment, *turns, layout=layout, opening=opening)
    record: dict[str, Any] = json.loads(json.dumps(trajectory_record(trajectory, {"reward": 1.0}, step=1)))
    return record


@pytest.mark.parametrize("layout", ["smollm2", "llama-3.1", "no-system", "qwen3"])
@pytest.mark.parametrize("opening", ["", "<think>"])
def test_a_demonstration_repeats_its_rollout_to_the_token(layout: str, opening: str) -> None:
    record = played(f"<think>hm </think> {call('add', a=1)}", layout=layout, opening=opening)
    (row,) = select([record], tools=SCHEMAS, forced_opening=opening).rows
    found = plain_dataset("demonstrations").convert(row)
    encode = ConversationEncoder(chat_tokenizer(layout))
    assert encode(found.messages, found.tools).token_ids == tuple(record["token_ids"])


@pytest.mark.parametrize("end", ["<end_of_turn>", "<｜end▁of▁sentence｜>", "<|eot_id|>", "</s>", "[|endofturn|]"])
def test_the_token_that_ended_a_turn_is_left_out_however_it_is_spelled(end: str) -> None:
    record = json.loads(json.dumps(played(call("add", a=1))).replace("<|im_end|>", end))
    spoken = [m["content"] for m in tool_messages(record) if m["role"] == "assistant"]
    assert spoken == [call("add", a=1), r"<think>ok</think>\boxed{Paris}"]
    cut = {**record, "turns": [{**turn, "finish_reason": "length"} for turn in record["turns"]]}
    assert tool_messages(cut)[1]["content"] == call("add", a=1) + end


def test_a_demonstration_tells_of_the_tools_of_its_row_alone() -> None:
    record = played(call("add", a=1))
    told = [
        [schema["function"]["name"] for schema in json.loads(row["tools"])]
        for row in select([record, {**record, "question": "?", "tools": ["greet", "add"]}], tools=SCHEMAS).rows
    ]
    assert told == [list(TOOLS), ["greet", "add"]]


@pytest.mark.parametrize(
    "settings, says",
    [
        ({}, r"'Who\?' calls tools \(greet\): name their modules with --tools"),
        ({"tools": {"add": SCHEMAS["add"]}}, r"'Who\?' calls tools \(greet\): name their modules"),
        ({"tools": SCHEMAS, "forced_opening": "<think>"}, r"'Who\?' was not made with --forced-opening '<think>'"),
    ],
)
def test_rollouts_are_not_told_of_other_tools_or_openings_than_they_had(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        select([{**played(call("add", a=1)), "tools": ["greet"]}], **settings)


def in_a_run(folder: Path, top_k: int = 3) -> str:
    """Trajectories with an opening beside the settings that a run of them has."""
    (folder / "trajectories").mkdir(parents=True)
    settings = EnvironmentConfig("tools", top_k=top_k, tools=("tests.tool_kit",), forced_opening="<think>")
    (folder / "config.yaml").write_text(to_yaml({"environment": asdict(settings)}))
    file = folder / "trajectories" / "step_000001.jsonl"
    file.write_text(json.dumps(played(f"<think>hm </think> {call('add', a=1)}", opening="<think>")))
    return str(file)


def test_what_a_run_told_its_model_is_read_from_the_settings_beside_its_trajectories(tmp_path: Path) -> None:
    file, rows = in_a_run(tmp_path / "run"), [tmp_path / "read.parquet", tmp_path / "given.parquet"]
    given = ["--tools", "tests.tool_kit", "--search-top-k", "3", "--forced-opening", "<think>"]
    assert main(["--input", file, "--output", str(rows[0])]) == 0
    copied = shutil.copy(file, tmp_path / "copied.jsonl")
    assert main(["--input", str(copied), "--output", str(rows[1]), *given]) == 0
    assert pq.read_table(rows[0]).equals(pq.read_table(rows[1]))
    (row,) = pq.read_table(rows[0]).to_pylist()
    assert [tool["function"]["name"] for tool in json.loads(row["tools"])][:1] == ["search"]


def test_a_setting_that_contradicts_the_run_of_the_rollouts_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other, output = in_a_run(tmp_path / "run"), in_a_run(tmp_path / "other", top_k=5), str(tmp_path / "o.parquet")
    for arguments, says in (
        ([file, "--search-top-k", "2"], f"{file}: its run had --search-top-k 3 (config.yaml), not 2: leave the option"),
        ([file, other], f"{other}: its run had --search-top-k 5 (config.yaml), not 3"),
        ([file, "--forced-opening", "<answer>"], "--forced-opening <think> (config.yaml), not <answer>"),
    ):
        assert main(["--output", output, "--input", *arguments]) == 2
        assert says in capsys.readouterr().err


def test_passages_that_search_gave_are_shortened_and_other_results_are_not() -> None:
    passages = (Passage("Oslo", 'a "b" c d e'), Passage("Bergen", "f g h"))
    search = search_tool(FakeRetriever(lambda query: passages), 2, 100)
    texts = call("search", query="x"), call("repeat", text="one two three ", times=2)
    record = played(*texts, tools={**TOOLS, "search": search})
    (row,) = select([record], tools={"search": search.schema}, max_passage_words=2).rows
    found, repeated = (message["content"] for message in row["messages"][1:] if message["role"] == "user")
    assert found == (
        '<tool_response>{"name": "search", "arguments": {"query": "x"}}\n{"status": "success", "content": '
        r'"Doc 1(Title: Oslo) a \"b\"\nDoc 2(Title: Bergen) f g"}'
        "\n</tool_response>"
    )
    assert "one two three one two three" in repeated
