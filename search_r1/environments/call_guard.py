"""Around every tool call: a limit on how many run, a deadline, and a result whatever happens."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import isawaitable
from time import perf_counter
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from search_r1.environments.tool_registry import Tool, ToolArgumentError, result_text
from search_r1.errors import RetrieverError, ToolUnavailableError
from search_r1.types import ToolResult

T = TypeVar("T")


class ToolReportedError(Exception):
    """The tool itself answered that it failed; the text is its own."""


@dataclass(slots=True)
class _Clock:
    """Entered around the function of a call, in the thread or task that runs it; again for what is to be awaited."""

    began: float | None = None
    ended: float = 0.0

    def __enter__(self) -> None:
        self.began = self.began or perf_counter()

    def __exit__(self, *_: object) -> None:
        self.ended = perf_counter()

    def seconds(self, until: float) -> float:
        return 0.0 if self.began is None else until - self.began


_clock: contextvars.ContextVar[_Clock] = contextvars.ContextVar("clock", default=_Clock())  # noqa: B039  nobody reads it


class CallGuard:
    """Runs calls at most `max_concurrent` at a time, each function for at most `timeout_s` seconds.

    A call that outlives them is cancelled and not waited for: what ignores that is left behind.
    """

    def __init__(self, timeout_s: float, max_concurrent: int) -> None:
        self._timeout_s = timeout_s
        self._max_concurrent = max_concurrent
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def __call__(self, tool: Tool, run: Callable[[], Awaitable[str]]) -> ToolResult:
        """The outcome of `run`: an exception and a missed deadline are results of status error.

        `RetrieverError` and `ToolUnavailableError` come back as a failure of the infrastructure.
        """
        loop = asyncio.get_running_loop()
        async with self._slots.setdefault(loop, asyncio.Semaphore(self._max_concurrent)):
            clock = _Clock()
            _clock.set(clock)
            status, content, failure = await self._outcome(tool, run, clock)
            return ToolResult(tool.name, status, content, clock.seconds(clock.ended), failure)  # type: ignore[arg-type]

    async def _outcome(self, tool: Tool, run: Callable[[], Awaitable[str]], clock: _Clock) -> tuple[str, str, str]:
        """Status, content and failure."""
        task = asyncio.ensure_future(run())
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may be left to ask for it
        try:
            done, _ = await asyncio.wait([task], timeout=None if tool.keeps_time else self._timeout_s)
            left_s = self._timeout_s - clock.seconds(perf_counter())
            if not done and left_s > 0:  # it began late
                done, _ = await asyncio.wait([task], timeout=left_s)
        finally:
            task.cancel()
        if not done:
            clock.ended = perf_counter()
            return "error", f"{tool.name} gave no result within {self._timeout_s:g} s", ""
        try:
            return "success", task.result(), ""
        except (RetrieverError, ToolUnavailableError) as error:
            return "error", "", f"tool {tool.name}: {error}"
        except (ToolArgumentError, ToolReportedError) as error:
            return "error", str(error), ""
        except BaseException as error:  # noqa: BLE001  told to the model, which may try otherwise
            return "error", _describe(error), ""


def _overreach(error: BaseException) -> RuntimeError:
    return RuntimeError(f"the tool tried to end the process ({error!r})")


def _describe(error: BaseException) -> str:
    """Without the notes that others add, which may differ from run to run."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  an exception of the tool's own, with whatever `__str__`
        text = ""
    return f"{type(error).__name__}: {text}".removesuffix(": ")


async def run_tool(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """Check the arguments and call the function; what it raises is raised.

    Raises:
        ToolArgumentError: the arguments do not fit.
    """
    bound = tool.bind(arguments)
    if tool.is_async:
        return result_text(await contained(tool.function(**bound)))
    value = await in_daemon_thread(lambda: _text_or_awaitable(tool.function(**bound)))
    return value if isinstance(value, str) else result_text(await contained(value))


def _text_or_awaitable(value: Any) -> str | Awaitable[Any]:
    """A plain function may wrap a coroutine function and return what that returns."""
    return value if isawaitable(value) else result_text(value)


async def contained(work: Awaitable[T]) -> T:
    """What comes of a tool's coroutine, whose attempts to end more than itself are raised as a `RuntimeError`.

    To be awaited in the task that runs it: a task hands `SystemExit` and `KeyboardInterrupt` on to its event loop.
    """
    try:
        with _clock.get():
            return await work
    except Exception:
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise _overreach(error) from error


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Run a blocking function in a thread of its own, which keeps neither others waiting nor the process alive.

    A thread cannot be stopped: one that outlives its deadline goes on until its function returns.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[T | None, Exception | None]] = loop.create_future()

    def deliver(outcome: tuple[T | None, Exception | None]) -> None:
        if not done.done():
            done.set_result(outcome)

    def work() -> None:
        outcome: tuple[T | None, Exception | None]
        try:
            with _clock.get():
                outcome = (function(), None)
        except Exception as error:  # noqa: BLE001  raised where it is awaited
            outcome = (None, error)
        except BaseException as error:  # noqa: BLE001
            outcome = (None, _overreach(error))
        with suppress(RuntimeError):  # nobody waits any more: the loop is closed
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=contextvars.copy_context().run, args=(work,), name="tool", daemon=True).start()
    value, error = await done
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
