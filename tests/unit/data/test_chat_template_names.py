from __future__ import annotations

import re
from pathlib import Path

import pytest

from search_r1.data.chat_templates import choose_chat_template
from search_r1.data.sft_examples import ConversationEncoder
from search_r1.errors import ConfigError
from tests.chat_templates import LLAMA_3_1, QWEN2_5, with_template

TALK = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "abc"}]


def test_a_name_that_fits_leaves_the_tokenizers_own_template() -> None:
    for template, special, name in (
        (QWEN2_5, ("<|im_start|>",), "qwen"),
        (LLAMA_3_1, ("<|start_header_id|>",), "llama3"),
        (QWEN2_5, ("<|im_start|>",), "auto"),
    ):
        tokenizer = with_template(template, special)
        choose_chat_template(tokenizer, name)
        assert tokenizer.chat_template == template


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", "<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\nabc<|im_end|>"),
        (
            "llama3",
            "<|start_header_id|>user<|end_header_id|>\n\nwho?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nabc<|eot_id|>",
        ),
        ("empty", "who?abc<|im_end|>"),
    ],
)
def test_a_base_model_gets_the_named_template(name: str, expected: str) -> None:
    special = ("<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    tokenizer = with_template("", special)
    choose_chat_template(tokenizer, name)
    example = ConversationEncoder(tokenizer)(TALK)
    assert tokenizer.decode(example.token_ids) == expected
    assert example.loss_mask[-1]


@pytest.mark.parametrize(
    ("template", "name", "says"),
    [
        (QWEN2_5, "qwenn", "there is no chat template 'qwenn', did you mean 'qwen'"),
        (QWEN2_5, "llama3", r"marks turns by <\|start_header_id\|>, which the tokenizer of the model never writes"),
        ("", "gemma", "take the model's chat variant, or `empty`"),
        ("", "llama3", "cannot be supplied for its vocabulary"),
    ],
)
def test_a_name_that_does_not_fit_is_refused_with_a_remedy(template: str, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        choose_chat_template(with_template(template), name)


def test_the_page_names_every_chat_template_that_is_known() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_chat_template(with_template(QWEN2_5), "default")
    page = (Path(__file__).resolve().parents[3] / "docs" / "sft.md").read_text(encoding="utf-8")
    listed = page.partition("**`data.chat_template`**")[2].partition("A name must fit")[0]
    known = str(caught.value).partition("(there are ")[2].rstrip(")").split(", ")
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(known)
