"""Turns on a GPU: the engine sleeps while the trainer works, the trainer is in host memory while the engine samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from search_r1.protocols import Metrics, WeightSync


def _stay() -> None:
    """Leave everything where it is."""


class LifeCycle:
    """Who holds device memory when. By default everybody stays.

    The trainer comes back by itself as soon as one of its methods needs it; the engine is woken before it samples and
    before it takes weights.
    """

    def __init__(
        self,
        sleep: Callable[[], None] = _stay,
        wake_up: Callable[[], None] = _stay,
        offload: Callable[[], None] = _stay,
    ) -> None:
        """
        Args:
            sleep, wake_up: give the engine's memory back, and take it again with the weights it had.
            offload: the trainer's weights and optimizer state to host memory.
        """
        self._sleep = sleep
        self._wake_up = wake_up
        self._offload = offload
        self._is_asleep = False

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Around rollouts and validation."""
        self._offload()
        self._wake()
        yield
        self._sleep()
        self._is_asleep = True

    def awake(self, sync: WeightSync) -> WeightSync:
        """`sync`, with the engine awake."""

        def run() -> Metrics:
            self._wake()
            return sync()

        return run

    def _wake(self) -> None:
        if self._is_asleep:
            self._wake_up()
        self._is_asleep = False
