"""Answer normalisation: SQuAD's rule, made indifferent to how Unicode happens to spell a text."""

from __future__ import annotations

import re
import string
import unicodedata

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LOOKALIKES = str.maketrans("", "", "\u00b4\u02b9\u02bb\u02bc\u02bd\u2212")
"""Apostrophes and the minus sign that Unicode does not class as punctuation, dropped as their ASCII twins are."""


def squad_normalize(text: str) -> str:
    """SQuAD's published rule: lower case, drop ASCII punctuation, drop a/an/the, collapse white space."""
    return _without_articles(text.lower().translate(_ASCII_PUNCTUATION))


def normalize_answer(text: str) -> str:
    """`squad_normalize` for every script; on ASCII text the two are the same.

    Composed and decomposed accents, full-width and half-width forms, and capitals of all scripts become one (NFKC and
    case folding); punctuation of all scripts is dropped (categories P*), and so are invisible format characters (Cf).
    Accents themselves count: "Pelé" is not "Pele".
    """
    if text.isascii():
        return squad_normalize(text)
    text = unicodedata.normalize("NFKC", text.translate(_LOOKALIKES))
    text = unicodedata.normalize("NFKC", text.casefold()).translate(_ASCII_PUNCTUATION)
    kept = "".join(c for c in text if unicodedata.category(c)[0] != "P" and unicodedata.category(c) != "Cf")
    return _without_articles(unicodedata.normalize("NFKC", kept))


def _without_articles(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text).split())
