from __future__ import annotations

import torch

from search_r1.backends.residence import Residence
from search_r1.trainer.life_cycle import LifeCycle


class Log(list[str]):
    """What happened, in order."""

    def sleep(self) -> None:
        self.append("sleep")

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
    first = ["offload", "rollout", "sleep", "update", "wake for weights", "sync"]
    assert log == ["sync", *first, "offload", "wake up", *first[1:]]


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
