"""What a person sees on a terminal of 80 columns."""

from __future__ import annotations

import io

from rich.console import Console

from search_r1.trainer.console import comparison_table

SUMMARY = {"questions": 300.0, "em": 0.25, "f1": 0.3, "searches_per_question": 1.0, "valid_action_rate": 1.0}


def test_data_sources_that_begin_alike_can_be_told_apart() -> None:
    sources = dict.fromkeys(("quickstart_one_hop", "quickstart_two_hop", "all"), SUMMARY)
    screen = io.StringIO()
    Console(file=screen, width=80).print(comparison_table(sources, sources))
    assert "quickstart_one_hop" in screen.getvalue()
    assert "quickstart_two_hop" in screen.getvalue()


def test_the_table_tells_how_often_each_tool_was_called_before_and_after() -> None:
    before = {"all": SUMMARY | {"tools/search/calls": 12.0}}
    after = {"all": SUMMARY | {"tools/search/calls": 9.0, "tools/calculator/calls": 50.0}}
    assert comparison_table(before, after).caption == "tool calls: calculator 0 → 50, search 12 → 9"
    assert comparison_table(None, after).caption == "tool calls: calculator 50, search 9"
    assert comparison_table(None, {"all": SUMMARY}).caption is None
