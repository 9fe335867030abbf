"""What is learned from real rollouts, character by character, under several tokenizers."""

from __future__ import annotations

import re
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from search_r1.backends.tokenizer import load_tokenizer
from search_r1.data.sft_examples import ConversationEncoder, SFTExample
from search_r1.prompts import prompt_messages
from tests.chat_templates import chat_tokenizer
from tests.shared_data import json_lines

BUNDLED = Path(__file__).resolve().parents[3] / "examples/quickstart/model"
BLOCK = re.compile(r"<(think|search|answer)>.*?</\1>", re.DOTALL)


@cache
def tokenizer(name: str) -> Any:
    return load_tokenizer(str(BUNDLED)) if name == "bundled" else chat_tokenizer(name)


def own_parts(text: str) -> list[str]:
    """A slow walk over a response: what stands outside its information blocks and the line breaks around them."""
    parts, position = [], 0
    while (start := text.find("<information>", position)) >= 0:
        end = text.find("</information>", start)
        if end < 0:
            break
        parts.append(text[position:start].rstrip("\n"))
        position = end + len("</information>")
        while text[position : position + 1] == "\n":
            position += 1
    return [part for part in [*parts, text[position:]] if part]


def learned_parts(example: SFTExample, name: str) -> list[str]:
    runs = groupby(zip(example.token_ids, example.loss_mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer(name).decode([token for token, _ in run]) for learned, run in runs if learned]


@pytest.mark.parametrize("name", ["bundled", "qwen3", "llama-3.1"])
@pytest.mark.parametrize("file", ["wellformed", "malformed"])
def test_every_character_of_the_policy_is_learned_and_none_of_an_information_block(name: str, file: str) -> None:
    encode = ConversationEncoder(tokenizer(name))
    blocks = 0
    for row in json_lines(f"traces/{file}.jsonl"):
        response = row["response"].strip()
        example = encode([*prompt_messages("search_r1", row["question"]), {"role": "assistant", "content": response}])
        learned, expected = learned_parts(example, name), own_parts(response)
        if not response.endswith("</answer>"):
            assert len(learned[-1]) > len(expected[-1]) or len(learned) > len(expected), "its end is learned too"
            learned[len(expected) - 1 :] = ["".join(learned[len(expected) - 1 :])[: len(expected[-1])]]
        assert learned == expected
        for block in BLOCK.finditer(re.sub(r"\n*<information>.*?</information>\n*", "", response, flags=re.DOTALL)):
            assert block[0] in "".join(learned)
            blocks += 1
    assert blocks > 100
