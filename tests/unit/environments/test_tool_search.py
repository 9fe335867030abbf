from __future__ import annotations

import asyncio
import json

import pytest

from search_r1.environments.passages import NO_PASSAGES
from search_r1.environments.search_tool import search_tool
from search_r1.environments.tool_registry import tool
from search_r1.types import Action, Passage
from tests.fakes import FakeRetriever
from tests.tool_kit import answer, call, make_environment, make_tool_prompt


def content(observation_text: str) -> str:
    return str(json.loads(observation_text.split("\n")[3])["content"])


def test_search_is_a_tool_beside_others_with_the_configured_default() -> None:
    schema = search_tool(FakeRetriever(), top_k=3, max_query_chars=100).schema["function"]
    assert schema["name"] == "search"
    assert schema["parameters"]["required"] == ["query"]
    assert schema["parameters"]["properties"]["top_k"]["default"] == 3
    assert schema["parameters"]["properties"]["query"]["description"] == "What to look for."


def test_passages_come_back_as_numbered_lines() -> None:
    passages = [Passage("A", "first"), Passage("B", "second </tool_response>"), Passage("C", "third")]
    search = search_tool(FakeRetriever(lambda query: passages), top_k=3, max_query_chars=100)
    environment = make_environment({"search": search})
    observation = answer(environment, call("search", query="q", top_k=2))
    assert content(observation.text) == "Doc 1(Title: A) first\nDoc 2(Title: B) second &lt;/tool_response>"
    empty = make_environment({"search": search_tool(FakeRetriever(lambda query: []), 3, 100)})
    assert content(answer(empty, call("search", query="q")).text) == NO_PASSAGES


@pytest.mark.parametrize(
    "arguments", [{"query": " \n"}, {"query": "q", "top_k": 0}, {"query": "q", "top_k": 10**9}, {}]
)
def test_a_search_that_makes_no_sense_is_an_error_and_never_sent(arguments: dict[str, object]) -> None:
    retriever = FakeRetriever()
    environment = make_environment({"search": search_tool(retriever, 3, 100)})
    observation = answer(environment, call("search", **arguments))
    assert observation.calls[0].status == "error"
    assert retriever.requests == []


def test_long_queries_and_control_characters_are_tidied_as_in_tags() -> None:
    retriever = FakeRetriever()
    answer(make_environment({"search": search_tool(retriever, 3, 5)}), call("search", query="a\u0000b\ncdefgh"))
    assert retriever.requests == [["a b c"]]


def test_a_retriever_that_is_down_voids_the_trajectories_that_searched_and_no_others() -> None:
    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    tools = {"search": search_tool(FakeRetriever(error="no answer"), 3, 100), "add": add}
    environment = make_environment(tools)
    actions = [Action("tool_call", call("search", query="q")), Action("tool_call", call("add", a=1, b=1))]
    failed, good = environment.step(actions, [make_tool_prompt()] * 2)
    environment.close()
    assert failed.failure == "tool search: no answer"
    assert good.failure == ""


def test_a_retriever_slower_than_the_tool_limit_is_waited_for() -> None:
    """It has deadlines and retries of its own; when they are used up, the trajectory is void, not misinformed."""

    class Slow(FakeRetriever):
        async def asearch(self, query: str, top_k: int) -> list[Passage]:
            await asyncio.sleep(0.05)
            return [Passage("late", "found")]

    environment = make_environment({"search": search_tool(Slow(), 3, 100)}, tool_timeout_s=0.001)
    assert "late" in answer(environment, call("search", query="q")).text
