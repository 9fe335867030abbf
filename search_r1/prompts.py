"""Named question templates: a bare question becomes the messages of the first prompt."""

from __future__ import annotations

import difflib

from search_r1.errors import ConfigError

Messages = tuple[dict[str, str], ...]

_SEARCH_R1 = (
    "Answer the given question. "
    "You must conduct reasoning inside <think> and </think> first every time you get new information. "
    "After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query </search> "
    "and it will return the top searched results between <information> and </information>. "
    "You can search as many times as your want. "
    "If you find no further external knowledge needed, you can directly provide the answer inside <answer> and "
    "</answer>, without detailed illustrations. For example, <answer> Beijing </answer>. Question: {question}\n"
)

TEMPLATES: dict[str, str] = {
    "search_r1": _SEARCH_R1,
    "short": "Question: {question}\n",
    "bare": "{question}",
}
"""`search_r1` is, to the letter, the text that published checkpoints were trained on; `short` suits tiny models."""


def normalize_question(question: str) -> str:
    """Stripped and ending in a question mark, as every template shows it."""
    question = question.strip()
    return question if question.endswith("?") else question + "?"


def check_template(template: str, also: tuple[str, ...] = ()) -> None:
    """Raises `ConfigError`, with the nearest name, when `template` is neither in `TEMPLATES` nor in `also`."""
    names = (*TEMPLATES, *also)
    if template not in names:
        near = difflib.get_close_matches(template, names, n=1, cutoff=0)[0]
        raise ConfigError(f"there is no prompt template {template!r}; did you mean {near!r}? ({', '.join(names)})")


def prompt_messages(template: str, question: str) -> Messages:
    """The chat messages that ask `question` (one user message).

    Raises:
        ConfigError: no such template.
    """
    check_template(template)
    content = TEMPLATES[template].replace("{question}", normalize_question(question))
    return ({"role": "user", "content": content},)
