"""Tool time of one turn: `python benchmarks/tools.py [--trajectories 64] [--seconds 0.2]`.

Every trajectory makes one call of a blocking tool that sleeps. Measured are the calls one after the other, and the
environment's `step` with each executor, parsing and rendering included.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import finish
from search_r1.environments.executors import PlainExecutor
from search_r1.environments.langgraph_executor import LangGraphExecutor
from search_r1.environments.tool_registry import Tool, tool
from search_r1.protocols import ToolExecutor
from search_r1.types import Action
from tests.tool_kit import call, make_environment, make_tool_prompt

ROUNDS = 3


def sleeping_tool(seconds: float) -> Tool:
    def wait(number: int) -> str:
        """Wait."""
        time.sleep(seconds)
        return str(number)

    return tool(wait)


def sequential_s(wait: Tool, count: int) -> float:
    start = time.perf_counter()
    for number in range(count):
        wait(number)
    return time.perf_counter() - start


def turn_s(wait: Tool, executor: ToolExecutor, count: int) -> float:
    """The slowest of `ROUNDS` turns."""
    environment = make_environment({wait.name: wait}, executor)
    actions = [Action("tool_call", call(wait.name, number=number)) for number in range(count)]
    prompts = [make_tool_prompt()] * count
    measured = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        observations = environment.step(actions, prompts)
        measured.append(time.perf_counter() - start)
        assert all(observation.calls[0].status == "success" for observation in observations)
    environment.close()
    return max(measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.2)
    options = parser.parse_args()
    count, wait = options.trajectories, sleeping_tool(options.seconds)
    executors: dict[str, Callable[[], ToolExecutor]] = {
        "plain": partial(PlainExecutor, 30.0, 256),
        "langgraph": partial(LangGraphExecutor, {wait.name: wait}, 30.0, 256),
    }
    alone = sequential_s(wait, count)
    rows: list[dict[str, Any]] = [{"tool time of one turn": "one call after the other", "seconds": alone}]
    rows += [
        {"tool time of one turn": name, "seconds": turn_s(wait, make(), count)} for name, make in executors.items()
    ]
    finish(
        "tools",
        f"{count} trajectories, each calling a tool that takes {options.seconds:g} s; slowest of {ROUNDS} turns",
        rows,
        alone / rows[1]["seconds"],
        "one after the other / plain executor",
        trajectories=count,
        tool_s=options.seconds,
    )


if __name__ == "__main__":
    main()
