"""Two tools as plain functions; the third one, search, comes with the framework."""

from __future__ import annotations

import ast
import operator
import threading
from collections.abc import Callable
from datetime import date

from search_r1.environments.tool_registry import tool

_MAX_CHARS = 200
_MAX_EXPONENT = 64
_PARSING = threading.Lock()
"""Python 3.11 and 3.12 count the depth of a syntax tree for all threads together: two at a time can fail."""
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@tool
def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses.
    """
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"the expression is longer than {_MAX_CHARS} characters")
    with _PARSING:
        tree = ast.parse(expression.strip(), mode="eval")
    result = _value(tree.body)
    return str(int(result)) if result.is_integer() and abs(result) < 1e15 else f"{result:.10g}"


def _value(node: ast.expr) -> float:
    """Walks the parsed expression; it is never compiled or executed, and names, calls and attributes are refused."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > _MAX_EXPONENT:
            raise ValueError(f"the exponent is above {_MAX_EXPONENT}")
        result = _BINARY[type(node.op)](left, right)
        if isinstance(result, complex):
            raise ValueError("the result is no real number")
        return result
    raise ValueError("only numbers, + - * / // % ** and parentheses can be worked out")


@tool
def days_between(start: date, end: date) -> int:
    """Count the days from one date to another, e.g. 2024-03-01."""
    return abs((end - start).days)
