"""The report shows a run folder as one file, and nothing that a passage says can run in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from search_r1.errors import DataError
from search_r1.report.__main__ import main
from search_r1.report.charts import HEIGHT, MARGIN, WIDTH, chart
from search_r1.report.page import render, write_report
from search_r1.report.run_folder import MAX_CHARS, MAX_FILES, read_run
from search_r1.rollout.records import trajectory_record
from search_r1.types import Action, Completion, Observation, Passage, Prompt, Question, Status, Trajectory, Turn

HOSTILE = '</script><script>alert(1)</script><img src=x onerror=alert(1)> \u2028 {{ 7*7 }} "&lt;'


def record(step: int = 1, text: str = "Paris", reward: float | None = 1.0) -> dict[str, Any]:
    question = Question("nq/test/1", "nq", f"Where is it? {text}", ({"role": "user", "content": text},), (text,))
    completion = Completion((5, 6), (-0.1, -0.2), f"<search> {text} </search>", "stop")
    observation = Observation(text, (7, 8, 9), (Passage(text, text, "p1", 1.5),), 0.01)
    answer = Completion((10,), (-0.3,), f"<answer> {text} </answer>", "stop")
    trajectory = Trajectory(
        Prompt(question, 0, (1, 2, 3)),
        response_ids=[5, 6, 7, 8, 9, 10],
        loss_mask=[True, True, False, False, False, True],
        log_probs=[-0.1, -0.2, 0.0, 0.0, 0.0, -0.3],
        turns=[Turn(completion, Action("search", text), observation), Turn(answer, Action("answer", text))],
        status=Status.ANSWERED if reward is not None else Status.VOID,
    )
    return trajectory_record(trajectory, {} if reward is None else {"reward": reward, "em": reward}, step)


def write_run(folder: Path, records: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> Path:
    (folder / "trajectories").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    for row in records:
        with (folder / "trajectories" / f"step_{row['step']}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    return folder


def embedded(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_hostile_text_in_a_passage_stays_text(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [record(text=HOSTILE)], [{"step": 1, f"val/{HOSTILE}": 0.5, "val/em": 0.5}])
    (run / "config.yaml").write_text(HOSTILE)
    (run / "versions.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    (run / "summary.json").write_text(
        json.dumps({"algorithm": HOSTILE, "before": {"em": 0}, "after": {"em": 1, HOSTILE: 1}})
    )
    page = write_report(run).read_text()
    assert "alert(1)</script>" not in page
    assert "<img" not in page
    assert page.count("<script") == page.count("</script>") == 2
    assert embedded(page)[0]["turns"][0]["passages"][0]["text"] == HOSTILE


def test_the_page_asks_for_nothing_from_outside_and_runs_its_own_script_only(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run", [record()], [{"step": 1, "val/em": 0.5}])).read_text()
    assert re.findall(r"""(?:src|href)\s*=\s*["']?|url\(|@import|fetch\(|innerHTML""", page) == []
    assert "default-src 'none'" in page
    assert "script-src 'sha256-" in page


def test_the_browser_gets_what_was_sampled_apart_from_what_was_observed(tmp_path: Path) -> None:
    row = embedded(render(read_run(write_run(tmp_path / "run", [record()], [{"step": 1, "a/b": 1.0}]), 40)))[0]
    assert row["sampled_spans"] == [[3, 5], [8, 9]]
    assert row["num_tokens"] == 9
    assert "token_ids" not in row
    assert [turn["observation"] for turn in row["turns"]] == ["Paris", None]


def test_right_wrong_and_void_are_told_apart(tmp_path: Path) -> None:
    rows = [record(reward=1.0), record(reward=0.2), record(reward=None)]
    run = read_run(write_run(tmp_path / "run", rows, [{"step": 1, "a/b": 1.0}]), 40)
    assert [row["right"] for row in run.trajectories] == [True, False, None]


@pytest.mark.parametrize(("answer", "right"), [(" The Paris! ", True), ("Lyon", False), ("", False), (None, False)])
def test_a_right_answer_is_right_whatever_was_taken_off_its_reward(
    answer: str | None, right: bool, tmp_path: Path
) -> None:
    parts = {"reward": 0.9, "turn_penalty": 0.1}
    row = {**record(), "answer": answer, "golden_answers": ["Paris"], "reward": 0.9, "reward_parts": parts}
    (read,) = read_run(write_run(tmp_path / "run", [row], [{"step": 1, "a/b": 1.0}]), 40).trajectories
    assert read["right"] is right


