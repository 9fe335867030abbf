from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from search_r1.rollout.records import spans, trajectory_record
from search_r1.types import Passage, Status
from tests.fakes import answer_turn, decode, make_prompt, make_trajectory, search_turn


def test_a_record_survives_json_and_tells_the_whole_trajectory() -> None:
    turn = search_turn("q", "found")
    assert turn.observation is not None
    passages = (Passage("T", "text", "id7", 1.5), Passage("U", "more"))
    searched = replace(turn, observation=replace(turn.observation, passages=passages, truncated=True))
    trajectory = make_trajectory([searched, answer_turn("Paris")], prompt=make_prompt("Who?", group_id=3))
    record = json.loads(json.dumps(trajectory_record(trajectory, {"reward": 1, "format": 0.5}, step=2)))
    first, last = record["turns"]
    assert (record["step"], record["question_id"], record["data_source"], record["group_id"]) == (
        2,
        "nq/test/Who?",
        "nq",
        3,
    )
    assert (record["prompt"], record["tools"]) == ([{"role": "user", "content": "Who?"}], None)
    assert (record["question"], record["golden_answers"], record["answer"]) == ("Who?", ["Paris"], "Paris")
    assert (record["status"], record["failure"], record["reward"]) == ("answered", "", 1.0)
    assert record["reward_parts"] == {"reward": 1.0, "format": 0.5}
    assert (first["completion"], first["action"], first["query"]) == ("<search>q</search>", "search", "q")
    assert (first["observation"], first["truncated"], first["seconds"]) == ("found", True, 0.5)
    assert first["passages"] == [
        {"id": "id7", "title": "T", "text": "text", "score": 1.5},
        {"id": "", "title": "U", "text": "more", "score": None},
    ]
    assert (last["action"], last["content"], last["query"], last["observation"]) == ("answer", "Paris", None, None)


def test_spans_of_a_record_cut_the_sampled_text_out_of_the_whole_sequence() -> None:
    trajectory = make_trajectory([search_turn("q", "found"), answer_turn("Paris")])
    record = trajectory_record(trajectory, {"reward": 0.0}, step=0)
    sampled = [decode(record["token_ids"][start:end]) for start, end in record["sampled_spans"]]
    assert sampled == ["<search>q</search>", "<answer>Paris</answer>"]
    assert record["num_prompt_tokens"] + record["num_response_tokens"] == len(record["token_ids"])
    assert record["num_sampled_tokens"] == sum(end - start for start, end in record["sampled_spans"])


def test_a_void_trajectory_has_no_reward_and_names_its_cause() -> None:
    record = trajectory_record(make_trajectory([search_turn("q", None)], Status.VOID, failure="timeout"), {}, step=1)
    assert (record["reward"], record["status"], record["failure"]) == (None, "void", "timeout")


@given(st.lists(st.booleans()), st.integers(0, 9))
def test_spans_cover_exactly_what_the_mask_marks(mask: list[bool], offset: int) -> None:
    found = spans(mask, offset)
    assert [i for start, end in found for i in range(start, end)] == [i + offset for i, kept in enumerate(mask) if kept]
    assert all(end < start for (_, end), (start, _) in pairwise(found))
