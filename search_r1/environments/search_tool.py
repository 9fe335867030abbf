"""Searching as one tool among others."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from search_r1.environments.call_guard import in_daemon_thread
from search_r1.environments.passages import NO_PASSAGES, passage_line
from search_r1.environments.tool_registry import Tool, ToolArgumentError, tool
from search_r1.protocols import Retriever
from search_r1.rollout.actions import clean_query

_MAX_TOP_K = 50


def search_tool(retriever: Retriever, top_k: int, max_query_chars: int) -> Tool:
    """`search(query, top_k)` on a retriever; `top_k` is the default the model sees.

    A retriever that is down raises `RetrieverError`, which makes the trajectory VOID. It has deadlines and retries of
    its own, so that the executor sets it none.
    """
    client: Any = retriever
    default = min(top_k, _MAX_TOP_K)

    async def search(query: str, top_k: Annotated[int, Field(ge=1, le=_MAX_TOP_K)] = default) -> str:
        """Find passages that are about a query.

        Args:
            query: What to look for.
            top_k: How many passages to return.
        """
        cleaned = clean_query(query)[:max_query_chars]
        if not cleaned:
            raise ToolArgumentError("the query is empty")
        if hasattr(client, "asearch"):
            passages = await client.asearch(cleaned, top_k)
        else:
            (passages,) = await in_daemon_thread(lambda: client.search([cleaned], top_k))
        return "\n".join(passage_line(rank, p) for rank, p in enumerate(passages, start=1)) or NO_PASSAGES

    return replace(tool(search), keeps_time=True)
