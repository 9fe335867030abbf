from __future__ import annotations

import json

from search_r1.rollout.metrics import rollout_metrics
from search_r1.rollout.records import trajectory_record
from search_r1.types import Action, Observation, Status, ToolResult, Turn
from tests.fakes import make_completion, make_trajectory


def tool_turn(*calls: ToolResult) -> Turn:
    return Turn(make_completion("calls"), Action("tool_call", "raw calls"), Observation("said", (1, 2), calls=calls))


def result(tool: str, seconds: float = 0.0, status: str = "success") -> ToolResult:
    return ToolResult(tool, status, "text", seconds)  # type: ignore[arg-type]


ANSWERED = Turn(make_completion("<answer>Paris</answer>"), Action("final", "Paris"))


def test_metrics_of_each_tool_worked_by_hand() -> None:
    first = make_trajectory(
        [tool_turn(result("search", 0.1), result("add", 0.5), result("add", 0.0, "error")), ANSWERED]
    )
    second = make_trajectory(
        [tool_turn(result("search", 0.3), result("search", 0.2)), tool_turn(result("", 0.0, "error")), ANSWERED]
    )
    metrics = rollout_metrics([first, second])
    assert {name: value for name, value in metrics.items() if name.startswith("tools/")} == {
        "tools/rejected_calls": 1.0,
        "tools/add/calls": 2.0,
        "tools/add/errors": 1.0,
        "tools/add/p50_s": 0.5,
        "tools/search/calls": 3.0,
        "tools/search/errors": 0.0,
        "tools/search/p50_s": 0.2,
    }
    assert metrics["rollout/searches"] == 1.5
    assert (metrics["retrieval/p50_s"], metrics["retrieval/p95_s"]) == (0.2, 0.3)
    assert metrics["status/answered"] == 1.0


def test_unreadable_calls_and_turns_without_call_or_answer_are_invalid_actions() -> None:
    unreadable = Turn(make_completion("x"), Action("invalid", "<tool_call>"), Observation("said", (1,)))
    ended = Turn(make_completion("x"), Action("end"))
    metrics = rollout_metrics([make_trajectory([tool_turn(result("add")), unreadable, ended], Status.OUT_OF_TURNS)])
    assert metrics["rollout/invalid_action_rate"] == 2 / 3


def test_a_run_without_tools_has_no_tool_metrics() -> None:
    assert not [name for name in rollout_metrics([make_trajectory([ANSWERED])]) if name.startswith("tools/")]


def test_a_record_shows_every_call_with_status_and_latency() -> None:
    trajectory = make_trajectory([tool_turn(result("add", 0.5), result("", 0.0, "error")), ANSWERED])
    record = json.loads(json.dumps(trajectory_record(trajectory, {"reward": 1.0}, step=1)))
    first, last = record["turns"]
    assert (first["action"], first["content"], first["observation"]) == ("tool_call", "raw calls", "said")
    assert first["calls"] == [
        {"tool": "add", "status": "success", "seconds": 0.5},
        {"tool": "", "status": "error", "seconds": 0.0},
    ]
    assert (last["action"], last["content"], last["calls"], record["answer"]) == ("final", "Paris", [], "Paris")
