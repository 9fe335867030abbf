"""The order in which questions are asked."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise

import pytest

from search_r1.data.questions import QuestionStream
from search_r1.errors import ConfigError, DataError
from tests.fakes import make_question

QUESTIONS = [make_question(f"q{i}?") for i in range(7)]


def texts(stream: QuestionStream, batches: int) -> list[str]:
    return [question.text for question in chain.from_iterable(stream.next_batch() for _ in range(batches))]


@pytest.mark.parametrize("batch_size", [1, 3, 7, 10, 20])
def test_every_question_is_asked_exactly_once_an_epoch_though_batches_cross_its_end(batch_size: int) -> None:
    asked = texts(QuestionStream(QUESTIONS, batch_size, seed=3), batches=14)
    assert len(asked) == 14 * batch_size
    epochs = [asked[start : start + 7] for start in range(0, len(asked) - 6, 7)]
    assert all(Counter(epoch) == Counter(question.text for question in QUESTIONS) for epoch in epochs)


def test_each_epoch_has_its_own_seeded_permutation() -> None:
    asked = texts(QuestionStream(QUESTIONS, 7, seed=0), batches=5)
    epochs = [asked[start : start + 7] for start in range(0, 35, 7)]
    assert all(one != other for one, other in pairwise(epochs))
    assert asked == texts(QuestionStream(QUESTIONS, 7, seed=0), batches=5)
    assert asked != texts(QuestionStream(QUESTIONS, 7, seed=1), batches=5)


def test_without_shuffling_the_order_is_the_files() -> None:
    assert texts(QuestionStream(QUESTIONS, 4, shuffle=False), batches=3) == [f"q{i % 7}?" for i in range(12)]


@pytest.mark.parametrize("batches", range(8))
def test_a_resumed_stream_goes_on_as_if_never_stopped(batches: int) -> None:
    whole = QuestionStream(QUESTIONS, 3, seed=5)
    expected = texts(whole, batches + 6)[3 * batches :]
    stopped = QuestionStream(QUESTIONS, 3, seed=5)
    texts(stopped, batches)
    resumed = QuestionStream(QUESTIONS, 3, seed=5)
    resumed.load_state(stopped.state())
    assert texts(resumed, 6) == expected


def test_a_stream_resumes_under_another_batch_size_at_the_same_question() -> None:
    stopped = QuestionStream(QUESTIONS, 3, seed=5)
    texts(stopped, 3)
    resumed = QuestionStream(QUESTIONS, 2, seed=5)
    resumed.load_state(stopped.state())
    assert texts(resumed, 3) == texts(stopped, 2)


@pytest.mark.parametrize("batch_size, steps", [(1, 7), (3, 3), (7, 1), (10, 1)])
def test_steps_an_epoch_are_rounded_up(batch_size: int, steps: int) -> None:
    assert QuestionStream(QUESTIONS, batch_size).steps_per_epoch == steps


def test_other_files_than_the_checkpoint_saw_are_refused_with_both_numbers() -> None:
    state = QuestionStream(QUESTIONS, 3).state()
    with pytest.raises(DataError, match=r"over 7 training questions.* now hold 6"):
        QuestionStream(QUESTIONS[:6], 3).load_state(state)


def test_no_questions_or_an_empty_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 questions in batches of 3"):
        QuestionStream([], 3)
    with pytest.raises(ConfigError, match="7 questions in batches of 0"):
        QuestionStream(QUESTIONS, 0)
