"""The asynchronous schedule on a real vLLM engine: the same trajectories as in lockstep, and learning meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from search_r1.config import EnvironmentConfig, RolloutConfig
from search_r1.environments.search import SearchEnvironment
from search_r1.main import main
from search_r1.rollout.manager import LLMGenerationManager
from search_r1.types import Prompt, SamplingConfig, Trajectory
from tests.fakes import FakeRetriever, make_question
from tests.model_factory import tiny_model_dir, tiny_tokenizer
from tests.serving import metrics_rows, retrieval_server, tiny_run

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with retrieval_server(tmp_path_factory.mktemp("server")) as address:
        yield address


def test_lockstep_and_async_give_the_same_greedy_trajectories(tmp_path: Path) -> None:
    from search_r1.engines.vllm_engine import VLLMEngine

    tokenizer = tiny_tokenizer()
    engine = VLLMEngine(str(tiny_model_dir(tmp_path)), dtype="float32", max_batch_size=32, cpu_cache_gib=0.25)
    environment = SearchEnvironment(
        FakeRetriever(), tokenizer.encode, lambda ids: tokenizer.decode(list(ids)), EnvironmentConfig(), 60
    )
    questions = [make_question(text) for text in ("who?", "where is ab from", "abc", "the author of ba", "x")]
    prompts = [Prompt(q, i, tuple(tokenizer.encode(f"Question: {q.text}"))) for i, q in enumerate(questions)]

    def roll(schedule: str) -> list[Trajectory]:
        config = RolloutConfig(
            schedule=schedule,  # type: ignore[arg-type]
            max_turns=3,
            max_start_length=60,
            max_response_length=24,
            max_obs_length=60,
            max_prompt_length=400,
        )
        manager = LLMGenerationManager(engine, environment, config)
        found = manager.run_llm_loop(prompts, SamplingConfig(24, temperature=0.0))
        manager.close()
        return found

    lockstep, asynchronous = roll("lockstep"), roll("async")
    engine.close()
    assert {len(trajectory.turns) for trajectory in lockstep} == {4}
    for one, other in zip(lockstep, asynchronous, strict=True):
        assert (one.response_ids, one.loss_mask, one.status) == (other.response_ids, other.loss_mask, other.status)
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def test_training_overlaps_generation_and_corrects_what_is_stale(tmp_path: Path, url: str) -> None:
    overrides = (
        "engine.name=vllm",
        "engine.cpu_cache_gib=0.25",
        "engine.max_batch_size=8",
        "rollout.max_staleness=1",
        "validation.before_training=false",
        "trainer.total_steps=4",
        "trainer.save_every_steps=0",
        "policy.optim.lr=1e-2",
    )
    assert main(["--config-name", "grpo", *tiny_run(tmp_path, url, *overrides)]) == 0
    rows = metrics_rows(tmp_path / "run")
    assert rows[0]["staleness/max"] == 0
    assert [row["staleness/max"] for row in rows[1:]] == [1] * 3
    assert rows[0]["mismatch/kl"] < 1e-5 < rows[2]["mismatch/kl"]
    assert all(0 <= row["mismatch/truncated_share"] <= 1 for row in rows)


def test_training_with_an_engine_that_gives_up_its_weights_in_its_sleep(tmp_path: Path, url: str) -> None:
    """Between the first validation and the first rollout nothing is learned, yet the weights are needed again."""
    overrides = (
        "engine.name=vllm",
        "engine.cpu_cache_gib=0.25",
        "engine.max_batch_size=8",
        "engine.sleep_while_training=true",
        "engine.sleep_level=2",
        "engine.max_parity_error=1e-4",
        "policy.offload_while_generating=true",
        "trainer.total_steps=2",
        "trainer.save_every_steps=0",
        "policy.optim.lr=1e-2",
    )
    assert main(["--config-name", "grpo", *tiny_run(tmp_path, url, *overrides)]) == 0
    rows = [row for row in metrics_rows(tmp_path / "run") if row["step"] > 0]
    assert len(rows) == 2
    assert all(row["parity/log_prob_gap"] < 1e-4 and row["actor/rollout_log_prob_gap"] < 1e-4 for row in rows)
