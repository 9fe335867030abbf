from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.rollout.actions import clean_query, parse_search_action
from search_r1.types import Action
from tests.shared_data import json_lines

INVALID = Action("invalid")


def search(query: str) -> Action:
    return Action("search", query)


def answer(text: str) -> Action:
    return Action("answer", text)


@pytest.mark.parametrize(
    "text, action",
    [
        ("<think>hm</think> <search> capital of France </search>", search("capital of France")),
        ("<answer>\n Beijing \n</answer>", answer("Beijing")),
        ("I think it is Paris.", INVALID),
        ("", INVALID),
    ],
)
def test_a_block_is_an_action_and_anything_else_is_invalid(text: str, action: Action) -> None:
    assert parse_search_action(text) == action


@pytest.mark.parametrize(
    "text, action",
    [
        ("<answer>a</answer><search>q</search>", answer("a")),
        ("<search>q</search><answer>a</answer>", search("q")),
        ("<search>one</search><search>two</search>", search("one")),
        ("<search>never closed <answer>a</answer>", answer("a")),
        ("<search>outer <answer>a</answer> </search>", answer("a")),
        ("<answer>a <search>inner</search> </answer>", search("inner")),
    ],
)
def test_the_earliest_closed_block_wins(text: str, action: Action) -> None:
    assert parse_search_action(text) == action


@pytest.mark.parametrize("stray", ["</search>", "</answer>", "</think>", "</information>", "</search></think>"])
def test_a_stray_closing_tag_hides_nothing(stray: str) -> None:
    assert parse_search_action(f"{stray} so <answer>a</answer>") == answer("a")


@pytest.mark.parametrize(
    "text, action",
    [
        ("<think>I could <search>x</search></think><answer>a</answer>", answer("a")),
        ("<think>or <answer>x</answer></think>", INVALID),
        ("<think>one</think><search>q</search><think>two <answer>x</answer></think>", search("q")),
        ("<think>use <search> and then</think> q </search>", INVALID),
        (
            "<search> q <think> not </search> here </think> r </search>",
            search("q <think> not </search> here </think> r"),
        ),
        ("</think><think>x <answer>y</answer></think><answer>z</answer>", answer("z")),
    ],
)
def test_tags_inside_a_closed_thought_do_not_count(text: str, action: Action) -> None:
    assert parse_search_action(text) == action


@pytest.mark.parametrize(
    "text, action",
    [
        ("<think>never closed <search>q</search>", search("q")),
        ("<think>closed</think> <think>open again <answer>a</answer>", answer("a")),
    ],
)
def test_an_unclosed_thought_hides_nothing(text: str, action: Action) -> None:
    assert parse_search_action(text) == action


def test_a_tag_mentioned_before_the_action_does_not_enter_the_query() -> None:
    assert parse_search_action("I write <search> when unsure: <search>Rome</search>") == search("Rome")


@pytest.mark.parametrize(
    "text",
    [
        '<search id="1">q</search>',
        "<SEARCH>q</SEARCH>",
        "<Search>q</search>",
        "< search>q</search>",
        "<search >q</search>",
        "<search>q</search >",
        "<search/>",
        "<search>q<search>",
        "<search>q</answer>",
        "<search>cut at the length lim",
        "<answer>cut </ans",
        "＜search＞q＜/search＞",
    ],
)
def test_what_is_not_exactly_a_tag_is_no_action(text: str) -> None:
    assert parse_search_action(text) == INVALID


@pytest.mark.parametrize("blank", ["", " ", "\n\t ", "\u3000\xa0", "\x00\x1b\x7f", "\u2028\u2029"])
def test_a_blank_query_is_invalid_and_a_blank_answer_is_an_answer(blank: str) -> None:
    assert parse_search_action(f"<search>{blank}</search>") == INVALID
    assert parse_search_action(f"<answer>{blank}</answer>") == answer(blank.strip())


def test_a_blank_query_is_the_turn_even_when_another_follows() -> None:
    assert parse_search_action("<search></search><search>q</search>") == INVALID


@pytest.mark.parametrize(
    "query",
    ["Wer war Ödön?", "東京の首都", "عاصمة مصر", "दिल्ली की राजधानी", "naïve a\u0301", "👩‍👩‍👧 emoji", "a < b > c & d"],
)
def test_queries_of_all_scripts_are_kept_to_the_letter(query: str) -> None:
    assert parse_search_action(f"<search> {query} </search>") == search(query)
    assert clean_query(query) == query


def test_a_query_is_sent_as_one_line_without_control_characters() -> None:
    assert clean_query("\x00who\r\nis\x1b[0m\u2028he\ud800?\n") == "who is [0m he ?"


@given(st.lists(st.sampled_from(["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "a", " "])))
def test_the_parser_agrees_with_a_slow_search_over_all_blocks(pieces: list[str]) -> None:
    assert parse_search_action("".join(pieces)) == slow_parse(pieces)


def slow_parse(pieces: list[str]) -> Action:
    """Blank out closed thoughts first, then try every closing tag with the nearest opening one."""
    visible, index = list(pieces), 0
    while index < len(pieces):
        if pieces[index] == "<think>" and "</think>" in pieces[index:]:
            end = pieces.index("</think>", index)
            visible[index : end + 1] = [""] * (end + 1 - index)
            index = end
        index += 1
    for end, piece in enumerate(visible):
        for name in ("search", "answer"):
            starts = [start for start in range(end) if visible[start] == f"<{name}>"]
            if piece == f"</{name}>" and starts:
                content = "".join(pieces[starts[-1] + 1 : end]).strip()
                return INVALID if name == "search" and not content else Action(name, content)  # type: ignore[arg-type]
    return INVALID


@pytest.mark.parametrize("piece", ["<think>", "<search>", "</search>", "<answer><think>", "<think></think>", "<"])
def test_a_megabyte_of_tags_is_read_in_one_pass(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    assert parse_search_action(text + "</think><answer>a</answer>") == answer("a")


def turns_of(response: str) -> list[str]:
    """What the policy wrote in a published rollout, turn by turn: the text between the information blocks."""
    return re.split(r"\n\n<information>.*?</information>\n\n", response, flags=re.DOTALL)


@pytest.mark.parametrize("name", ["wellformed", "malformed"])
def test_real_rollouts_search_exactly_where_they_were_answered_with_passages(name: str) -> None:
    for row in json_lines(f"traces/{name}.jsonl"):
        *searching, last = turns_of(row["response"])
        for turn in searching:
            action = parse_search_action(turn)
            assert action.kind == "search"
            assert re.search(rf"<search>\s*{re.escape(action.content)}\s*</search>\s*$", turn)
        if name == "wellformed":
            final = parse_search_action(last)
            assert final.kind == "answer"
            assert re.search(rf"<answer>\s*{re.escape(final.content)}\s*</answer>", last)
