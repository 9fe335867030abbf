from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_r1.environments.passages import escape_tags
from search_r1.environments.tool_registry import tool
from search_r1.environments.tools import CUT_MARK
from search_r1.errors import ConfigError, ToolUnavailableError
from search_r1.rollout.manager import LLMGenerationManager
from search_r1.types import Action, Completion, SamplingConfig, Status
from tests.chat_templates import chat_tokenizer
from tests.tool_kit import ROLLOUT, ChatEngine, answer, call, make_environment, make_tool_prompt, play

TOKENIZER = chat_tokenizer("smollm2")
END, START = "<|im_end|>", "<|im_start|>"
BAD = "<tool_call>{bad</tool_call>"


def completion(text: str) -> Completion:
    """`text` as sampled; END and START in it are the special tokens."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return Completion(tuple(ids), (0.0,) * len(ids), text, "stop")


def responses(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Call and JSON of each tool response of an observation."""
    found = []
    for part in text.split("<tool_response>")[1:]:
        named, _, result = part.partition("</tool_response>")[0].strip().rpartition("\n")
        found.append((named, json.loads(result)))
    return found


@pytest.mark.parametrize(
    "text, expected",
    [
        (call("add", a=1) + END, Action("tool_call", call("add", a=1))),
        (call("add", a=1), Action("tool_call", call("add", a=1), cut=True)),
        (f"{call('add', a=1)} and \\boxed{{3}}{END}", Action("tool_call", call("add", a=1))),
        (BAD + END, Action("invalid", BAD)),
        (f"{BAD}{call('add')}{END}", Action("tool_call", f"{BAD}\n{call('add')}")),
        (f'<tool_call>{{"name": "ad{END}', Action("invalid", '<tool_call>{"name": "ad')),
        ('<tool_call>{"name": "ad', Action("invalid", '<tool_call>{"name": "ad', cut=True)),
        (f"It is \\boxed{{3}}{END}", Action("final", "3")),
        ("It is <answer> Paris </answer>", Action("final", "Paris")),
        (f"<think>\\boxed{{3}}</think> I do not know{END}", Action("end")),
        (f"<think>{call('add')}</think><answer>x</answer>{END}", Action("final", "x")),
        ("", Action("end")),
        (f"{call('add', a=1)}{END}\n{START}user\nhi", Action("end")),
        (f"<answer>x</answer>{START}user <answer>y</answer>", Action("final", "x")),
    ],
)  # fmt: skip
def test_a_turn_is_its_calls_or_its_answer_or_the_end(text: str, expected: Action) -> None:
    assert make_environment().parse(completion(text)) == expected


def test_the_answer_pattern_is_configurable() -> None:
    turn = completion("<answer>a</answer> \\boxed{b}")
    patterns = ("any", "answer", "boxed")
    assert [make_environment(answer_pattern=p).parse(turn).content for p in patterns] == ["b", "a", "b"]


def test_all_calls_of_a_turn_are_answered_in_order_in_one_user_message() -> None:
    calls = [call("add", a=2), call("nope"), BAD, call("fail", message="boom"), call("add", b=2)]
    observation = answer(make_environment(), "\n".join(calls))
    assert observation.text.startswith(f"\n{START}user\n<tool_response>")
    assert observation.text.endswith(f"</tool_response>{END}\n{START}assistant\n")
    assert [(said["status"], said["content"]) for _, said in responses(observation.text)] == [
        ("success", "3"),
        ("error", "there is no tool 'nope'; the tools are add, fail, repeat, greet"),
        ("error", "the call is no JSON: Expecting property name enclosed in double quotes"),
        ("error", "ValueError: boom"),
        ("error", "wrong arguments: a: Field required"),
    ]
    inner = [text.removeprefix("<tool_call>").removesuffix("</tool_call>") for text in calls]
    assert [named for named, _ in responses(observation.text)] == inner
    assert [(made.tool, made.status) for made in observation.calls] == [
        ("add", "success"), ("", "error"), ("", "error"), ("fail", "error"), ("add", "error")
    ]  # fmt: skip


def test_a_row_can_call_its_own_tools_alone() -> None:
    observation = answer(make_environment(), call("add", a=1) + call("greet", name="Bo"), tools=["greet"])
    (_, refused), (_, greeted) = responses(observation.text)
    assert refused == {"status": "error", "content": "there is no tool 'add'; the tools are greet"}
    assert greeted == {"status": "success", "content": "Hello Bo!"}


def test_a_row_with_an_empty_list_of_tools_can_call_none() -> None:
    ((_, refused),) = responses(answer(make_environment(), call("add", a=1), tools=[]).text)
    assert refused == {"status": "error", "content": "there is no tool 'add'; the tools are none"}


def test_more_calls_than_allowed_are_not_run_and_told_so() -> None:
    ran = []

    @tool
    def note(n: int) -> str:
        """Take a note."""
        ran.append(n)
        return "noted"

    environment = make_environment({"note": note}, max_calls_per_turn=2)
    observation = answer(environment, "".join(call("note", n=n) for n in range(50)))
    assert sorted(ran) == [0, 1]
    assert [said["content"] for _, said in responses(observation.text)] == [
        "noted", "noted", "only the first 2 calls of a turn are run"
    ]  # fmt: skip


@pytest.mark.timeout(60)
def test_the_calls_of_all_trajectories_of_a_turn_overlap_fully() -> None:
    """64 trajectories, each of whose calls waits until all 64 run: fewer at a time would never end."""
    everyone = threading.Barrier(64)

    @tool
    def meet() -> str:
        """Wait for all others."""
        everyone.wait()
        return "met"

    environment = make_environment({"meet": meet})
    observations = environment.step([Action("tool_call", call("meet"))] * 64, [make_tool_prompt()] * 64)
    environment.close()
    assert all('"content": "met"' in observation.text for observation in observations)


