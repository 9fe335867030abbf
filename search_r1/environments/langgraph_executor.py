"""Tools run by LangGraph's `ToolNode`: registered functions and LangChain's own tools side by side.

The only file that imports langgraph and langchain_core, an extra: `pip install search_r1[tools]`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial, wraps
from typing import Any

from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import BaseTool, StructuredTool
from langchain_core.tools import Tool as StringTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from search_r1.environments.call_guard import CallGuard, ToolReportedError, contained, in_daemon_thread, run_tool
from search_r1.environments.tool_registry import Tool, result_text
from search_r1.types import ToolResult

_CALL_ID = "call"


class LangGraphExecutor:
    """Each call is an `AIMessage(tool_calls=[…])` into a graph of one `ToolNode`, and a `ToolMessage` out of it.

    Calls run on the running event loop, beside one another; limits, deadlines and what becomes of an exception are
    those of every executor.
    """

    def __init__(self, tools: Mapping[str, Tool], timeout_s: float, max_concurrent: int) -> None:
        self._guard = CallGuard(timeout_s, max_concurrent)
        node = ToolNode([_node_tool(tool) for tool in tools.values()], handle_tool_errors=False)
        graph = StateGraph(MessagesState).add_node("tools", node).add_edge(START, "tools").add_edge("tools", END)
        self._graph = graph.compile()

    async def execute(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        return await self._guard(tool, lambda: self._run(tool.name, arguments))

    async def _run(self, name: str, arguments: Mapping[str, Any]) -> str:
        call = {"name": name, "args": dict(arguments), "id": _CALL_ID, "type": "tool_call"}
        state = await self._graph.ainvoke({"messages": [AIMessage(content="", tool_calls=[call])]})
        message = state["messages"][-1]
        if not isinstance(message, ToolMessage):
            raise ToolReportedError(f"{name} returned no tool message")
        if message.status == "error":
            raise ToolReportedError(result_text(message.content))
        return result_text(message.content)


def adopt_langchain_tool(value: object) -> Tool | None:
    """A LangChain tool as one of ours, with its own checks of arguments; None for anything else."""
    if not isinstance(value, BaseTool):
        return None
    function = convert_to_openai_tool(value)["function"]
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    source = f"{type(value).__module__}.{type(value).__name__}"
    run: Any = value
    return Tool(value.name, function.get("description", ""), parameters, run, dict, source=source)


class _AsyncTool(BaseTool):
    """A LangChain tool of any coroutine function of keyword arguments."""

    run_async: Callable[[dict[str, Any]], Awaitable[Any]]

    def _run(self, **arguments: Any) -> Any:
        raise NotImplementedError("this tool is run on an event loop")

    async def _arun(self, **arguments: Any) -> Any:
        return await self.run_async(arguments)


def _node_tool(tool: Tool) -> BaseTool:
    """What `ToolNode` gets: a LangChain tool that can wait, so that none blocks the loop or its small thread pool."""
    original = tool.function
    if isinstance(original, BaseTool) and not _is_blocking(original):
        return _contained(original)
    run: Callable[[dict[str, Any]], Awaitable[Any]] = partial(run_tool, tool)
    if isinstance(original, BaseTool):
        run = partial(_in_thread, original)
    return _AsyncTool(name=tool.name, description=tool.description, args_schema=tool.parameters, run_async=run)


def _contained(tool: BaseTool) -> BaseTool:
    """The tool with its coroutine contained right there: LangChain and LangGraph each put a task around it."""
    run = tool._arun

    @wraps(run)
    async def _arun(*args: Any, **arguments: Any) -> Any:
        return await contained(run(*args, **arguments))

    copy = tool.model_copy()
    object.__setattr__(copy, "_arun", _arun)
    return copy


def _is_blocking(tool: BaseTool) -> bool:
    """It has no coroutine of its own."""
    defaults = (BaseTool._arun, StructuredTool._arun, StringTool._arun)
    return type(tool)._arun in defaults and getattr(tool, "coroutine", None) is None


async def _in_thread(tool: BaseTool, arguments: dict[str, Any]) -> Any:
    call = {"name": tool.name, "args": arguments, "id": _CALL_ID, "type": "tool_call"}
    return await in_daemon_thread(lambda: tool.invoke(call))
