"""Which run the same command, or one that is not quite the same, goes on from."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_r1.config import Config, EngineConfig, ModelConfig
from search_r1.trainer.checkpoints import changed_settings, comparable, find_resume

CONFIG = Config(model=ModelConfig("model"), engine=EngineConfig("hf"))


def changed(**sections: dict[str, Any]) -> Config:
    return replace(CONFIG, **{name: replace(getattr(CONFIG, name), **keys) for name, keys in sections.items()})


def interrupted(runs: Path, settings: dict[str, Any]) -> Path:
    run = runs / "first"
    (run / "checkpoints/step_000002").mkdir(parents=True)
    (run / "checkpoints/step_000002/trainer.json").write_text("{}")
    (run / "settings.json").write_text(json.dumps(settings))
    (runs / "latest").symlink_to("first")
    return run.resolve()


@pytest.mark.parametrize(
    "sections",
    [
        {"environment": {"top_k": 1}},
        {"environment": {"name": "tools", "forced_opening": "<think>"}},
        {"environment": {"tools": ("my.tools",)}},
        {"environment": {"retriever_urls": ()}},
        {"environment": {"max_query_chars": 5}},
        {"engine": {"name": "vllm"}},
        {"engine": {"dtype": "bfloat16"}},
        {"validation": {"temperature": 1.0}},
        {"rollout": {"temperature": 0.5}},
        {"reward": {"function": "f1"}},
    ],
)
def test_what_decides_tokens_or_rewards_begins_a_new_run_beside_an_interrupted_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sections: dict[str, dict[str, Any]]
) -> None:
    old, new = interrupted(tmp_path, comparable(CONFIG)), tmp_path / "second"
    with caplog.at_level(logging.WARNING):
        assert find_resume(changed(**sections), new) == (new, None)
    (section,) = sections
    assert f"{section}." in caplog.text
    assert changed_settings(old, changed(**sections))


@pytest.mark.parametrize(
    "sections",
    [
        {"environment": {"retriever_urls": ("http://elsewhere/retrieve",), "timeout_s": 1.0, "max_retries": 9}},
        {"engine": {"max_batch_size": 8, "num_engines": 2, "gpu_memory_utilization": 0.3, "max_parity_error": 0.5}},
        {"rollout": {"max_concurrent_searches": 2, "max_void_share": 0.5}},
        {"policy": {"max_tokens_per_micro_batch": 100}, "critic": {"max_tokens_per_micro_batch": 100}},
        {"validation": {"every_steps": 7}, "trainer": {"total_steps": 9}, "cluster": {"num_workers": 2}},
    ],
)
def test_addresses_deadlines_and_sizes_in_memory_may_change_while_a_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sections: dict[str, dict[str, Any]]
) -> None:
    old = interrupted(tmp_path, comparable(CONFIG))
    assert find_resume(changed(**sections), tmp_path / "second") == (old, old / "checkpoints/step_000002")
    assert not caplog.records


def test_a_run_whose_settings_were_written_without_some_of_the_keys_goes_on(tmp_path: Path) -> None:
    """Nested, as they once were, and with a key that is free to change by now."""
    old = interrupted(tmp_path, {"seed": 0, "model": {"path": "model"}, "policy": {"max_tokens_per_micro_batch": 1}})
    assert find_resume(CONFIG, tmp_path / "second")[0] == old
    assert changed_settings(old, replace(CONFIG, seed=1)) == ["seed: 0 -> 1"]


def test_a_checkpoint_may_be_named_from_within_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = interrupted(tmp_path, comparable(CONFIG))
    monkeypatch.chdir(old / "checkpoints")
    _, found = find_resume(changed(trainer={"resume": "step_000002"}), tmp_path / "second")
    assert found is not None
    assert changed_settings(found.parents[1], changed(environment={"top_k": 9})) == ["environment.top_k: 3 -> 9"]
