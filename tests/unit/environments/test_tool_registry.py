from __future__ import annotations

import enum
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from search_r1.environments.tool_registry import ToolArgumentError, load_tools, result_text, tool
from search_r1.errors import ConfigError


class Unit(enum.Enum):
    METRE = "m"
    MILE = "mi"


@dataclass
class Place:
    name: str
    tags: list[str]


class Range(TypedDict):
    low: float
    high: float


class Filter(BaseModel):
    places: list[Place]
    within: Range | None = None


def distance(
    start: Place,
    spans: dict[str, list[int]],
    filter: Filter,
    unit: Unit = Unit.METRE,
    mode: Literal["fast", "short"] = "fast",
    note: Optional[str] = None,  # noqa: UP045
    times: Annotated[int, Field(ge=1, le=9, description="How often.")] = 2,
) -> float:
    """Measure a distance.

    Between places, along roads.

    Args:
        start: Where it begins,
            on two lines.
        unit (Unit): Of the result.
        times: Not shown: the annotation says it.

    Returns:
        The distance.
    """
    return 1.0


def test_the_schema_keeps_nested_types_defaults_enums_and_descriptions() -> None:
    schema = tool(distance).schema
    assert schema["type"] == "function"
    function = schema["function"]
    assert function["name"] == "distance"
    assert function["description"] == "Measure a distance.\n\nBetween places, along roads."
    parameters = function["parameters"]
    properties = parameters["properties"]
    assert parameters["required"] == ["start", "spans", "filter"]
    assert parameters["additionalProperties"] is False
    assert properties["spans"]["additionalProperties"] == {"type": "array", "items": {"type": "integer"}}
    assert properties["start"]["description"] == "Where it begins, on two lines."
    assert properties["unit"]["description"] == "Of the result."
    assert properties["unit"]["default"] == "m"
    assert properties["mode"] == {"type": "string", "enum": ["fast", "short"], "default": "fast"}
    assert properties["note"] == {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
    assert properties["times"] == {
        "type": "integer", "minimum": 1, "maximum": 9, "description": "How often.", "default": 2
    }  # fmt: skip
    assert parameters["$defs"]["Unit"]["enum"] == ["m", "mi"]
    assert parameters["$defs"]["Place"]["properties"]["tags"]["items"] == {"type": "string"}
    assert set(parameters["$defs"]["Filter"]["properties"]) == {"places", "within"}


def test_json_arguments_become_the_types_of_the_signature() -> None:
    bound = tool(distance).bind(
        {
            "start": {"name": "A", "tags": ["x"]},
            "spans": {"k": ["1"]},
            "filter": {"places": [], "within": {"low": 0, "high": 1}},
            "unit": "mi",
        }
    )
    assert bound["start"] == Place("A", ["x"])
    assert bound["spans"] == {"k": [1]}
    assert bound["unit"] is Unit.MILE
    assert isinstance(bound["filter"], Filter)
    assert "times" not in bound, "the function's own default holds"


def test_a_tool_can_still_be_called_as_the_function_it_is() -> None:
    @tool
    def double(x: int) -> int:
        """Double."""
        return 2 * x

    assert double(4) == 8
    with pytest.raises(ToolArgumentError, match="x: Field required; y: Extra"):
        double.bind({"y": 1})


@pytest.mark.parametrize(
    "code, words",
    [
        ("def f(x): 'Doc.'", r"tool f \(.*:\d+\): argument 'x' has no type annotation, e.g. x: str"),
        ("def f(x: int): pass", r"tool f \(.*:\d+\) has no docstring"),
        ("def f(*xs: int): 'Doc.'", "cannot be given by name"),
        ("def f(x: int, /): 'Doc.'", "cannot be given by name"),
        ("def f(x: 'Missing'): 'Doc.'", "annotation cannot be resolved.*Missing"),
        ("def f(x: type(lambda: 0)): 'Doc.'", "no JSON schema"),
        ("def f(x: object.__new__.__class__): 'Doc.'", "no JSON schema"),
        ("f = lambda x: x", "plain identifier"),
        ("async def f(x: int):\n 'Doc.'\n yield x", "no function or coroutine function that returns its result"),
        (
            "class Own:\n 'Doc.'\n async def __call__(self, x: int): 'Doc.'\nf = Own()",
            "tool Own .* no function or coroutine function that returns its result; decorate one that calls it",
        ),
        (
            "from pydantic import Field\ndef f(x: int = Field(3, ge=0)): 'Doc.'",
            r"argument 'x' has a pydantic Field as its default; .* x: Annotated\[int, Field\(ge=0\)\] = 3",
        ),
    ],
)
def test_a_function_that_makes_no_tool_is_refused_with_file_line_and_remedy(code: str, words: str) -> None:
    scope: dict[str, Any] = {}
    exec(code, scope)  # noqa: S102  the test's own source
    with pytest.raises(ConfigError, match=words):
        tool(scope["f"])


def module(name: str, **members: Any) -> str:
    made = types.ModuleType(name)
    vars(made).update(members)
    sys.modules[name] = made
    return name


def test_tools_of_modules_are_found_and_two_of_one_name_are_refused() -> None:
    @tool
    def one(x: int) -> int:
        """One."""
        return x

    @tool
    def two(x: int) -> int:
        """Two."""
        return x

    def other() -> Any:
        def one(y: int) -> int:
            """Another one."""
            return y

        return tool(one)

    first, second = module("kit_first", a=one, b=two, c=3), module("kit_second", one=one)
    assert list(load_tools([first, second])) == ["one", "two"]
    with pytest.raises(ConfigError, match=r"two tools are named 'one', in .*:\d+ and in .*:\d+: rename one"):
        load_tools([first, module("kit_third", z=other())])


def test_a_second_tool_of_a_name_in_one_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = "@tool\n{}def twin(x: int) -> int:\n    'Doc.'\n    return x\n\n\n"
    header = "from search_r1.environments.tool_registry import tool\n\n\n"
    (tmp_path / "kit_twins.py").write_text(header + one.format("") + one.format("async "))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"'twin', in .*kit_twins\.py:4 and in .*kit_twins\.py:10: rename one"):
        load_tools(["kit_twins"])


def test_a_module_without_tools_or_that_does_not_import_is_named() -> None:
    with pytest.raises(ConfigError, match="kit_empty defines no tool; decorate"):
        load_tools([module("kit_empty", f=lambda: 0)])
    with pytest.raises(ConfigError, match=r"'nowhere\.tools' does not import \(ModuleNotFoundError"):
        load_tools(["nowhere.tools"])


@pytest.mark.parametrize(
    "value, text",
    [
        ("plain é", "plain é"),
        (3, "3"),
        (None, "null"),
        ({"a": [1, Unit.MILE]}, '{"a":[1,"mi"]}'),
        (Place("A", []), '{"name":"A","tags":[]}'),
        ({1, 2} - {2}, "[1]"),
    ],
)
def test_results_become_text_or_json(value: Any, text: str) -> None:
    assert result_text(value) == text


def test_what_json_cannot_hold_is_shown_by_its_str() -> None:
    class Own:
        def __str__(self) -> str:
            return "own"

    assert result_text([Own()]) == '["own"]'
