from __future__ import annotations

import random

import pytest

from retriever_server.analysis import STOP_WORDS, EnglishAnalyzer

analyze = EnglishAnalyzer()


@pytest.mark.parametrize(
    "text, terms",
    [
        ("The quick foxes were jumping", ["quick", "fox", "were", "jump"]),
        ("Obama's and OBAMA\u2019S", ["obama", "obama"]),
        ("don't rock'n'roll", ["don't", "rock'n'rol"]),
        ("3.14 1,000 U.S.A. e.g. x_1", ["3.14", "1,000", "u.s.a", "e.g", "x_1"]),
        ("state-of-the-art C++ C# R&D", ["state", "art", "c", "c", "r", "d"]),
        ("naïve café Zürich", ["naïv", "café", "zürich"]),
        ("us is as", ["us"]),
        ("東京 タワー 서울", ["東", "京", "タワー", "서울"]),
        ("relational conditional rational", ["relat", "condit", "ration"]),
        ("technology anthropologie assembly revved", ["technolog", "anthropologi", "assembl", "rev"]),
        (
            "ΟΔΟΣ İzmir A\u266d \U0001f468\u200d\U0001f469",
            ["οδοσ", "izmir", "\u266d", "\U0001f468\u200d\U0001f469"],
        ),
        ('צה"ל "א"ב" א\' ד"', ['צה"ל', 'א"ב', "א'", "ד"]),
        (
            "\U0001f1fa\U0001f1f8\U0001f1eb\U0001f1f7 \U0001f1fa #\ufe0f\u20e3 1\ufe0f\u20e3 # *",
            ["\U0001f1fa\U0001f1f8", "\U0001f1eb\U0001f1f7", "#\ufe0f\u20e3", "1\ufe0f\u20e3"],
        ),
        ("\U0001f0da a\U0001f038b \u2388", ["\U0001f0da", "\U0001f038", "b", "\u2388"]),
        ('"(?!)...\n\t', []),
        ("", []),
    ],
)
def test_terms_are_those_of_lucenes_english_analyzer(text: str, terms: list[str]) -> None:
    assert analyze(text) == terms


def test_the_stop_set_is_lucenes() -> None:
    assert len(STOP_WORDS) == 33
    assert analyze(" ".join(sorted(STOP_WORDS)).upper()) == []


def test_case_and_remembered_terms_change_nothing() -> None:
    text = "Parisian NIGHTS in Parisian nights"
    assert analyze(text) == analyze(text) == EnglishAnalyzer()(text.lower())


def test_an_endless_word_is_cut_into_pieces() -> None:
    assert [len(term) for term in analyze("x" * 600)] == [255, 255, 90]


def test_ascii_is_cut_as_any_other_text() -> None:
    draw = random.Random(0)
    for _ in range(20_000):
        text = "".join(draw.choices("ab19_:.',;\" -#", k=draw.randint(1, 9)))
        assert analyze._ascii_words(text) == analyze._words(text), text


@pytest.mark.parametrize("mark", ["_", "_\u0301", "\u203f"])
def test_a_row_of_joiners_is_passed_over_in_one_go(mark: str) -> None:
    assert analyze(f"é {mark * 16_000}") == ["é"]
