"""Rejection sampling: which rollouts become demonstrations, and what of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from data_prep import traces
from data_prep.traces import fault, read_rollouts, response_of, select, shorten_passages
from search_r1.errors import DataError
from search_r1.prompts import prompt_messages
from search_r1.rollout.records import trajectory_record
from search_r1.types import Status
from tests.fakes import EOS_TEXT, answer_turn, make_prompt, make_trajectory, search_turn
from tests.shared_data import json_lines

INFO = "\n\n<information>Doc 1(Title: A) x</information>\n\n"
GOOD = f"<think>t</think><search>q</search>{INFO}<think>u</think> so <answer>Ann</answer>"


def rollout(response: str = GOOD, question: str = "who?", answers: tuple[str, ...] = ("Ann",)) -> dict[str, Any]:
    return {"data_source": "nq", "question": question, "golden_answers": list(answers), "response": response}


@pytest.mark.parametrize(
    "response, reason",
    [
        (GOOD, ""),
        (f"<search>q</search>{INFO}<search>r</search>{INFO}<answer> the ANN! </answer>", ""),
        (f"<search>q</search>\n<information></think></answer><search></information><answer>Ann</answer>", ""),  # noqa: F541
        (GOOD.replace("Ann", "Bo"), "wrong answer"),
        ("<think>t</think><answer>Ann</answer>", "no search"),
        (GOOD + " and more", "not well formed"),
        (GOOD + "<search>r</search>", "not well formed"),
        (GOOD.replace("<answer>Ann</answer>", ""), "not well formed"),
        (GOOD.replace("</think>", "", 1), "not well formed"),
        (GOOD.replace("<think>t", "<think><search>t</search>"), "not well formed"),
        (GOOD.replace(INFO, ""), "not well formed"),
        (GOOD.replace("<search>q</search>", ""), "not well formed"),
        (GOOD.replace("<search>q</search>", "<search> </search>"), "not well formed"),
        (GOOD.replace("Ann", " "), "not well formed"),
        (GOOD.replace("</information>", ""), "not well formed"),
        ("", "not well formed"),
    ],
)
def test_only_well_formed_and_right_responses_are_demonstrations(response: str, reason: str) -> None:
    assert fault(response, ["Ann"]) == reason


def test_an_empty_golden_answer_matches_nothing() -> None:
    assert fault(GOOD.replace("Ann", "the"), ["a", ""]) == "wrong answer"


def test_the_real_well_formed_rollouts_are_kept_and_the_malformed_ones_dropped() -> None:
    kept = select(json_lines("traces/wellformed.jsonl"))
    assert dict(kept.counts) == {"read": 180, "kept": 175, "repeated response": 5}
    dropped = select(json_lines("traces/malformed.jsonl"))
    assert dropped.rows == []
    assert dropped.counts["not well formed"] + dropped.counts["no search"] == 60


def test_a_row_asks_in_the_training_prompt_and_answers_with_the_whole_response() -> None:
    (row,) = select([rollout()]).rows
    assert row["messages"] == [
        *prompt_messages("search_r1", "who?"),
        {"role": "assistant", "content": GOOD},
    ]


def test_repeated_responses_and_too_many_of_a_question_are_counted() -> None:
    many = [rollout(GOOD.replace("so", f"so {i}")) for i in range(4)]
    result = select([*many, many[0], rollout(question="why?")], max_per_question=2)
    assert dict(result.counts) == {"read": 6, "kept": 3, "enough of its question": 2, "repeated response": 1}
    assert len(select([many[0], rollout(many[0]["response"], question="and who?")]).rows) == 2


@pytest.mark.parametrize("end", ["<|im_end|><|endoftext|>\n", "<end_of_turn>\n<eos>", "<｜end▁of▁sentence｜>", "</s>"])
def test_tokens_that_end_a_text_are_no_part_of_its_response(end: str) -> None:
    assert response_of(rollout(GOOD + end)) == GOOD


def test_our_own_trajectories_become_the_text_that_was_sampled_and_observed() -> None:
    turns = [search_turn("q", INFO), answer_turn("Ann")]
    turns[1].completion = type(turns[1].completion)((1,), (0.0,), f"<answer>Ann</answer>{EOS_TEXT}", "stop")
    trajectory = make_trajectory(turns, prompt=make_prompt("who?", golden_answers=["Ann"]))
    record = json.loads(json.dumps(trajectory_record(trajectory, {"reward": 1.0}, step=3)))
    assert response_of(record) == f"<search>q</search>{INFO}<answer>Ann</answer>"
    (row,) = select([record]).rows
    assert (row["data_source"], row["question"]) == ("nq", "who?")


def test_a_trajectory_with_a_corrected_turn_is_no_demonstration() -> None:
    turns = [search_turn("", "\nMy action is not correct.\n"), search_turn("q", INFO), answer_turn("Ann")]
    record = trajectory_record(make_trajectory(turns, Status.ANSWERED), {"reward": 1.0}, step=1)
    assert select([{**record, "golden_answers": ["Ann"]}]).counts["not well formed"] == 1


def test_passages_are_shortened_inside_their_block_and_headers_stay() -> None:
    block = (
        '<information>Doc 1(Title: "A (song)") one two three four\nDoc 2(Title: B (c) d) five  six seven\n'
        "Doc 3(Title: E) short</information>"
    )
    text = f"<think>one two three four</think><search>q</search>\n\n{block}\n\n<answer>Ann</answer>"
    assert shorten_passages(text, 2) == (
        "<think>one two three four</think><search>q</search>\n\n"
        '<information>Doc 1(Title: "A (song)") one two\nDoc 2(Title: B (c) d) five  six\n'
        "Doc 3(Title: E) short</information>\n\n<answer>Ann</answer>"
    )
    assert shorten_passages(text, 10) == text


def test_shortening_real_rollouts_changes_nothing_outside_the_information() -> None:
    outside = re.compile(r"<information>.*?</information>", re.DOTALL)
    for row in json_lines("traces/wellformed.jsonl"):
        short = shorten_passages(row["response"], 20)
        assert outside.sub("", short) == outside.sub("", row["response"])
        assert short.count("(Title: ") == row["response"].count("(Title: ")
        assert len(short) < len(row["response"])


def test_the_command_writes_messages_and_refuses_what_it_cannot_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "t.jsonl", tmp_path / "sft.parquet"
    source.write_text(json.dumps(rollout()) + "\n" + json.dumps(rollout("<answer>Ann</answer>")) + "\n")
    assert traces.main(["--input", str(source), "--output", str(out), "--template", "short"]) == 0
    (row,) = pq.read_table(out).to_pylist()
    assert [message["content"] for message in row["messages"]] == ["Question: who?\n", GOOD]
    out.unlink()
    for content, message in [
        ("{oops\n", "line 1 is not JSON"),
        ('{"question": "who?"}\n', "line 1 lacks golden_answers, a list of texts; repair it or take it out"),
        (json.dumps(rollout()) + "\n" + json.dumps(rollout("\ud800")) + "\n", "line 2 is not JSON"),
        (json.dumps(rollout("x")) + "\n", "no rollout was kept"),
        ("", "the file is empty"),
    ]:
        source.write_text(content)
        assert traces.main(["--input", str(source), "--output", str(out)]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [source]


CALL = {"completion": "c", "observation": "o", "calls": [{"status": "success"}]}


@pytest.mark.parametrize(
    "change, lacking",
    [
        ({"question": 5}, "a question"),
        ({"golden_answers": [5]}, "golden_answers, a list of texts"),
        ({"response": None}, "response or turns"),
        ({"turns": [{}]}, "turns that each have a completion"),
        ({"turns": ["x"]}, "turns that each have a completion"),
        ({"turns": 3}, "turns that each have a completion"),
        ({"turns": [{**CALL, "observation": 5}]}, "turns that each have a completion"),
        ({"turns": [{**CALL, "calls": 5}]}, "turns that each have a completion"),
        ({"turns": [CALL]}, "the prompt of its tool calls"),
        ({"turns": [CALL], "prompt": [{"role": "user"}]}, "the prompt of its tool calls"),
        ({"turns": [CALL], "prompt": [], "tools": [[1]]}, "names in its tools"),
    ],
)
def test_a_line_that_is_no_rollout_is_told_with_its_place(tmp_path: Path, change: dict[str, Any], lacking: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({**rollout(), **change}) + "\n")
    with pytest.raises(DataError, match=f"t.jsonl: line 1 lacks {lacking}"):
        list(read_rollouts([file]))