def test_a_large_run_is_thinned_and_says_so(tmp_path: Path) -> None:
    rows = [record(step, text="x" * (MAX_CHARS + 7)) for step in range(1, MAX_FILES + 41) for _ in range(3)]
    run = read_run(write_run(tmp_path / "run", rows, [{"step": 1, "a/b": 1.0}]), max_per_file=2)
    steps = [row["step"] for row in run.trajectories]
    assert (steps[0], steps[-1], len(set(steps)), len(steps)) == (1, MAX_FILES + 40, MAX_FILES, 2 * MAX_FILES)
    assert (run.num_files, run.num_trajectories) == (MAX_FILES + 40, 3 * MAX_FILES)
    assert run.trajectories[0]["golden_answers"][0].endswith("(7 more characters)")


def test_a_line_cut_short_by_a_kill_is_skipped_and_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [record()], [{"step": 1, "val/em": 0.5}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "val/')
    with (run / "trajectories" / "step_1.jsonl").open("a") as file:
        file.write('{"step": 1, "turns": [')
    read = read_run(run, 40)
    assert (read.num_unreadable, len(read.trajectories)) == (2, 1)
    assert "2 unreadable lines" in render(read)


def test_a_step_repeated_after_a_resume_counts_once(tmp_path: Path) -> None:
    metrics = [{"step": 1, "val/em": 0.1}, {"step": 2, "val/em": 0.2}, {"step": 2, "val/em": 0.3}]
    assert read_run(write_run(tmp_path / "run", [], metrics), 40).curves["val/em"] == [(1.0, 0.1), (2.0, 0.3)]


def test_curves_span_their_box_and_leave_out_what_is_not_finite() -> None:
    drawn = chart("val/em", [(0, 0.0), (5, float("nan")), (10, 1.0)])
    assert drawn is not None
    assert drawn.points == f"{MARGIN}.0,{HEIGHT - MARGIN}.0 {WIDTH - MARGIN}.0,{MARGIN}.0"
    assert drawn.dropped == 1
    assert chart("loss/policy", [(1, float("inf"))]) is None
    flat = chart("x/y", [(1, 2.0)])
    assert flat is not None
    assert flat.points == f"{WIDTH / 2},{HEIGHT / 2}"


def test_the_table_shows_exact_match_by_data_source(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [], [{"step": 0, "val/em": 0.1, "val/nq/em": 0.25, "actor/loss": 1.0}])
    scores = {"before": {"em": 0.125, "questions": 8}, "after": {"em": 0.875, "questions": 8}}
    (run / "summary.json").write_text(json.dumps({**scores, "by_source": {"nq": scores}}))
    page = write_report(run).read_text()
    assert page.count("<td>0.125</td><td>0.875</td>") == 2
    assert "<th>nq em</th>" in page
    assert page.index("<b>val/em</b>") < page.index("<b>val/nq/em</b>") < page.index("<b>actor/loss</b>")


def test_the_curves_of_tool_calls_stand_beside_those_of_searches(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [], [{"step": 1, "rollout/searches": 1.0, "tools/add/calls": 5.0, "val/em": 0.5}])
    page = write_report(run).read_text()
    assert page.index("<b>rollout/searches</b>") < page.index("<b>tools/add/calls</b>") < page.index("</section>")
    assert "<details><summary>tools" not in page


def test_an_evaluation_has_trajectories_to_browse(tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text(json.dumps(record()) + "\n")
    (row,) = embedded(write_report(tmp_path).read_text())
    assert (row["question_id"], row["right"]) == ("nq/test/1", True)


def test_the_table_stands_without_a_validation_before_training(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [], [{"step": 1, "val/em": 0.1}])
    scores = {"before": None, "after": {"em": 0.875, "questions": 8}}
    (run / "summary.json").write_text(json.dumps({**scores, "by_source": {"nq": scores}}))
    page = write_report(run).read_text()
    assert page.count("<td>–</td><td>0.875</td>") == 2
    assert "None" not in page


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert "No metrics yet." in write_report(tmp_path).read_text()


def test_a_folder_that_is_no_run_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match="no run folder"):
        read_run(tmp_path, 40)
    assert main([str(tmp_path)]) == 1
    assert "no metrics.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