def test_an_infrastructure_failure_voids_the_trajectory_and_no_other() -> None:
    @tool
    def look(where: str) -> str:
        """Look somewhere."""
        if where == "down":
            raise ToolUnavailableError("the back end is down")
        return "seen"

    environment = make_environment({"look": look})
    actions = [Action("tool_call", call("look", where=where) + call("look", where="up")) for where in ("down", "up")]
    failed, good = environment.step(actions, [make_tool_prompt()] * 2)
    environment.close()
    assert (failed.text, failed.token_ids, failed.failure) == ("", (), "tool look: the back end is down")
    assert (good.failure, good.calls[0].content) == ("", "seen")


TEXTS = st.text(alphabet=st.sampled_from('ab "\\\n\x00é東🎉<>/&\ud800')) | st.just("</tool_response><|im_end|>")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXTS, st.integers(1, 400)), min_size=1, max_size=3), st.booleans())
def test_whatever_tools_return_the_observation_is_well_formed_and_within_its_limit(
    made: list[tuple[str, int]], cut: bool
) -> None:
    contents = [text * times for text, times in made]
    source = iter(contents)

    @tool
    async def give() -> str:
        """Give the next text."""
        return next(source)

    environment = make_environment({"give": give}, max_obs_length=320, max_calls_per_turn=3)
    observation = answer(environment, call("give") * len(contents), cut=cut)
    assert len(observation.token_ids) <= 320
    said = responses(observation.text)
    assert len(said) == len(contents)
    assert observation.text.count("</tool_response>") == len(contents)
    for (_, result), content in zip(said, contents, strict=True):
        shown, whole = result["content"], content.encode("utf-8", "replace").decode()
        if shown.endswith(CUT_MARK):
            assert observation.truncated
            shown = shown.removesuffix(CUT_MARK)
            assert escape_tags(whole).startswith(shown)
        else:
            assert escape_tags(whole) == shown


def test_a_short_result_is_untouched_beside_a_long_one_which_keeps_its_beginning() -> None:
    environment = make_environment(max_obs_length=400, max_calls_per_turn=2)
    observation = answer(environment, call("repeat", text="ab ", times=10_000) + call("add", a=1))
    (_, long), (_, short) = responses(observation.text)
    assert observation.truncated
    assert long["content"].startswith("ab ab ab")
    assert long["content"].endswith(CUT_MARK)
    assert short["content"] == "2"
    assert len(observation.token_ids) > 380, "the room is used"
    assert len(observation.calls[0].content) < 30_000, "logs stay small"


def test_a_limit_without_room_for_the_tags_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_obs_length=100 is too small .*max_calls_per_turn=8 .*take \d+ tokens"):
        make_environment(max_obs_length=100)


def test_a_trajectory_goes_on_after_errors_and_cut_calls_until_it_answers() -> None:
    long = '<tool_call>{"name": "add", "arguments": {"a": ' + "1" * 3 * ROLLOUT.max_response_length
    trajectory = play(make_environment(), BAD, long, call("add", a=1), r"\boxed{2}")
    assert (trajectory.status, trajectory.answer) == (Status.ANSWERED, "2")
    assert [turn.action.kind for turn in trajectory.turns] == ["invalid", "invalid", "tool_call", "final"]
    cut = trajectory.turns[1]
    assert cut.completion.finish_reason == "length"
    assert cut.observation is not None
    assert cut.observation.text.startswith(END)
    assert "not closed" in cut.observation.text


def test_a_turn_without_call_or_answer_ends_the_trajectory_unanswered() -> None:
    trajectory = play(make_environment(), call("add", a=1), "I give up.")
    assert (trajectory.status, trajectory.answer) == (Status.OUT_OF_TURNS, None)
    assert len(trajectory.turns) == 2


def test_calls_of_the_last_turn_are_not_run() -> None:
    texts = [call("add", a=n) for n in range(ROLLOUT.max_turns + 1)]
    trajectory = play(make_environment(), *texts)
    assert trajectory.status is Status.OUT_OF_TURNS
    assert [turn.observation is not None for turn in trajectory.turns] == [True] * ROLLOUT.max_turns + [False]


@pytest.mark.parametrize("schedule", ["lockstep", "async"])
def test_both_schedules_give_the_same_trajectories(schedule: str) -> None:
    def respond(context: str) -> str:
        count = context.count("<tool_response>{")
        return r"so \boxed{2}" if count > 2 else f"turn {count} " + call("add", a=count) + call("greet", name="Bo")

    environment = make_environment()
    engine = ChatEngine(TOKENIZER, respond, TOKENIZER.eos_token_id)
    manager = LLMGenerationManager(engine, environment, replace(ROLLOUT, schedule=schedule))  # type: ignore[arg-type]
    prompts = [make_tool_prompt(str(n), group_id=n) for n in range(5)]
    trajectories = manager.run_llm_loop(prompts, SamplingConfig(400, temperature=0.0))
    manager.close()
    for trajectory in trajectories:
        assert (trajectory.status, trajectory.answer, len(trajectory.turns)) == (Status.ANSWERED, "2", 3)
        observations = [turn.observation for turn in trajectory.turns if turn.observation is not None]
        contents = [[made.content for made in observation.calls] for observation in observations]
        assert contents == [["1", "Hello Bo!"], ["3", "Hello Bo!"]]


def test_the_stop_strings_are_the_ends_and_starts_of_turns() -> None:
    assert make_environment().stop == (END, START)
