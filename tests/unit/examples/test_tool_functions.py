from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from examples.tools.functions import calculator, days_between
from search_r1.environments.tool_registry import ToolArgumentError


@pytest.mark.parametrize(
    "expression, result",
    [("37 * 24", "888"), ("(12 + 7) * -3", "-57"), ("7 / 2", "3.5"), ("2 ** 10 % 7", "2"), (" 1 - 2 ", "-1")],
)
def test_the_calculator_works_out_arithmetic(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "(lambda: 1)()",
        "x",
        "'a' * 3",
        "True",
        "[1][0]",
        "9 ** 9 ** 9",
        "10 ** 300 ** 2",
        "(-8) ** 0.5",
        "1 / 0",
        "1 +",
        "(" * 150,
        "1+" * 200 + "1",
    ],
)
def test_anything_else_is_refused_and_nothing_is_executed(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError, ArithmeticError, MemoryError, RecursionError)):
        calculator(expression)


def test_the_calculator_may_run_in_many_threads_at_once() -> None:
    """Python's own parser may not: another thread that parses, here during a garbage collection, makes it fail."""

    def let_others_run(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    thresholds = gc.get_threshold()
    gc.callbacks.append(let_others_run)
    gc.set_threshold(5)
    try:
        with ThreadPoolExecutor(8) as threads:
            results = list(threads.map(calculator, ["((1 + 2) * (3 + 4)) * 5"] * 400))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(let_others_run)
    assert set(results) == {"105"}


def test_dates_are_read_and_the_order_does_not_matter() -> None:
    dates = days_between.bind({"start": "2024-03-01", "end": "2024-02-28"})
    assert days_between(**dates) == 2
    with pytest.raises(ToolArgumentError, match="end"):
        days_between.bind({"start": "2024-03-01", "end": "30 February"})
