"""Reading an action out of the text of one turn."""

from __future__ import annotations

import re

from search_r1.types import Action

_TAG = re.compile(r"<(/?)(think|search|answer)>")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")


def parse_search_action(text: str) -> Action:
    """The action of a turn: its earliest closed `<search>` or `<answer>` block, else `invalid`.

    "Earliest closed" means the block whose closing tag comes first, which is where the engine stops; its content
    begins after the nearest opening tag of the same name. Blocks inside a closed `<think>…</think>` do not count; an
    unclosed `<think>` and a stray closing tag hide nothing. Tags are exact: no attributes, no capitals. A blank query
    is invalid; a blank answer is an answer (it scores nothing). One pass over the text.

    >>> parse_search_action("<think>a <search>b</search></think> <search> capital of France </search>")
    Action(kind='search', content='capital of France')
    """
    last_thought_end = text.rfind("</think>")
    thinking = False
    opened: dict[str, int] = {}
    for tag in _TAG.finditer(text):
        closing, name = bool(tag[1]), tag[2]
        if name == "think":
            thinking = not closing and tag.start() < last_thought_end
        elif thinking:
            continue
        elif not closing:
            opened[name] = tag.end()
        elif name in opened:
            return _action(name, text[opened[name] : tag.start()])
    return Action("invalid")


def _action(name: str, content: str) -> Action:
    if name == "answer":
        return Action("answer", content.strip())
    return Action("search", content.strip()) if clean_query(content) else Action("invalid")


def clean_query(text: str) -> str:
    """The query as one line: control characters, line separators and lone surrogates become spaces."""
    return _UNPRINTABLE.sub(" ", text).strip()
