"""Retrieved passages as the text of an observation, within its token limit and harmless to the tag protocol."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

from search_r1.types import Passage

Encode = Callable[[str], list[int]]
"""Text to token ids, without added tokens and with special tokens inactive."""
Decode = Callable[[Sequence[int]], str]
Assemble = Callable[[Sequence[str]], tuple[str, list[int]]]
"""Parts to a whole text and its token ids."""

NO_PASSAGES = "No passages were found."
_FRAME = ("\n\n<information>", "</information>\n\n")
_TAG_START = re.compile(r"<(?=/?(?:think|search|answer|information|tool_call|tool_response)>)")


class FittedText(NamedTuple):
    text: str
    token_ids: tuple[int, ...]
    """`text` encoded."""
    truncated: bool


def render_passages(passages: Sequence[Passage], encode: Encode, decode: Decode, max_tokens: int) -> FittedText:
    """Passages as numbered lines inside `<information>` tags, at most `max_tokens` tokens with the tags.

    Where they do not fit, each passage keeps a prefix: short ones are untouched, the longer ones share what is left.
    Tags of the protocol inside a title or a text lose their `<`, so that they are never read as actions or scored.
    """
    lines = [passage_line(rank, passage) for rank, passage in enumerate(passages, start=1)]
    return fit_lines(lines or [NO_PASSAGES], _FRAME, encode, decode, max_tokens)


def passage_line(rank: int, passage: Passage) -> str:
    return escape_tags(f"Doc {rank}(Title: {passage.title.strip()}) {passage.text.strip()}").rstrip()


def escape_tags(text: str) -> str:
    """Replace the `<` of protocol tags by `&lt;`; every other character stays.

    >>> escape_tags("a<br>b</information>")
    'a<br>b&lt;/information>'
    """
    return _TAG_START.sub("&lt;", text)


def fit_lines(
    lines: Sequence[str], frame: tuple[str, str], encode: Encode, decode: Decode, max_tokens: int
) -> FittedText:
    """Lines joined inside a frame, each cut to its fair share of tokens where the whole is longer than `max_tokens`.

    Raises:
        ValueError: the frame alone is longer than `max_tokens`.
    """

    def assemble(kept: Sequence[str]) -> tuple[str, list[int]]:
        text = frame[0] + "\n".join(line for line in kept if line) + frame[1]
        return text, encode(text)

    return fit_parts(lines, assemble, encode, decode, max_tokens)


def fit_parts(
    parts: Sequence[str], assemble: Assemble, encode: Encode, decode: Decode, max_tokens: int, mark: str = ""
) -> FittedText:
    """Parts put together by `assemble`, each cut to its fair share of tokens where the whole is longer than
    `max_tokens`; `mark` stands where something was cut off.

    Raises:
        ValueError: what `assemble` puts around empty parts is longer than `max_tokens`.
    """
    text, token_ids = assemble(parts)
    if len(token_ids) <= max_tokens:
        return FittedText(text, tuple(token_ids), truncated=False)
    encoded_parts = [encode(part) for part in parts]
    lengths = [len(encoded) for encoded in encoded_parts]
    budget = sum(lengths) - (len(token_ids) - max_tokens)
    while True:  # tokens may merge otherwise in the whole text than in the parts, so its length is what decides
        shares = fair_shares(lengths, max(budget, 0))
        kept = [
            part if share == len(encoded) else _prefix(part, decode(encoded[:share])) + mark
            for part, encoded, share in zip(parts, encoded_parts, shares, strict=True)
        ]
        text, token_ids = assemble(kept)
        if len(token_ids) <= max_tokens:
            return FittedText(text, tuple(token_ids), truncated=True)
        if budget <= 0:
            raise ValueError(f"a limit of {max_tokens} tokens has no room for {text!r}")
        budget -= len(token_ids) - max_tokens


def _prefix(line: str, decoded: str) -> str:
    """The part of `decoded` that really begins `line`: a character cut in the middle of its bytes is dropped."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(line, decoded, strict=False))
    return "".join(char for char, _ in same).rstrip()


def fair_shares(lengths: Sequence[int], budget: int) -> list[int]:
    """Divide a budget: whoever needs no more than an equal share gets all it needs, the others divide the rest.

    What does not divide goes to the first ones.

    >>> fair_shares([2, 9, 9], 13)
    [2, 6, 5]
    """
    shares = list(lengths)
    waiting = sorted(range(len(lengths)), key=lambda index: lengths[index])
    while waiting and lengths[waiting[0]] * len(waiting) <= budget:
        budget -= lengths[waiting.pop(0)]
    for position, index in enumerate(sorted(waiting)):
        shares[index] = budget // len(waiting) + (position < budget % len(waiting))
    return shares
