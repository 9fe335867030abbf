"""LangChain's own tools through LangGraph's ToolNode."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import types
from typing import Any

import pytest
from langchain_core.tools import BaseTool, StructuredTool, ToolException
from langchain_core.tools import tool as langchain_tool

from search_r1.environments.langgraph_executor import LangGraphExecutor, adopt_langchain_tool
from search_r1.environments.tool_registry import Tool, load_tools, tool
from search_r1.types import ToolResult
from tests.fakes import make_completion
from tests.tool_kit import TOOLS, call, make_environment, make_tool_prompt, play


@langchain_tool
def multiply(a: int, b: int = 2) -> int:
    """Multiply two numbers."""
    return a * b


@langchain_tool
async def shout(text: str) -> str:
    """Say it loud."""
    await asyncio.sleep(0)
    return text.upper()


class Blocks(BaseTool):
    """A class of its own, without a coroutine."""

    name: str = "blocks"
    description: str = "Answer in blocks."

    def _run(self, number: int) -> Any:
        if number < 0:
            raise ToolException("no negative number")
        return [{"type": "text", "text": str(number)}]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def adopted(*tools: object) -> dict[str, Tool]:
    module = types.ModuleType("langchain_kit")
    vars(module).update({f"t{index}": one for index, one in enumerate(tools)})
    sys.modules["langchain_kit"] = module
    return load_tools(["langchain_kit"], adopt_langchain_tool)


def run(tools: dict[str, Tool], name: str, **arguments: Any) -> ToolResult:
    executor = LangGraphExecutor(tools, timeout_s=30.0, max_concurrent=64)
    return asyncio.run(executor.execute(tools[name], arguments))


def test_langchain_tools_and_registered_functions_stand_side_by_side() -> None:
    tools = adopted(multiply, shout, Blocks(), add)
    assert list(tools) == ["multiply", "shout", "blocks", "add"]
    parameters = tools["multiply"].schema["function"]["parameters"]
    assert (parameters["required"], parameters["properties"]["b"]["default"]) == (["a"], 2)
    assert run(tools, "multiply", a="4").content == "8"
    assert run(tools, "shout", text="hi").content == "HI"
    assert run(tools, "blocks", number=7).content == '[{"type":"text","text":"7"}]'
    assert run(tools, "add", a=1, b=2).content == "3"


@pytest.mark.parametrize("blocking", [True, False])
def test_wrong_arguments_and_exceptions_are_errors(blocking: bool) -> None:
    tools = adopted(multiply, shout, Blocks())
    result = run(tools, "multiply", b=3) if blocking else run(tools, "shout", tex="x")
    assert result.status == "error"
    assert "ield required" in result.content
    assert run(tools, "blocks", number=-1).content.endswith("ToolException: no negative number")


@pytest.mark.parametrize("is_async", [True, False])
def test_a_tool_message_of_status_error_is_an_error(is_async: bool) -> None:
    def refuse(x: int) -> int:
        """Refuse."""
        raise ToolException("refused")

    async def refuse_later(x: int) -> int:
        """Refuse."""
        raise ToolException("refused")

    if is_async:
        made = StructuredTool.from_function(coroutine=refuse_later, name="refuse", handle_tool_error=True)
    else:
        made = StructuredTool.from_function(refuse, handle_tool_error=True)
    result = run(adopted(made), "refuse", x=1)
    assert (result.status, result.content) == ("error", "refused")


class Counts(BaseTool):
    """A class of its own with a coroutine, which raises."""

    name: str = "counts"
    description: str = "Count, then fail."
    error: Any = None
    calls: int = 0

    def _run(self, number: int) -> str:
        raise AssertionError("the coroutine is used")

    async def _arun(self, number: int) -> str:
        self.calls += 1
        raise self.error


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()], ids=repr
)
@pytest.mark.parametrize("of_its_own_class", [True, False])
def test_a_langchain_coroutine_cannot_end_the_process(error: BaseException, of_its_own_class: bool) -> None:
    async def leave(number: int) -> str:
        """Leave."""
        raise error

    counts = Counts(error=error)
    made = counts if of_its_own_class else StructuredTool.from_function(coroutine=leave, name="counts")
    result = run(adopted(made), "counts", number=1)
    assert (result.status, result.failure) == ("error", "")
    assert f"the tool tried to end the process ({error!r})" in result.content
    assert counts.calls == of_its_own_class, "the tool itself is run, with its state"


def test_a_langchain_coroutine_that_ignores_its_deadline_is_left_behind() -> None:
    released = threading.Event()

    @langchain_tool
    async def wait() -> str:
        """Ignore every cancellation."""
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)
        return "done"

    tools = adopted(wait)

    async def wait_for_it() -> ToolResult:
        result = await LangGraphExecutor(tools, timeout_s=0.05, max_concurrent=64).execute(tools["wait"], {})
        released.set()
        return result

    assert asyncio.run(wait_for_it()).content == "wait gave no result within 0.05 s"


@pytest.mark.timeout(60)
def test_64_blocking_langchain_tools_overlap_fully() -> None:
    everyone = threading.Barrier(64)

    @langchain_tool
    def meet() -> str:
        """Wait for all others."""
        everyone.wait()
        return "met"

    tools = adopted(meet)
    executor = LangGraphExecutor(tools, timeout_s=30.0, max_concurrent=64)

    async def all_of_them() -> list[ToolResult]:
        return await asyncio.gather(*(executor.execute(tools["meet"], {}) for _ in range(64)))

    assert {result.content for result in asyncio.run(all_of_them())} == {"met"}


def test_the_executor_works_from_synchronous_code_and_in_a_running_event_loop() -> None:
    tools = adopted(multiply, add)
    environment = make_environment(tools, LangGraphExecutor(tools, 30.0, 64))
    action = environment.parse(make_completion(call("multiply", a=3) + call("add", a=1, b=1)))
    (stepped,) = environment.step([action], [make_tool_prompt()])
    waited = asyncio.run(environment.astep(action, make_tool_prompt()))
    environment.close()
    assert stepped.text == waited.text
    assert [result.content for result in stepped.calls] == ["6", "2"]


def test_registered_functions_give_the_same_trajectory_plainly_and_through_langgraph() -> None:
    texts = (
        call("add", a=1, b=2) + call("greet", name="Bo") + call("nope") + "<tool_call>{bad</tool_call>",
        call("fail", message="boom") + call("add", a="x") + call("repeat", text="é ", times=5000),
        r"\boxed{3}",
    )
    plain = play(make_environment(), *texts)
    through = play(make_environment(executor=LangGraphExecutor(TOOLS, 30.0, 64)), *texts)
    assert plain.context_ids == through.context_ids
    assert plain.loss_mask == through.loss_mask
    assert (plain.status, plain.answer) == (through.status, through.answer)
