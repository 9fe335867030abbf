from __future__ import annotations

from dataclasses import replace

import pytest

from search_r1.config import EnvironmentConfig
from search_r1.environments.search import CORRECTION, SearchEnvironment
from search_r1.errors import ConfigError
from search_r1.rollout.actions import parse_search_action
from search_r1.types import Action, Passage
from tests.fakes import EOS_TEXT, FakeRetriever, decode, encode, make_completion, make_prompt

INVALID = Action("invalid")


def environment(retriever: FakeRetriever, max_obs_length: int = 1000, **changes: object) -> SearchEnvironment:
    config = replace(EnvironmentConfig(), **changes)  # type: ignore[arg-type]
    return SearchEnvironment(retriever, encode, decode, config, max_obs_length)


def step(env: SearchEnvironment, *actions: Action) -> list[str]:
    return [observation.text for observation in env.step(actions, [make_prompt()] * len(actions))]


def test_all_searches_of_a_turn_go_in_one_request_and_come_back_in_order() -> None:
    retriever = FakeRetriever()
    texts = step(environment(retriever), Action("search", "a"), INVALID, Action("search", "b"))
    assert retriever.requests == [["a", "b"]]
    assert "Title: a" in texts[0]
    assert texts[1] == f"\n\n{CORRECTION}\n\n"
    assert "Title: b" in texts[2]


@pytest.mark.parametrize("actions", [(), (INVALID,), (INVALID, INVALID)])
def test_without_a_query_the_retriever_is_not_called(actions: tuple[Action, ...]) -> None:
    retriever = FakeRetriever()
    assert len(step(environment(retriever), *actions)) == len(actions)
    assert retriever.requests == []


def test_a_failed_retriever_fails_every_search_and_no_correction() -> None:
    observations = environment(FakeRetriever(error="503 after 5 attempts")).step(
        [Action("search", "a"), INVALID, Action("search", "b")], [make_prompt()] * 3
    )
    assert [observation.failure for observation in observations] == ["503 after 5 attempts", "", "503 after 5 attempts"]
    assert observations[0].token_ids == ()


def test_no_passages_are_a_result_not_a_failure() -> None:
    (observation,) = environment(FakeRetriever(lambda query: [])).step([Action("search", "a")], [make_prompt()])
    assert observation.failure == ""
    assert observation.text == "\n\n<information>No passages were found.</information>\n\n"
    assert observation.token_ids == tuple(encode(observation.text))


def test_an_observation_carries_its_passages_and_the_time_of_its_request() -> None:
    found = [Passage("T", "text", "id", 2.0)]
    first, second = environment(FakeRetriever(lambda query: found)).step(
        [Action("search", "a"), Action("search", "b")], [make_prompt()] * 2
    )
    assert first.passages == second.passages == tuple(found)
    assert first.seconds == second.seconds > 0


def test_top_k_and_the_query_limit_come_from_the_config() -> None:
    retriever = FakeRetriever(lambda query: [Passage(str(rank), "x") for rank in range(9)])
    (text,) = step(environment(retriever, top_k=2, max_query_chars=5), Action("search", "abcdefgh"))
    assert retriever.requests == [["abcde"]]
    assert text.count("Doc ") == 2


def test_a_query_of_thousands_of_characters_is_sent_as_one_clean_line() -> None:
    retriever = FakeRetriever(lambda query: [])
    step(environment(retriever), Action("search", "東\x00京\n" * 3000))
    ((query,),) = retriever.requests
    assert len(query) <= 2000
    assert query.startswith("東 京 東 京")
    assert query.isprintable()


def test_the_correction_names_the_rule_without_anything_that_parses_or_scores() -> None:
    assert "<" not in CORRECTION
    assert "search tag" in CORRECTION
    assert "answer tag" in CORRECTION
    assert parse_search_action(CORRECTION).kind == "invalid"


@pytest.mark.parametrize("max_obs_length", [33, 60, 100, 1000])
def test_every_observation_stays_within_the_limit(max_obs_length: int) -> None:
    retriever = FakeRetriever(lambda query: [Passage("T", "東京" * 100)] if query == "a" else [])
    env = environment(retriever, max_obs_length=max_obs_length)
    observations = env.step([Action("search", "a"), Action("search", "b"), INVALID], [make_prompt()] * 3)
    for observation in observations:
        assert len(observation.token_ids) <= max_obs_length
        assert observation.token_ids == tuple(encode(observation.text))
    assert all(observation.text.endswith("</information>\n\n") for observation in observations[:2])


def test_a_limit_without_room_for_the_tags_is_a_config_error_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.max_obs_length=20 is too small"):
        environment(FakeRetriever(), max_obs_length=20)


def test_a_turn_stops_at_the_closing_tags_and_is_parsed_from_its_text() -> None:
    env = environment(FakeRetriever())
    assert env.stop == ("</search>", "</answer>")
    assert env.parse(make_completion("<answer>a</answer>" + EOS_TEXT)) == Action("answer", "a")
