"""Tools are plain functions: `@tool` reads name, description and JSON schema off a typed function with a docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, NotRequired, Required, get_type_hints

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python
from typing_extensions import TypedDict

from search_r1.errors import ConfigError

Schema = dict[str, Any]
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_SECTION = re.compile(r"^\s*(?:Args|Arguments|Parameters|Returns|Raises|Examples?|Yields|Note):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^\s+\*{0,2}(\w+)(?: *\([^)]*\))?: *(.+)$")


class ToolArgumentError(Exception):
    """The model called a tool with arguments that do not fit its signature."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call."""

    name: str
    description: str
    parameters: Schema
    """JSON schema of the arguments, an object."""
    function: Callable[..., Any]
    """Called with keyword arguments; a coroutine function where `is_async`. Any other may return an awaitable too."""
    bind: Callable[[Mapping[str, Any]], dict[str, Any]]
    """JSON arguments to what `function` takes; raises `ToolArgumentError`."""
    is_async: bool = False
    keeps_time: bool = False
    """It has deadlines of its own, after which its infrastructure counts as down: the executor sets it none."""
    source: str = ""
    """File and line, for messages."""

    @property
    def schema(self) -> Schema:
        """In OpenAI's form, as chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def tool(function: Callable[..., Any]) -> Tool:
    """Decorator: a typed function with a docstring becomes a tool, and can still be called as before.

    Argument descriptions come from the docstring's `Args:` section or from `Annotated[…, Field(description=…)]`.

    Raises:
        ConfigError: it has no docstring, an argument without annotation, or one that has no JSON schema; or its file
            has another tool of its name.
    """
    source = _source(function)
    name = getattr(function, "__name__", type(function).__name__)
    where = f"tool {name} ({source})"
    if not inspect.isroutine(function) or inspect.isasyncgenfunction(inspect.unwrap(function)):
        raise ConfigError(
            f"{where}: this is no function or coroutine function that returns its result; decorate one that calls it"
        )
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: the name must be a plain identifier; decorate a named function")
    description, of_arguments = _read_docstring(inspect.getdoc(function) or "")
    if not description:
        raise ConfigError(f"{where} has no docstring: its first lines tell the model what the tool does")
    if getattr(function, "__qualname__", "") == name:
        earlier: Any = getattr(inspect.unwrap(function), "__globals__", {}).get(name)
        same_file = isinstance(earlier, Tool) and earlier.source.rpartition(":")[0] == source.rpartition(":")[0]
        if same_file and earlier.source != source:
            raise _same_name(name, earlier.source, source)
    adapter, parameters = _arguments(function, of_arguments, where)
    return Tool(
        name,
        description,
        parameters,
        function,
        lambda arguments: _validate(adapter, arguments),
        inspect.iscoroutinefunction(function),
        source=source,
    )


def load_tools(
    modules: Iterable[str], adopt: Callable[[object], Tool | None] | None = None, first: Sequence[Tool] = ()
) -> dict[str, Tool]:
    """All tools of the named modules by name, after those given as `first`.

    Args:
        adopt: makes a tool of a module's other objects, or returns None.

    Raises:
        ConfigError: a module that does not import or defines no tool, or two tools of one name.
    """
    tools = {known.name: known for known in first}
    for module_name in modules:
        found = _tools_of(_import(module_name), adopt)
        if not found:
            raise ConfigError(
                f"environment.tools: {module_name} defines no tool; decorate a function with "
                "search_r1.environments.tool_registry.tool (LangChain tools need environment.executor=langgraph)"
            )
        for new in found:
            known = tools.setdefault(new.name, new)
            if known.function is not new.function:
                raise _same_name(new.name, known.source, new.source)
    return tools


def result_text(value: Any) -> str:
    """What the model reads: a string as it is, anything else as JSON (what JSON cannot hold by its `str`)."""
    return value if isinstance(value, str) else to_json(value, fallback=str).decode()


def _same_name(name: str, first: str, second: str) -> ConfigError:
    return ConfigError(f"two tools are named {name!r}, in {first} and in {second}: rename one of them")


def _tools_of(module: ModuleType, adopt: Callable[[object], Tool | None] | None) -> list[Tool]:
    values = vars(module).values()
    found = [value if isinstance(value, Tool) else adopt(value) if adopt else None for value in values]
    return [value for value in found if value is not None]


def _import(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"environment.tools: module {name!r} does not import ({type(error).__name__}: {error}); it must be "
            "installed or on PYTHONPATH"
        ) from error


def _source(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else str(function)


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description, and that of each argument of a Google-style `Args:` section."""
    section = _SECTION.search(text)
    if section is None:
        return text.strip(), {}
    of_arguments: dict[str, str] = {}
    name = ""
    if section[0].strip() in ("Args:", "Arguments:", "Parameters:"):
        for line in text[section.end() :].lstrip("\n").splitlines():
            if _SECTION.match(line) or not line.startswith(" "):
                break
            if found := _ARGUMENT.match(line):
                name = found[1]
                of_arguments[name] = found[2].strip()
            elif name:
                of_arguments[name] += " " + line.strip()
    return text[: section.start()].strip(), of_arguments


def _arguments(
    function: Callable[..., Any], descriptions: Mapping[str, str], where: str
) -> tuple[TypeAdapter[dict[str, Any]], Schema]:
    """A validator of keyword arguments, and their JSON schema."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(
            f"{where}: an annotation cannot be resolved ({error}); import its type in the module"
        ) from error
    fields: dict[str, Any] = {}
    defaults: Schema = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{where}: argument {parameter} cannot be given by name; tools take named arguments only")
        if parameter.name not in hints:
            raise ConfigError(
                f"{where}: argument {parameter.name!r} has no type annotation, e.g. {parameter.name}: str"
            )
        if isinstance(parameter.default, FieldInfo):
            raise ConfigError(
                f"{where}: argument {parameter.name!r} has a pydantic Field as its default; put the Field into the "
                f"annotation, e.g. {parameter.name}: Annotated[int, Field(ge=0)] = 3"
            )
        required = parameter.default is parameter.empty
        hint = hints[parameter.name]
        fields[parameter.name] = Required[hint] if required else NotRequired[hint]
        if not required:
            defaults[parameter.name] = parameter.default
    make_typed_dict: Any = TypedDict
    arguments = make_typed_dict("arguments", fields)
    arguments.__pydantic_config__ = {"extra": "forbid"}
    try:
        adapter: TypeAdapter[dict[str, Any]] = TypeAdapter(arguments)
        schema = adapter.json_schema(schema_generator=_WithoutTitles)
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{where}: an argument's type has no JSON schema ({reason})") from error
    schema.pop("title", None)
    schema.setdefault("properties", {})
    for name, described in schema["properties"].items():
        if name in descriptions:
            described.setdefault("description", descriptions[name])
        if name in defaults:
            described |= _shown_default(defaults[name])
    return adapter, schema


class _WithoutTitles(GenerateJsonSchema):
    """A title that repeats an argument's name only costs tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _shown_default(value: Any) -> Schema:
    try:
        return {"default": to_jsonable_python(value)}
    except PydanticSerializationError:
        return {}


def _validate(adapter: TypeAdapter[dict[str, Any]], arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(adapter.validate_python(dict(arguments)))
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)]
        raise ToolArgumentError("wrong arguments: " + "; ".join(wrong)) from error
