from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from search_r1.backends.residence import Residence
from search_r1.config import (
    Config,
    DataConfig,
    EngineConfig,
    EnvironmentConfig,
    PolicyConfig,
    RolloutConfig,
    TrackingConfig,
    TrainerConfig,
)
from search_r1.environments.search import SearchEnvironment
from search_r1.rollout.manager import LLMGenerationManager
from search_r1.trainer import build
from search_r1.trainer.life_cycle import LifeCycle
from search_r1.trainer.run_folder import RunFolder
from search_r1.trainer.step import Roles
from search_r1.trainer.trainer import Trainer
from search_r1.types import RolloutBatch, TrainBatch, Trajectory
from tests.fakes import AsyncEngine, FakeRetriever, decode, encode, make_question
from tests.model_factory import tiny_tokenizer


class Log(list[str]):
    """What happened, in order."""

    def sleep(self, level: int = 1) -> None:
        self.append("sleep")

    def close(self) -> None:
        self.append("close")

    def wake_up(self, weights_only: bool) -> None:
        self.append("wake for weights" if weights_only else "wake up")

    def offload(self) -> None:
        self.append("offload")

    def forget(self) -> None:
        self.append("forget")

    def sync(self) -> dict[str, float]:
        self.append("sync")
        return {"bytes": 1.0}


def test_engine_and_trainer_take_turns() -> None:
    log = Log()
    cycle = LifeCycle(log.sleep, log.wake_up, log.offload)
    carry = cycle.awake(log.sync)
    assert carry() == {"bytes": 1.0}
    for _ in range(2):
        with cycle.generating():
            log.append("rollout")
        log.append("update")
        carry()
    turn = ["offload", "wake up", "rollout", "sleep", "update", "wake for weights", "sync"]
    assert log == ["sleep", "wake for weights", "sync", *turn, *turn]


def test_an_engine_that_was_not_synced_is_woken_before_it_samples() -> None:
    log = Log()
    cycle = LifeCycle(log.sleep, log.wake_up)
    for _ in range(2):
        with cycle.generating():
            log.append("rollout")
    assert log == ["rollout", "sleep", "wake up", "rollout", "sleep"]


def test_each_rollout_and_validation_begins_with_an_empty_cache_once_the_engine_is_awake() -> None:
    log = Log()
    cycle = LifeCycle(log.sleep, log.wake_up, forget=log.forget)
    for what in ("validation", "rollout"):
        with cycle.generating():
            log.append(what)
    assert log == ["forget", "validation", "sleep", "wake up", "forget", "rollout", "sleep"]


def test_an_engine_that_gives_up_its_weights_gets_them_again_before_it_samples_and_only_once() -> None:
    """As between a validation and the next rollout, where nothing was learned that would have been sent."""
    log = Log()
    cycle = LifeCycle(log.sleep, log.wake_up, log.offload, log.sync)
    carry, probe = cycle.awake(log.sync), cycle.sampling(lambda: log.append("probe"))
    for _ in range(2):
        with cycle.generating():
            log.append("rollout")
    assert log[3:] == ["wake for weights", "sync", "offload", "wake up", "rollout", "sleep"]
    log.clear()
    carry()
    probe()
    with cycle.generating():
        log.append("rollout")
    assert log == ["wake for weights", "sync", "offload", "wake up", "probe", "offload", "rollout", "sleep"]


def test_after_a_probe_the_engine_sleeps_before_the_trainer_works_or_sends_weights() -> None:
    log = Log()
    cycle = LifeCycle(log.sleep, log.wake_up, log.offload)
    probe, look = cycle.sampling(lambda: log.append("probe")), cycle.training(lambda: log.append("look"))
    cycle.rest()
    look()
    for work in (look, cycle.awake(log.sync)):
        probe()
        work()
    turn = ["offload", "wake up", "probe", "sleep"]
    assert log == ["sleep", "look", *turn, "look", *turn, "wake for weights", "sync"]


def test_a_checkpoint_is_written_while_the_engine_sleeps(tmp_path: Path) -> None:
    log = Log()
    cycle = LifeCycle(log.sleep, log.wake_up, log.offload)
    probe = cycle.sampling(lambda: log.append("probe"))

    class Learner:
        def score(self, rollout: RolloutBatch, names: Sequence[str]) -> dict[str, Tensor]:
            return dict.fromkeys(names, rollout.rollout_log_probs)

        def update(self, batch: TrainBatch) -> dict[str, float]:
            return {}

        def save(self, folder: str) -> None:
            log.append("save")

    class Parity:
        def __call__(self, trajectories: Sequence[Trajectory], step: int) -> dict[str, float]:
            probe()
            return {}

    config = Config(
        data=DataConfig(train_batch_size=1),
        rollout=RolloutConfig(max_turns=0, group_size=2),
        trainer=TrainerConfig(total_steps=2, save_every_steps=1),
        tracking=TrackingConfig(backends=()),
    )
    engine = AsyncEngine(lambda context, seed: "<answer>Paris</answer>")
    environment = SearchEnvironment(FakeRetriever(), encode, decode, EnvironmentConfig(), 200)
    learner = Learner()
    roles = Roles(
        policy=learner,  # type: ignore[arg-type]
        score=learner.score,
        manager=LLMGenerationManager(engine, environment, config.rollout),
        reward=lambda trajectory: 1.0,
        sync_weights=cycle.awake(log.sync),
        encode_prompt=lambda question: tuple(encode(question.text)),
        pad_token_id=0,
        life_cycle=cycle,
        parity=Parity(),  # type: ignore[arg-type]
    )
    questions = [make_question("Who?")]
    Trainer(config, roles, questions, questions, RunFolder(tmp_path), [], str, show=False).fit()
    saves = [place for place, event in enumerate(log) if event == "save"]
    assert len(saves) == 2
    assert all(log[place - 1] == "sleep" for place in saves)


def test_an_engine_starts_once_the_trainer_has_left_its_gpu_and_sleeps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(
        rollout=RolloutConfig(schedule="lockstep"),
        engine=EngineConfig(name="vllm", sleep_while_training=True),
        environment=EnvironmentConfig(retriever_urls=("http://127.0.0.1:1/retrieve",)),
        policy=PolicyConfig(offload_while_generating=True),
    )
    log = Log()
    monkeypatch.setattr(build, "build_worker_roles", lambda *_: {"policy": log})
    monkeypatch.setattr(build, "build_vllm_engine", lambda _: log.append("start") or log)
    with ExitStack() as stack:
        build.build_local_roles(config, tiny_tokenizer(), (1, 1), stack)
    assert log == ["offload", "start", "sleep", "close"]


def test_a_module_that_left_comes_back_when_asked_for_with_its_optimizer_going_on() -> None:
    """On a machine without a GPU, `cpu:0` stands for the device."""
    results = []
    for leaves in (False, True):
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(module.parameters())
        residence = Residence(module, torch.device("cpu:0"), optimizer)
        for _ in range(3):
            if leaves:
                residence.leave()
                residence.leave()
            residence.module(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        results.append(module.weight.detach().clone())
    assert torch.equal(*results)
