from __future__ import annotations

import torch

from search_r1.backends.residence import Residence
from search_r1.trainer.life_cycle import LifeCycle


def test_engine_and_trainer_take_turns() -> None:
    log: list[str] = []

    def sync() -> dict[str, float]:
        log.append("sync")
        return {"bytes": 1.0}

    cycle = LifeCycle(*(lambda name=name: log.append(name) for name in ("sleep", "wake_up", "offload")))
    carry = cycle.awake(sync)
    assert carry() == {"bytes": 1.0}
    for _ in range(2):
        with cycle.generating():
            log.append("rollout")
        log.append("update")
        carry()
    step = ["offload", "rollout", "sleep", "update", "wake_up", "sync"]
    assert log == ["sync", *step, *step]


def test_an_engine_that_was_not_synced_is_woken_before_it_samples() -> None:
    log: list[str] = []
    cycle = LifeCycle(lambda: log.append("sleep"), lambda: log.append("wake_up"))
    for _ in range(2):
        with cycle.generating():
            log.append("rollout")
    assert log == ["rollout", "sleep", "wake_up", "rollout", "sleep"]


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
