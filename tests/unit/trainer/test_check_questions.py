from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from search_r1.backends.model import load_causal_lm
from search_r1.config import Config, ModelConfig, RolloutConfig
from search_r1.data.tool_prompts import ToolPrompts, check_tools
from search_r1.errors import ConfigError
from search_r1.trainer.build import check_questions
from tests.chat_templates import chat_tokenizer
from tests.fakes import make_question
from tests.model_factory import tiny_model_dir, tiny_tokenizer
from tests.tool_kit import TOOLS


def config_of(max_start_length: int) -> Config:
    return replace(Config(), rollout=RolloutConfig(max_start_length=max_start_length))


def test_a_prompt_limit_below_every_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.max_start_length=3 is below the length of every prompt"):
        check_questions(config_of(3), tiny_tokenizer(), [make_question("Who wrote it?"), make_question("Who?")])


def test_some_prompts_above_the_limit_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    questions = [make_question("Who?"), make_question("Who? " * 100), make_question("Where?")]
    check_questions(config_of(100), tiny_tokenizer(), questions)
    assert "1 of 3 prompts are longer than rollout.max_start_length=100" in caplog.text


def test_prompts_within_the_limit_need_no_word(caplog: pytest.LogCaptureFixture) -> None:
    check_questions(config_of(2048), tiny_tokenizer(), [make_question()])
    assert not caplog.records


def test_tools_that_no_question_may_call_and_tools_that_are_named_in_vain_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = ToolPrompts(chat_tokenizer("smollm2"), {name: one.schema for name, one in TOOLS.items()})
    adding, failing, any_tool = (replace(make_question(), tools=tools) for tools in (("add",), ("fail", "greet"), None))
    for questions in ([adding, any_tool], [replace(adding, tools=tuple(TOOLS))]):
        check_tools(questions, prompts)
    check_questions(config_of(2048), tiny_tokenizer(), [any_tool, replace(adding, tools=())])
    assert not caplog.records
    check_tools([adding, failing], prompts)
    check_questions(config_of(2048), tiny_tokenizer(), [adding, failing, any_tool])
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in told] == [
        "no question may call repeat",
        "the `tools` column names add, fail, greet, but environment.name=search shows and runs no tools",
    ]


def test_a_great_number_of_questions_is_measured_by_a_sample_over_all_of_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    questions = [make_question("Who?")] * 1500 + [make_question("Who? " * 100)] * 1500
    check_questions(config_of(100), tiny_tokenizer(), questions)
    assert "1000 of 2000 prompts" in caplog.text


def test_weights_that_are_no_weights_are_named(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path)
    (folder / "model.safetensors").write_bytes(b"these are no weights")
    with pytest.raises(ConfigError, match="cannot load a causal language model"):
        load_causal_lm(str(folder), ModelConfig(path=str(folder)))
