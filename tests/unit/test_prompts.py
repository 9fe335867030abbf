from __future__ import annotations

import pytest

from search_r1.errors import ConfigError
from search_r1.prompts import TEMPLATES, prompt_messages
from tests.shared_data import shared_data


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_search_r1_prompt_is_the_published_one_to_the_letter(split: str) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    table = pq.read_table(shared_data(f"minibench/{split}.parquet"), columns=["question", "prompt"])
    for row in table.to_pylist():
        assert list(prompt_messages("search_r1", row["question"])) == row["prompt"]


@pytest.mark.parametrize("question", ["who wrote it", "  who wrote it?\n", "who wrote it?"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_question_is_stripped_and_ends_in_one_question_mark(template: str, question: str) -> None:
    (message,) = prompt_messages(template, question)
    assert message["role"] == "user"
    assert message["content"].rstrip("\n").endswith("who wrote it?")


def test_braces_in_a_question_stay_as_they_are() -> None:
    (message,) = prompt_messages("short", "what is {question} in {0}?")
    assert message["content"] == "Question: what is {question} in {0}?\n"


def test_an_unknown_template_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="'serach_r1'; did you mean 'search_r1'"):
        prompt_messages("serach_r1", "who?")
