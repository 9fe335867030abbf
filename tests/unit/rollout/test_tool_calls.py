from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.rollout.tool_calls import find_answer, parse_tool_turn

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


def names(text: str) -> list[str]:
    """Names of the calls in order; `!` for one that cannot be read."""
    return [call.name or "!" for call in parse_tool_turn(text)[0]]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("no call", []),
        (CALL, ["f"]),
        (f"a {CALL}\n b {CALL.replace('f', 'g')} text after the last call", ["f", "g"]),
        ('<tool_call>\n  {"name": "f"}\n</tool_call>', ["f"]),
        ('<tool_call>{"name": "f", "arguments": {"q": "</tool_call><tool_call>"}}</tool_call>', ["f"]),
        ('<tool_call>{"name": "f", "arguments": {"q": "<think>"}}</tool_call></think>', ["f"]),
        (f"<think>{CALL}</think>", []),
        (f"<think>{CALL}</think>{CALL.replace('f', 'g')}<think>{CALL}</think>", ["g"]),
        (f"<think> never closed {CALL}", ["f"]),
        (f"</think>{CALL}</think>", ["f"]),
        ("<Tool_Call>{}</Tool_Call> <tool_call x>{}</tool_call>", []),
    ],
)
def test_calls_are_the_balanced_blocks_outside_closed_thoughts(text: str, expected: list[str]) -> None:
    assert names(text) == expected


@pytest.mark.parametrize(
    "inner, word",
    [
        ("", "no JSON"),
        ("{bad", "no JSON"),
        ("{'name': 'f'}", "no JSON"),
        ('{"name": "f"} {"name": "g"}', "more than one"),
        ('[{"name": "f"}]', "no JSON object"),
        ('"f"', "no JSON object"),
        ("{}", "no name"),
        ('{"name": ""}', "no name"),
        ('{"name": 3}', "no name"),
        ('{"name": "f", "arguments": [1]}', "no JSON object"),
        ('{"name": "f", "arguments": "{}"}', "no JSON object"),
        ('{"name": "f", "parameters": "{}"}', "no JSON object"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN"),
        ('{"name": "f", "arguments": {"x": ' + "1" * 5000 + "}}", "no JSON"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_what_is_no_call_object_is_a_call_with_an_error_and_the_next_one_is_read(inner: str, word: str) -> None:
    calls, _ = parse_tool_turn(f"<tool_call>{inner}</tool_call>{CALL}")
    assert len(calls) == 2
    assert word in calls[0].error
    assert calls[0].inner == inner
    assert (calls[1].name, calls[1].arguments, calls[1].error) == ("f", {"x": 1}, "")


def test_arguments_may_be_left_out() -> None:
    assert parse_tool_turn('<tool_call>{"name": "now"}</tool_call>')[0][0].arguments == {}


def test_parameters_are_the_arguments_where_there_are_none() -> None:
    (llama, both), _ = parse_tool_turn(
        '<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>'
        '<tool_call>{"name": "f", "parameters": {"x": 1}, "arguments": {}}</tool_call>'
    )
    assert (llama.arguments, both.arguments) == ({"x": 1}, {})


def test_nested_and_unclosed_calls_are_errors_of_their_own() -> None:
    assert names(f'<tool_call>{{"name": "a"}}\n{CALL}') == ["!", "f"]
    assert names(f"<tool_call>{CALL}</tool_call>") == ["!", "f"]
    cut, _ = parse_tool_turn(f'{CALL}<tool_call>{{"name": "searc')
    assert [call.name for call in cut] == ["f", ""]
    assert "not closed" in cut[1].error


def test_text_outside_of_calls_and_thoughts_is_kept() -> None:
    assert parse_tool_turn(f"a<think>b</think>c{CALL}d<think>e")[1] == "acd<think>e"


PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, '{"name": "g"}', '"', "{", "}", "\\", " ", "x", "é"]
)


@given(st.lists(PIECES, max_size=30).map("".join))
def test_reading_the_raw_text_of_the_calls_again_gives_the_same_calls(text: str) -> None:
    calls, outside = parse_tool_turn(text)
    again, rest = parse_tool_turn("\n".join(call.text for call in calls))
    # an unclosed block reaches to the next one, and so takes in the line break that joins them
    assert [(c.name, c.arguments, c.inner) for c in again] == [(c.name, c.arguments, c.inner) for c in calls]
    assert not rest.strip()
    assert "<tool_call>" not in outside or "<think>" in text


@given(st.dictionaries(st.text(max_size=5), st.text(), max_size=3), st.text(string.ascii_letters, min_size=1))
def test_any_json_arguments_come_back_as_they_were_written(arguments: dict[str, str], name: str) -> None:
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    (call,), outside = parse_tool_turn(f"before <tool_call>{text}</tool_call> after")
    assert (call.name, call.arguments, call.inner, outside) == (name, arguments, text, "before  after")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "piece", ["<think>", "<tool_call>", '<tool_call>{"', "<think></think>", CALL, "\\boxed{", "<answer>"]
)
def test_a_text_of_a_million_tags_is_read_in_one_pass(piece: str) -> None:
    """Quadratic work would take hours here."""
    text = piece * 100_000
    calls, _ = parse_tool_turn(text)
    assert find_answer(text) is None
    assert len(calls) == (100_000 if "tool_call" in piece else 0)


@pytest.mark.parametrize(
    "text, pattern, expected",
    [
        ("<answer> Paris </answer>", "any", "Paris"),
        ("<answer>Lyon</answer> no, <answer>Paris</answer>", "any", "Paris"),
        ("</answer><answer>Paris</answer></answer>", "answer", "Paris"),
        ("<answer>a <answer>Paris</answer>", "answer", "Paris"),
        ("<answer></answer>", "any", ""),
        ("<answer>Paris", "any", None),
        (r"\boxed{Paris}", "any", "Paris"),
        (r"\boxed{Paris}", "answer", None),
        ("<answer>Paris</answer>", "boxed", None),
        (r"\boxed{\text{a {b} c}} tail", "boxed", r"\text{a {b} c}"),
        (r"\boxed{Paris} and {", "boxed", "Paris"),
        (r"{ \boxed{Paris}", "boxed", "Paris"),
        (r"\boxed{Lyon} \boxed{Par", "boxed", "Lyon"),
        (r"\boxed{a \} b}", "boxed", r"a \} b"),
        (r"\boxed{\boxed{x} y}", "boxed", r"\boxed{x} y"),
        (r"<answer>Lyon</answer> \boxed{Paris}", "any", "Paris"),
        (r"\boxed{Lyon} <answer>Paris</answer>", "any", "Paris"),
        (r"<answer> The final answer is \[ \boxed{Oslo} \] </answer>", "any", "Oslo"),
        (r"<answer>\boxed{Lyon}</answer><answer>Paris</answer>", "any", "Paris"),
        (r"\boxed{<answer>Paris</answer>}", "any", "Paris"),
    ],
)
def test_the_answer_is_the_closed_one_of_the_pattern_that_begins_last(
    text: str, pattern: str, expected: str | None
) -> None:
    assert find_answer(text, pattern) == expected  # type: ignore[arg-type]
