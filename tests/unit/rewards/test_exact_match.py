from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.rewards.exact_match import em, f1, sub_em
from search_r1.rewards.normalize import normalize_answer


@pytest.mark.parametrize(
    "answer, golden, expected",
    [
        ("The Paris!", ["London", "paris"], (1.0, 1.0, 1.0)),
        ("It is Paris, France", ["Paris"], (0.0, 1.0, 0.4)),
        ("Paris", ["Paris France"], (0.0, 0.0, 2 / 3)),
        ("Paris Paris", ["Paris"], (0.0, 1.0, 2 / 3)),
        ("London", ["Paris"], (0.0, 0.0, 0.0)),
        ("Rome", [], (0.0, 0.0, 0.0)),
        ("Pele\u0301", ["Pelé"], (1.0, 1.0, 1.0)),
        ("北京。", ["北京"], (1.0, 1.0, 1.0)),
    ],
)
def test_scores_by_hand(answer: str, golden: list[str], expected: tuple[float, float, float]) -> None:
    assert (em(answer, golden), sub_em(answer, golden), f1(answer, golden)) == pytest.approx(expected)


@pytest.mark.parametrize("golden", [[""], ["the"], ["…", " "], ["“”"]])
@given(answer=st.text())
def test_a_golden_answer_that_normalises_to_nothing_matches_nothing(golden: list[str], answer: str) -> None:
    assert em(answer, golden) == sub_em(answer, golden) == f1(answer, golden) == 0.0


def test_an_empty_golden_answer_beside_a_real_one_is_ignored() -> None:
    assert em("", ["", "Paris"]) == 0.0
    assert em("Paris", ["", "Paris"]) == 1.0


@given(st.text(), st.lists(st.text(), max_size=4))
def test_exact_match_implies_the_softer_scores(answer: str, golden: list[str]) -> None:
    scores = em(answer, golden), sub_em(answer, golden), f1(answer, golden)
    assert all(0.0 <= score <= 1.0 for score in scores)
    assert scores[0] <= min(scores[1:])


@given(st.text())
def test_an_answer_matches_itself_unless_it_says_nothing(answer: str) -> None:
    assert em(answer, [answer]) == float(normalize_answer(answer) != "")
