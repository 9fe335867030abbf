from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from search_r1.rewards.format import block_names, is_valid_format
from search_r1.types import Action, Observation, Trajectory, Turn
from tests.fakes import make_completion, make_prompt, make_trajectory

INFORMATION = "\n\n<information>Doc 1(Title: T) text\n</information>\n\n"
CORRECTION = "\n\nThat was no valid action.\n\n"


def trajectory(*texts: str) -> Trajectory:
    """Completions and, at every odd place, observations."""
    turns = []
    for text, observed in zip(texts[::2], [*texts[1::2], None], strict=False):
        observation = None if observed is None else Observation(observed, ())
        turns.append(Turn(make_completion(text), Action("invalid"), observation))
    return make_trajectory(turns)


THINK, SEARCH, ANSWER = "<think>hm</think>", "<search>q</search>", "<answer>a</answer>"


@pytest.mark.parametrize(
    "texts",
    [
        (THINK + ANSWER,),
        (f"{THINK}\n{SEARCH}", INFORMATION, f"\n{THINK} {ANSWER}\n"),
        (THINK + SEARCH, INFORMATION, THINK + SEARCH, INFORMATION, THINK + ANSWER),
        ("<think></think>" + SEARCH, INFORMATION, THINK + "<answer></answer>"),
        ("<think>" + "x < y, <b>bold</b>, <Search>no tag</Search>\n" * 500 + "</think>" + ANSWER,),
        (THINK + SEARCH, "<information>a stray </answer> <think> in a passage</information>", THINK + ANSWER),
    ],
)
def test_valid_sequences(texts: tuple[str, ...]) -> None:
    assert is_valid_format(trajectory(*texts))


@pytest.mark.parametrize(
    "texts",
    [
        (),
        ("",),
        (ANSWER,),
        (SEARCH, INFORMATION, THINK + ANSWER),
        (THINK + SEARCH, INFORMATION, ANSWER),
        (THINK + SEARCH, INFORMATION, "so " + THINK + ANSWER),
        (THINK + SEARCH, INFORMATION, THINK + ANSWER + " and more"),
        (THINK + SEARCH, CORRECTION, THINK + ANSWER),
        (THINK + SEARCH, INFORMATION, THINK + SEARCH),
        (THINK + SEARCH, INFORMATION),
        (THINK + THINK + ANSWER,),
        (f"<think>a {SEARCH}</think>{ANSWER}",),
        (f"<think>a {ANSWER}",),
        (THINK + "</think>" + ANSWER,),
        (THINK + "<answer>a",),
        (THINK + "<answer>a</search>",),
        (THINK + "<search>" + ANSWER,),
        (THINK + SEARCH + INFORMATION + THINK + ANSWER,),
        (THINK + '<answer lang="en">a</answer>',),
        (THINK + "<Answer>a</Answer>",),
        (THINK + ANSWER + "<|im_end|>",),
    ],
)
def test_invalid_sequences(texts: tuple[str, ...]) -> None:
    assert not is_valid_format(trajectory(*texts))


def test_every_short_sequence_of_blocks_is_judged_as_the_grammar_says() -> None:
    """Brute force against the set of sequences that the grammar generates."""
    grammar = {("think", *("search", "think") * n, "answer") for n in range(4)}
    written = {"think": THINK, "search": SEARCH, "answer": ANSWER}
    for length in range(1, 7):
        for names in product(written, repeat=length):
            parts: list[str] = [""]
            for name in names:
                parts[-1] += written[name]
                if name == "search":
                    parts += [INFORMATION, ""]
            assert is_valid_format(trajectory(*parts)) == (names in grammar), names


def test_validity_does_not_depend_on_the_chat_template_or_the_prompt() -> None:
    valid = trajectory(THINK + SEARCH, INFORMATION, THINK + ANSWER)
    for text in ("<|im_start|>assistant\n", "<think> example </think><answer> Beijing </answer>", "[INST] q [/INST]"):
        valid.prompt = replace(make_prompt(text), token_ids=())
        assert is_valid_format(valid)


def test_block_names_need_closed_and_unnested_tags() -> None:
    assert block_names(f" {THINK} \n{SEARCH}") == ["think", "search"]
    assert block_names(" \n") == []
    assert block_names("</think>") is None
    assert block_names("<think><think>a</think></think>") is None
    assert block_names(INFORMATION) is None
