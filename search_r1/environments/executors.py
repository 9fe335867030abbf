"""The default executor: calls the registered functions themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from search_r1.environments.call_guard import CallGuard, run_tool
from search_r1.environments.tool_registry import Tool
from search_r1.types import ToolResult


class PlainExecutor:
    """Awaits coroutine functions on the running event loop and gives every other one a thread."""

    def __init__(self, timeout_s: float, max_concurrent: int) -> None:
        self._guard = CallGuard(timeout_s, max_concurrent)

    async def execute(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        return await self._guard(tool, lambda: run_tool(tool, arguments))
