"""A run improves itself: its rollouts, filtered, are the demonstrations of the next fine-tuning, token by token."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from data_prep import traces
from search_r1.config import EnvironmentConfig, RolloutConfig
from search_r1.data.sft_examples import read_examples
from search_r1.data.templates import PromptEncoder, encode_plain
from search_r1.environments.search import SearchEnvironment
from search_r1.prompts import prompt_messages
from search_r1.protocols import Weights
from search_r1.rollout.manager import LLMGenerationManager
from search_r1.rollout.records import trajectory_record
from search_r1.sft_config import SFTDataConfig
from search_r1.types import Completion, Prompt, Question, SamplingConfig, Trajectory
from tests.chat_templates import chat_tokenizer
from tests.fakes import FakeRetriever
from tests.model_factory import tiny_tokenizer
from tests.tool_kit import call, make_environment, play

TURNS = {
    "who wrote abc?": [
        "<think> Look. </think>\n<search> abc </search>",
        "<search> xyz </search>",
        "<answer> Ann </answer>",
    ],
    "who wrote xyz?": ["<search> xyz </search>", "<think> No. </think> <answer> B </answer>"],
    "who wrote q?": ["<think> I know. </think> <answer> C </answer>"],
}
GOLDEN = {"who wrote abc?": "the ann", "who wrote xyz?": "not B", "who wrote q?": "C"}


class TurnsEngine:
    """Plays the turns of each question, as canonical tokens of the tiny tokenizer."""

    def generate(
        self, contexts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        found = []
        for context in contexts:
            text = tiny_tokenizer().decode(context)
            turns = next(turns for question, turns in TURNS.items() if question in text)
            said = turns[text.count("</information>") - text.count("between <information> and </information>")]
            ids = tuple(encode_plain(tiny_tokenizer(), said))
            found.append(Completion(ids, (0.0,) * len(ids), said, "stop"))
        return found

    def load_weights(self, weights: Weights) -> None:
        """Its weights are the script."""

    def close(self) -> None:
        """Nothing is open."""


def write_rollouts(file: Path, trajectories: Sequence[Trajectory]) -> str:
    records = [trajectory_record(trajectory, {"reward": 1.0}, step=1) for trajectory in trajectories]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def test_rollouts_that_are_right_become_their_own_demonstrations(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    encode = partial(encode_plain, tokenizer)
    environment = SearchEnvironment(FakeRetriever(), encode, tokenizer.decode, EnvironmentConfig(), 200)
    manager = LLMGenerationManager(TurnsEngine(), environment, RolloutConfig(max_turns=3, schedule="lockstep"))
    prompts = []
    for number, (text, golden) in enumerate(GOLDEN.items()):
        question = Question(f"nq/{number}", "nq", text, prompt_messages("search_r1", text), (golden,))
        prompts.append(Prompt(question, number, PromptEncoder(tokenizer)(question.prompt_messages)))
    trajectories = manager.run_llm_loop(prompts, SamplingConfig(200))
    manager.close()
    file, rows = write_rollouts(tmp_path / "step_000001.jsonl", trajectories), tmp_path / "sft.parquet"
    assert traces.main(["--input", file, "--output", str(rows)]) == 0
    (example,) = read_examples(SFTDataConfig(), [str(rows)], tokenizer)
    assert list(example.token_ids) == trajectories[0].context_ids
    assert list(example.loss_mask) == [False] * len(prompts[0].token_ids) + trajectories[0].loss_mask


@pytest.mark.parametrize("layout", ["qwen2.5", "smollm2", "no-system"])
@pytest.mark.parametrize("last", [r"It is \boxed{Paris}", "<answer> Paris </answer>"])
def test_tool_rollouts_become_their_own_demonstrations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str, last: str
) -> None:
    add, two = call("add", a=2), f"Let me see.\n{call('add', a=2)}{call('greet', name='é')}"
    texts = [(two, last), (call("fail", message="x"), last), (add, r"\boxed{Rome}"), (add, "I give up")]
    good, *bad = [play(make_environment(layout=layout), *turns, layout=layout) for turns in texts]
    file = write_rollouts(tmp_path / "step_000001.jsonl", [good, *bad, good])
    rows = tmp_path / "sft.parquet"
    assert traces.main(["--input", file, "--output", str(rows)]) == 2
    assert "name their modules with --tools" in capsys.readouterr().err
    assert traces.main(["--input", file, "--output", str(rows), "--tools", "tests.tool_kit"]) == 0
    assert re.search(r"failed call\W+1 ", capsys.readouterr().err)
    (example,) = read_examples(SFTDataConfig(max_length=4000), [str(rows)], chat_tokenizer(layout))
    assert list(example.token_ids) == good.context_ids
    assert list(example.loss_mask) == [False] * len(good.prompt.token_ids) + good.loss_mask
