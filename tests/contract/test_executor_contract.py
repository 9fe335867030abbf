"""What every tool executor promises."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from search_r1.environments.call_guard import CallGuard, run_tool
from search_r1.environments.executors import PlainExecutor
from search_r1.environments.langgraph_executor import LangGraphExecutor
from search_r1.environments.tool_registry import Tool, tool
from search_r1.errors import RetrieverError, ToolUnavailableError
from search_r1.protocols import ToolExecutor
from search_r1.types import ToolResult

Make = Callable[..., ToolExecutor]


def plain(tools: Iterable[Tool], timeout_s: float = 30.0, max_concurrent: int = 256) -> ToolExecutor:
    return PlainExecutor(timeout_s, max_concurrent)


def langgraph(tools: Iterable[Tool], timeout_s: float = 30.0, max_concurrent: int = 256) -> ToolExecutor:
    return LangGraphExecutor({one.name: one for one in tools}, timeout_s, max_concurrent)


@pytest.fixture(params=[plain, langgraph], ids=["plain", "langgraph"])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param  # type: ignore[no-any-return]


def run(make: Make, one: Tool, arguments: Mapping[str, Any], **limits: Any) -> ToolResult:
    return asyncio.run(make([one], **limits).execute(one, arguments))  # type: ignore[arg-type]


@dataclass
class Point:
    x: int
    y: int = 0


@tool
def shift(point: Point, by: int = 1) -> Point:
    """Move a point to the right."""
    return Point(point.x + by, point.y)


@tool
async def shift_later(point: Point, by: int = 1) -> dict[str, Any]:
    """Move a point to the right, asynchronously."""
    await asyncio.sleep(0)
    return {"point": point, "by": by, "word": "é"}


@tool
def odd_names(config: str, self_: str = "s", run_manager: str = "m", schema: str = "x") -> str:
    """Take arguments of names that frameworks use themselves."""
    return f"{config} {self_} {run_manager} {schema}"


def test_validated_arguments_go_in_and_text_or_json_comes_out(make: Make) -> None:
    assert run(make, shift, {"point": {"x": "3"}}).content == '{"x":4,"y":0}'
    later = run(make, shift_later, {"point": {"x": 1, "y": 2}, "by": 5})
    assert (later.tool, later.status) == ("shift_later", "success")
    assert later.content == '{"point":{"x":1,"y":2},"by":5,"word":"é"}'
    assert run(make, odd_names, {"config": "c", "run_manager": "r"}).content == "c s r x"


@pytest.mark.parametrize(
    "arguments, words",
    [({}, "point: Field required"), ({"point": {"x": "a"}}, "point.x"), ({"point": {"x": 1}, "z": 1}, "z: Extra")],
)
def test_wrong_arguments_are_an_error_that_names_them(make: Make, arguments: dict[str, Any], words: str) -> None:
    result = run(make, shift, arguments)
    assert result.status == "error"
    assert result.content.startswith("wrong arguments: ")
    assert words in result.content


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class OddError(BaseException):
    pass


RAISED = [
    ValueError("big"),
    KeyError("k"),
    TimeoutError("own"),
    StopIteration(),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    OddError(),
    UnprintableError(),
    asyncio.CancelledError(),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_tool_raises_is_an_error_result(make: Make, error: BaseException, is_async: bool) -> None:
    def fail() -> str:
        """Fail."""
        raise error

    async def fail_later() -> str:
        """Fail, asynchronously."""
        raise error

    result = run(make, tool(fail_later if is_async else fail), {})
    assert (result.status, result.failure) == ("error", "")
    assert "within" not in result.content


@pytest.mark.parametrize("error", [RetrieverError("down"), ToolUnavailableError("down")])
def test_a_failure_of_the_infrastructure_is_told_apart(make: Make, error: Exception) -> None:
    def fail() -> str:
        """Fail."""
        raise error

    result = run(make, tool(fail), {})
    assert (result.status, result.content, result.failure) == ("error", "", "tool fail: down")


def test_a_tool_that_never_ends_is_an_error_after_its_time_and_others_go_on(make: Make) -> None:
    forever = threading.Event()

    def hang() -> str:
        """Hang."""
        forever.wait()
        return "done"

    async def hang_later() -> str:
        """Hang, asynchronously."""
        await asyncio.Event().wait()
        return "done"

    tools = [tool(hang), tool(hang_later)]
    patient = replace(shift, keeps_time=True)
    executor = make([*tools, patient], timeout_s=0.05, max_concurrent=1)

    async def all_of_them() -> list[ToolResult]:
        calls = [executor.execute(one, {}) for one in tools]
        return await asyncio.gather(*calls, executor.execute(patient, {"point": {"x": 1}}))

    *hung, good = asyncio.run(all_of_them())
    forever.set()
    assert [result.content for result in hung] == [f"{one.name} gave no result within 0.05 s" for one in tools]
    assert good.status == "success"


class Stubborn:
    """A tool that nothing ends but `released`."""

    def __init__(self) -> None:
        self.started = self.released = False

    async def wait(self) -> str:
        """Ignore every cancellation."""
        self.started = True
        while not self.released:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)
        return "done"


def test_a_coroutine_that_ignores_its_deadline_is_left_behind(make: Make) -> None:
    stubborn = Stubborn()
    one = tool(stubborn.wait)

    async def wait_for_it() -> ToolResult:
        result = await make([one], timeout_s=0.05).execute(one, {})  # type: ignore[arg-type]
        stubborn.released = True
        return result

    assert asyncio.run(wait_for_it()).content == "wait gave no result within 0.05 s"


def test_a_coroutine_that_ignores_cancellation_does_not_keep_a_step_from_being_cancelled(make: Make) -> None:
    stubborn = Stubborn()
    one = tool(stubborn.wait)

    async def cancel() -> None:
        step = asyncio.create_task(make([one]).execute(one, {}))  # type: ignore[arg-type]
        while not stubborn.started:
            await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        stubborn.released = True

    asyncio.run(cancel())


def test_a_coroutine_that_a_plain_function_returns_is_awaited(make: Make) -> None:
    @functools.wraps(shift_later.function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return shift_later.function(*args, **kwargs)

    result = run(make, tool(wrapped), {"point": {"x": 1}})
    assert (result.status, result.content) == ("success", '{"point":{"x":1,"y":0},"by":1,"word":"é"}')


def test_seconds_are_those_of_the_function_alone(make: Make) -> None:
    ended = threading.Event()

    def quick() -> str:
        """End at once."""
        ended.set()
        return ""

    async def hold_up() -> str:
        """Keep the event loop busy after the other has ended."""
        ended.wait(10)
        time.sleep(0.1)
        return ""

    tools = [tool(quick), tool(hold_up)]
    executor = make([*tools, shift])

    async def all_of_them() -> list[ToolResult]:
        return await asyncio.gather(*(executor.execute(one, {}) for one in [*tools, shift]))

    first, second, refused = asyncio.run(all_of_them())
    assert 0 < first.seconds < 0.1 <= second.seconds
    assert refused.seconds == 0


def test_the_time_limit_counts_from_the_beginning_of_the_function() -> None:
    async def run_late() -> str:
        await asyncio.sleep(0.21)
        return await run_tool(shift, {"point": {"x": 1}})

    assert asyncio.run(CallGuard(0.2, 1)(shift, run_late)).status == "success"  # type: ignore[arg-type]


def test_a_tool_with_deadlines_of_its_own_is_given_none(make: Make) -> None:
    async def wait() -> str:
        """Wait longer than others may."""
        await asyncio.sleep(0.05)
        return "done"

    assert run(make, replace(tool(wait), keeps_time=True), {}, timeout_s=0.001).content == "done"


@pytest.mark.timeout(60)
def test_64_blocking_calls_overlap_fully(make: Make) -> None:
    """Each waits until all 64 run: fewer at a time would never end."""
    everyone = threading.Barrier(64)

    def meet() -> str:
        """Wait for all others."""
        everyone.wait()
        return "met"

    one = tool(meet)
    executor = make([one])

    async def all_of_them() -> list[ToolResult]:
        return await asyncio.gather(*(executor.execute(one, {}) for _ in range(64)))

    assert {result.content for result in asyncio.run(all_of_them())} == {"met"}


def test_no_more_run_at_once_than_allowed(make: Make) -> None:
    running = most = 0

    async def count() -> str:
        """Count who runs."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        return ""

    one = tool(count)
    executor = make([one], max_concurrent=3)

    async def all_of_them() -> None:
        await asyncio.gather(*(executor.execute(one, {}) for _ in range(20)))

    asyncio.run(all_of_them())
    asyncio.run(all_of_them())
    assert most == 3


def test_nothing_executes_the_text_of_a_call(make: Make) -> None:
    seen = []

    def show(text: str) -> str:
        """Show a text."""
        seen.append(text)
        return text

    evil = "__import__('sys').modules.__setitem__('evil', 1); {{ 7 * 7 }} ${HOME}"
    assert run(make, tool(show), {"text": evil}).content == evil
    assert seen == [evil]
    assert "evil" not in sys.modules


def test_cancelling_a_call_frees_its_place(make: Make) -> None:
    async def hang() -> str:
        """Hang."""
        await asyncio.Event().wait()
        return ""

    one = tool(hang)
    executor = make([one, shift], max_concurrent=1)

    async def cancel_and_go_on() -> ToolResult:
        task = asyncio.create_task(executor.execute(one, {}))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return await executor.execute(shift, {"point": {"x": 1}})

    assert asyncio.run(cancel_and_go_on()).status == "success"
