"""First prompts that tell the model which tools its question allows."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from search_r1.data.templates import PromptEncoder, Tokenizer
from search_r1.errors import ConfigError, DataError
from search_r1.prompts import with_tool_prompt
from search_r1.types import Question

logger = logging.getLogger(__name__)
_PROBE = {
    "type": "function",
    "function": {"name": "probe_of_tools", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
_CALL_FORM = ("<tool_call>", '"name"', '"arguments"')
"""What a template says that asks for calls as `rollout.tool_calls` reads them."""


class ToolPrompts:
    """Token ids of a question's prompt: its schemas go through the chat template's own `tools` argument.

    A template without one, or which asks for calls in another form than `<tool_call>` with name and arguments, gets
    `prompts.TOOL_PROMPT` in the system message, or in the user message where it takes no system message.
    """

    def __init__(self, tokenizer: Tokenizer, schemas: Mapping[str, Mapping[str, Any]], opening: str = "") -> None:
        """`schemas` by name, in OpenAI's form; `opening` follows the assistant header."""
        self._tokenizer = tokenizer
        self._schemas = dict(schemas)
        self._opening = opening
        self._plain = PromptEncoder(tokenizer, opening)
        self._encoders: dict[tuple[str, ...], PromptEncoder] = {}
        self._native = _takes_tools(tokenizer)
        self._role = "system" if self._native or _takes_system(tokenizer) else "user"

    def __call__(self, question: Question) -> tuple[int, ...]:
        """Token ids of the prompt.

        Raises:
            DataError: the question names a tool that is not registered.
            ConfigError: the chat template cannot render the tools or the messages.
        """
        try:
            return self.encode(question.prompt_messages, self.allowed(question))
        except DataError:
            raise
        except ConfigError as error:
            raise ConfigError(f"question {question.question_id}: {error}") from error

    def encode(self, messages: Sequence[Mapping[str, str]], names: Sequence[str]) -> tuple[int, ...]:
        """Token ids of a prompt with these registered tools.

        Raises:
            ConfigError: the chat template cannot render them.
        """
        if not names:
            return self._plain(messages)
        try:
            if self._native:
                return self._encoder(tuple(names))(messages)
            schemas = [self._schemas[name] for name in names]
            return self._plain(with_tool_prompt(messages, schemas, self._role))
        except (ConfigError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"the chat template of model.path cannot render its prompt with the tools {', '.join(names)} "
                f"({error}); simplify their argument types or take another template"
            ) from error

    def allowed(self, question: Question) -> tuple[str, ...]:
        """Names of the tools that the question may call: its own list, or all."""
        if question.tools is None:
            return tuple(self._schemas)
        for name in question.tools:
            if name not in self._schemas:
                near = difflib.get_close_matches(name, self._schemas, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise DataError(
                    f"question {question.question_id}: its tools column names {name!r}, which is not registered: "
                    f"{hint}There are {', '.join(self._schemas) or 'none'} (environment.tools)"
                )
        return question.tools

    def _encoder(self, names: tuple[str, ...]) -> PromptEncoder:
        if names not in self._encoders:
            tools = [self._schemas[name] for name in names]
            self._encoders[names] = PromptEncoder(self._tokenizer, self._opening, tools=tools)
        return self._encoders[names]


def check_tools(questions: Sequence[Question], encode_prompt: Callable[[Question], Sequence[int]]) -> None:
    """Make one prompt of every list of tools, and warn of tools that are named in vain, or by no question.

    Raises:
        ConfigError, DataError: see `ToolPrompts`.
    """
    by_tools = {question.tools: question for question in questions}
    if isinstance(encode_prompt, ToolPrompts):
        named = {name for question in by_tools.values() for name in encode_prompt.allowed(question)}
        for question in by_tools.values():
            encode_prompt(question)
        if hidden := [name for name in encode_prompt._schemas if name not in named]:
            logger.warning(
                "no question may call %s: name it in the `tools` column, or drop the column to allow every tool",
                " or ".join(hidden),
            )
    elif named := {name for tools in by_tools for name in tools or ()}:
        logger.warning(
            "the `tools` column names %s, but environment.name=search shows and runs no tools: a model of tool calls "
            "needs environment=tools, and the settings it was trained with (experiment=tools has the example's)",
            ", ".join(sorted(named)),
        )


def _takes_tools(tokenizer: Tokenizer) -> bool:
    from jinja2 import TemplateError

    messages = [{"role": "user", "content": "q"}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, tools=[_PROBE])
    except (TemplateError, TypeError):
        return False
    return all(part in str(text) for part in ("probe_of_tools", *_CALL_FORM))


def _takes_system(tokenizer: Tokenizer) -> bool:
    from jinja2 import TemplateError

    messages = [{"role": "system", "content": "probe_of_system"}, {"role": "user", "content": "q"}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError:
        return False
    return "probe_of_system" in str(text)
