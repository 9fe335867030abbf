"""Lucene's English analysis in Python: the same terms when an index is built and when it is asked.

Standard tokens (Unicode word boundaries, UAX #29), possessive 's removed, lower case, Lucene's stop set, and the
Porter stemmer with its author's two later departures (-logi, -bli), as in Lucene.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import regex
import Stemmer

ANALYZER = "lucene-english-3"
"""Changes whenever `analyze` may give other terms; an index built under another name is refused."""

_STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())

_MEASURE_ABOVE_0 = re.compile("[aeiou][^aeiou]|(?<=[^aeiou])y[^aeiou]")
"""Porter's m > 0: somewhere a vowel is followed by a consonant."""

_OTHER_DOUBLES = {letter * 2 for letter in "chjkqvwx"}
"""Cut to one letter in Lucene but not in Snowball's Porter stemmer: revved."""

_MAX_TOKEN_CHARS = 255
_MAX_CACHED_TERMS = 1_000_000
_POSSESSIVES = ("'s", "'S", "\u2019s", "\u2019S", "\uff07s", "\uff07S")

_OLD_PICTOGRAPHS = (
    "\u2388\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705\u2708-\u2712\u2763-\u2767\U0001f000-\U0001f0ff"
    "\U0001f10d-\U0001f10f\U0001f12f\U0001f16c-\U0001f16f\U0001f1ad-\U0001f1e5\U0001f249-\U0001f53d\U0001f546-\U0001f64f"
    "\U0001f680-\U0001f6ff\U0001f774-\U0001f77f\U0001f7d5-\U0001f7ff\U0001f8ae-\U0001f8ff\U0001f947-\U0001fbef"
    "\U0001fbfa-\U0001fbff"
)
"""Symbols that Unicode no longer calls pictographs and Lucene still does."""


_ASCII_RUN = r"(?:[A-Za-z]+(?:[:.'][A-Za-z]+)*|[0-9]+(?:[,;.'][0-9]+)*)+"
_ASCII_WORD = rf"(?:(?<!_)_++)?{_ASCII_RUN}(?:_+{_ASCII_RUN})*_*"
"""What `_word_pattern` comes to in ASCII, at half the time."""


def _word_pattern() -> str:
    extending = r"[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]*"
    extend = f"{extending}+"
    letter = rf"[\p{{WB=ALetter}}\p{{WB=Hebrew_Letter}}]{extend}"
    digit = rf"\p{{WB=Numeric}}{extend}"
    between_letters = rf"[:\p{{WB=MidLetter}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{extend}"
    between_digits = rf"[\p{{WB=MidNum}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{extend}"
    hebrew = r"\p{WB=Hebrew_Letter}"
    between_hebrew = rf"\"(?<={hebrew}{extending}\"){extend}(?={hebrew})"
    geresh = rf"'(?<={hebrew}{extending}'){extend}"
    letters = rf"(?:{letter})++(?:(?:{between_letters}|{between_hebrew})(?:{letter})++)*+(?:{geresh})?"
    digits = rf"{digit}(?:(?:{between_digits})?{digit})*"
    katakana = rf"(?:\p{{WB=Katakana}}{extend})+"
    joiner = rf"\p{{WB=ExtendNumLet}}{extend}"
    run = rf"(?:{katakana}|(?:{letters}|{digits})+)"
    first_joiner = rf"(?=\p{{WB=ExtendNumLet}})(?<!\p{{WB=ExtendNumLet}}{extending})"  # or a row of them takes n² steps
    word = rf"(?:{first_joiner}(?:{joiner})++)?{run}(?:(?:{joiner})+{run})*(?:{joiner})*"
    ideograph = rf"[\p{{Han}}\p{{Hiragana}}]{extend}"
    south_east_asian = rf"\p{{LB=SA}}+{extend}"
    pictograph = rf"[\p{{Extended_Pictographic}}{_OLD_PICTOGRAPHS}]{extend}"
    emoji = rf"{pictograph}(?:(?<=\u200d){pictograph})*"
    keycap = rf"[#*]\ufe0f?\u20e3{extend}"
    flag = rf"(?:\p{{Regional_Indicator}}{extend}){{2}}"
    no_ascii = rf"(?=[^\x00-\x7f])(?:{ideograph}|{south_east_asian}|{emoji}|{flag})"
    return f"{word}|{no_ascii}|{keycap}"


class EnglishAnalyzer:
    """Turns text into index terms. Not for several threads at once."""

    def __init__(self) -> None:
        self._ascii_words = re.compile(_ASCII_WORD).findall
        self._words = regex.compile(_word_pattern()).findall  # type: ignore[no-untyped-call]
        self._stem: Callable[[str], str] = Stemmer.Stemmer("porter").stemWord
        self._terms: dict[str, str | None] = {}

    def __call__(self, text: str) -> list[str]:
        """The terms of a text, in order, with repetitions; stop words leave none."""
        terms = []
        known = self._terms
        for token in _cut(self._ascii_words(text) if text.isascii() else self._words(text)):
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
        # Java lowers characters one by one: no final sigma, no two letters for one
        token = token.lower() if token.isascii() else "".join([character.lower()[0] for character in token])
        if token in STOP_WORDS:
            return None
        return self._porter(token) if len(token) > 2 else token

    def _porter(self, word: str) -> str:
        stem = self._stem(word)
        if word.endswith("e"):
            return stem
        if stem[-2:] in _OTHER_DOUBLES and word in (stem + "ed", stem + "ing"):
            return stem[:-1]
        if stem.endswith("logi") and _MEASURE_ABOVE_0.search(stem[:-4]):
            return self._stem(stem[:-1])
        if stem.endswith("bli") and _MEASURE_ABOVE_0.search(stem[:-3]):
            return self._stem(stem[:-1] + "e")
        return stem


def _cut(tokens: list[str]) -> list[str]:
    """Tokens above Lucene's limit come in pieces."""
    size = _MAX_TOKEN_CHARS
    if max(map(len, tokens), default=0) <= size:
        return tokens
    return [token[start : start + size] for token in tokens for start in range(0, len(token), size)]
