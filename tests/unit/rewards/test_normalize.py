from __future__ import annotations

import re
import string
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.rewards.normalize import normalize_answer


def squad_oracle(text: str) -> str:
    """SQuAD's rule, step by step."""
    kept = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


@given(st.text(st.characters(max_codepoint=127)))
def test_ascii_behaves_exactly_as_squad(text: str) -> None:
    assert normalize_answer(text) == squad_oracle(text)


@given(st.text(st.characters(max_codepoint=127)))
def test_ascii_beside_other_scripts_behaves_as_squad_too(text: str) -> None:
    assert normalize_answer(text + " 東京") == (squad_oracle(text) + " 東京").strip()


@given(st.text())
def test_composed_and_decomposed_spellings_are_one(text: str) -> None:
    composed, decomposed = (unicodedata.normalize(form, text) for form in ("NFC", "NFD"))
    assert normalize_answer(composed) == normalize_answer(decomposed)


@given(st.text())
def test_normalising_twice_changes_nothing(text: str) -> None:
    once = normalize_answer(text)
    assert normalize_answer(once) == once


@pytest.mark.parametrize(
    "written, plain",
    [
        ("The  Beatles!", "beatles"),
        ("a U.S. state", "us state"),
        ("Pele\u0301", "pelé"),
        ("Pele-\u0301", "pelé"),
        ("“O’Brien”", '"O\'Brien"'),
        ("O´Brien", "O'Brien"),
        ("Hawaiʻi", "Hawai'i"),
        ("Ｂｅｉｊｉｎｇ　２００８", "Beijing 2008"),
        ("《红楼梦》。", "红楼梦"),
        ("「東京・大阪」、", "東京大阪"),
        ("1990–91", "1990-91"),
        ("−5", "-5"),
        ("one\u00a0two\u2028three", "one two three"),
        ("zero\u200bwidth\ufeff", "zerowidth"),
        ("STRASSE", "Straße"),
        ("ΟΔΟΣ", "οδός".replace("ό", "ο")),
        ("ﬁnal", "final"),
        ("the “Theory” of an A…", "theory of"),
    ],
)
def test_ways_to_write_one_answer(written: str, plain: str) -> None:
    assert normalize_answer(written) == normalize_answer(plain)


@pytest.mark.parametrize("one, other", [("Pelé", "Pele"), ("naïve", "naive"), ("c", "d"), ("5 €", "5 £")])
def test_different_answers_stay_different(one: str, other: str) -> None:
    assert normalize_answer(one) != normalize_answer(other)


@pytest.mark.parametrize("text", ["", "  ", "the", "A!", "…", "。、", "“ ”", "\u200b"])
def test_texts_without_content_normalise_to_nothing(text: str) -> None:
    assert normalize_answer(text) == ""
