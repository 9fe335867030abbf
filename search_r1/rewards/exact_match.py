"""How well an answer agrees with the golden answers. A golden answer that normalises to nothing matches nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from search_r1.rewards.normalize import normalize_answer

TextScore = Callable[[str, Sequence[str]], float]
"""(answer, golden answers) -> score in [0, 1]."""


def em(answer: str, golden_answers: Sequence[str]) -> float:
    """1.0 if the normalised answer equals a normalised golden answer, else 0.0.

    >>> em(" The Beatles! ", ["Beatles"])
    1.0
    """
    return float(normalize_answer(answer) in _normalized(golden_answers))


def sub_em(answer: str, golden_answers: Sequence[str]) -> float:
    """1.0 if a normalised golden answer is a substring of the normalised answer, else 0.0.

    >>> sub_em("It was Paris, France.", ["Paris"])
    1.0
    """
    text = normalize_answer(answer)
    return float(any(golden in text for golden in _normalized(golden_answers)))


def f1(answer: str, golden_answers: Sequence[str]) -> float:
    """Best F1 of the bags of normalised words over the golden answers (arXiv:1606.05250, sec. 6.1).

    >>> f1("Paris France", ["Paris"])
    0.6666666666666666
    """
    words = Counter(normalize_answer(answer).split())
    return max((_bag_f1(words, Counter(golden.split())) for golden in _normalized(golden_answers)), default=0.0)


def _normalized(golden_answers: Sequence[str]) -> set[str]:
    return {normalize_answer(golden) for golden in golden_answers} - {""}


def _bag_f1(words: Counter[str], golden: Counter[str]) -> float:
    return 2 * (words & golden).total() / (words.total() + golden.total())
