"""Lucene's English analysis in Python: the same terms when an index is built and when it is asked.

Standard tokens (Unicode word boundaries, UAX #29), possessive 's removed, lower case, Lucene's stop set, and the
original Porter stemmer.
"""

from __future__ import annotations

import regex
import Stemmer

ANALYZER = "lucene-english-1"
"""Changes whenever `analyze` may give other terms; an index built under another name is refused."""

_STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())

_MAX_TOKEN_CHARS = 255
_MAX_CACHED_TERMS = 1_000_000
_POSSESSIVES = ("'s", "'S", "\u2019s", "\u2019S", "\uff07s", "\uff07S")


def _word_pattern() -> str:
    extend = r"[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]*+"
    letter = rf"[\p{{WB=ALetter}}\p{{WB=Hebrew_Letter}}]{extend}"
    digit = rf"\p{{WB=Numeric}}{extend}"
    between_letters = rf"[:\p{{WB=MidLetter}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{extend}"
    between_digits = rf"[\p{{WB=MidNum}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{extend}"
    letters = rf"{letter}(?:(?:{between_letters})?{letter})*"
    digits = rf"{digit}(?:(?:{between_digits})?{digit})*"
    katakana = rf"(?:\p{{WB=Katakana}}{extend})+"
    joiner = rf"\p{{WB=ExtendNumLet}}{extend}"
    run = rf"(?:{katakana}|(?:{letters}|{digits})+)"
    word = rf"(?:{joiner})*{run}(?:(?:{joiner})+{run})*(?:{joiner})*"
    ideograph = rf"[\p{{Han}}\p{{Hiragana}}]{extend}"
    south_east_asian = rf"\p{{LB=SA}}+{extend}"
    emoji = rf"\p{{Extended_Pictographic}}{extend}"
    return f"{word}|{ideograph}|{south_east_asian}|{emoji}"


class EnglishAnalyzer:
    """Turns text into index terms. Not for several threads at once."""

    def __init__(self) -> None:
        self._words = regex.compile(_word_pattern()).findall  # type: ignore[no-untyped-call]
        self._stem = Stemmer.Stemmer("porter").stemWord
        self._terms: dict[str, str | None] = {}

    def __call__(self, text: str) -> list[str]:
        """The terms of a text, in order, with repetitions; stop words leave none."""
        terms = []
        known = self._terms
        for token in self._words(text):
            term = known[token] if token in known else self._remember(token)
            if term is not None:
                terms.append(term)
        return terms

    def _remember(self, token: str) -> str | None:
        if len(self._terms) >= _MAX_CACHED_TERMS:
            self._terms.clear()
        term = self._terms[token] = self._term(token)
        return term

    def _term(self, token: str) -> str | None:
        if token.endswith(_POSSESSIVES):
            token = token[:-2]
        token = token[:_MAX_TOKEN_CHARS].lower()
        if token in STOP_WORDS:
            return None
        return self._stem(token) if len(token) > 2 else token
