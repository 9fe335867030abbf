from __future__ import annotations

from search_r1.config import Config, EnvironmentConfig, RolloutConfig
from search_r1.environments.search import SearchEnvironment
from search_r1.rollout.manager import LLMGenerationManager
from search_r1.trainer.validation import summarize, validate
from tests.fakes import FakeRetriever, FunctionEngine, decode, encode, make_question
from tests.tool_kit import call, make_environment, play


def test_validation_tells_how_the_trajectories_of_each_data_source_ended() -> None:
    config = Config(rollout=RolloutConfig(max_turns=0))
    engine = FunctionEngine(lambda context, seed: "<answer>Paris</answer>" if "known" in context else "hm")
    environment = SearchEnvironment(FakeRetriever(), encode, decode, EnvironmentConfig(), 200)
    manager = LLMGenerationManager(engine, environment, config.rollout)
    questions = [make_question("known", data_source="nq"), make_question("known too", data_source="hotpotqa")]
    questions.append(make_question("lost", data_source="hotpotqa"))
    metrics = validate(manager, questions, lambda question: tuple(encode(question.text)), config).metrics
    ended = {name: value for name, value in metrics.items() if "answered" in name or "out_of_turns" in name}
    assert ended == {
        "val/status/answered": 2 / 3,
        "val/status/out_of_turns": 1 / 3,
        "val/nq/status/answered": 1.0,
        "val/nq/status/out_of_turns": 0.0,
        "val/hotpotqa/status/answered": 0.5,
        "val/hotpotqa/status/out_of_turns": 0.5,
    }
    assert metrics["val/hotpotqa/em"] == 0.5


def test_the_summary_counts_the_calls_of_each_tool() -> None:
    calls = call("add", a=1) + call("add", a=2) + call("greet", name="Ann")
    summary = summarize([play(make_environment(), calls, "\\boxed{Paris}")])
    assert (summary["tools/add/calls"], summary["tools/greet/calls"], summary["em"]) == (2.0, 1.0, 1.0)
