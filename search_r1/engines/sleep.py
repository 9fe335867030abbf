"""What an engine may be asked for: asleep nothing, and after a deep sleep only new weights."""

from __future__ import annotations

from search_r1.errors import EngineError

KEEP_WEIGHTS, GIVE_UP_WEIGHTS = 1, 2
"""Levels of sleep. At both the cache is dropped; weights wait in host memory, or are gone until they are sent again."""


class SleepState:
    """Keeps an engine from sampling without memory, or with weights that are gone."""

    def __init__(self) -> None:
        self._has_room_for_weights = self._has_cache = self._has_weights = True

    def fall_asleep(self, level: int) -> None:
        if level not in (KEEP_WEIGHTS, GIVE_UP_WEIGHTS):
            raise ValueError(f"level={level}: an engine sleeps at level {KEEP_WEIGHTS} or {GIVE_UP_WEIGHTS}")
        self._has_room_for_weights = self._has_cache = False
        self._has_weights = self._has_weights and level == KEEP_WEIGHTS

    def wake_up(self, weights_only: bool) -> None:
        self._has_room_for_weights = True
        self._has_cache = self._has_cache or not weights_only

    def take_weights(self) -> None:
        """All weights have come."""
        self._has_weights = True

    def check_may_load(self) -> None:
        """
        Raises:
            EngineError: asleep.
        """
        if not self._has_room_for_weights:
            raise EngineError("the engine is asleep: wake it up before it takes weights")

    def check_may_sample(self) -> None:
        """
        Raises:
            EngineError: asleep, or without weights.
        """
        if not self._has_cache:
            raise EngineError("the engine is asleep: wake it up before it samples")
        if not self._has_weights:
            raise EngineError("the engine gave up its weights in its sleep: send them before it samples")
