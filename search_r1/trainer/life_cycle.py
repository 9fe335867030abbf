"""Turns on a GPU: the engine sleeps while the trainer works, the trainer is in host memory while the engine samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def _stay(*_: object) -> None:
    """Leave everything where it is."""


class LifeCycle:
    """Who holds device memory when. By default everybody stays.

    The trainer comes back by itself as soon as one of its methods needs it: `rest` must have been called since the
    engine sampled. The engine is woken for its weights before a sync, and for the rest, once the trainer has left,
    before it samples.
    """

    def __init__(
        self,
        sleep: Callable[[], object] = _stay,
        wake_up: Callable[[bool], object] = _stay,
        offload: Callable[[], object] = _stay,
        resend: Callable[[], object] | None = None,
        forget: Callable[[], object] = _stay,
    ) -> None:
        """
        Args:
            sleep: gives the engine's memory back.
            wake_up: takes it again; with True only what weights need.
            offload: the trainer's weights and optimizer state to host memory.
            resend: carries the policy's weights to the engine, where it gives them up in its sleep.
            forget: the engine drops what it cached, so that nothing that was generated before, a validation or probes,
                leaves a trace in the rounding of what comes: a resumed run finds no cache either.
        """
        self._sleep = sleep
        self._wake_up = wake_up
        self._offload = offload
        self._resend = resend
        self._forget = forget
        self._is_asleep = self._lacks_weights = False

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Around rollouts and validation."""
        self._give_turn_to_engine()
        self._forget()
        yield
        self.rest()

    def rest(self) -> None:
        """Before the trainer works: the engine sleeps, unless it does already."""
        if not self._is_asleep:
            self._sleep()
            self._is_asleep = True
            self._lacks_weights = self._resend is not None

    def sampling(self, work: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
        """`work`, with the engine ready to sample."""
        return _preceded(self._give_turn_to_engine, work)

    def training(self, work: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
        """`work` of the trainer, with the engine asleep."""
        return _preceded(self.rest, work)

    def awake(self, sync: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
        """`sync`, with the engine ready to take weights."""

        def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            self.rest()
            self._wake_up(True)
            answer = sync(*args, **kwargs)
            self._lacks_weights = False
            return answer

        return run

    def _give_turn_to_engine(self) -> None:
        if self._lacks_weights and self._resend is not None:
            self.awake(self._resend)()
        self._offload()
        if self._is_asleep:
            self._wake_up(False)
        self._is_asleep = False


def _preceded(prepare: Callable[[], None], work: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        prepare()
        return work(*args, **kwargs)

    return run
