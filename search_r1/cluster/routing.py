"""Which of several engines samples a context: the one that holds its beginning, unless that one is much busier."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

EngineT = TypeVar("EngineT", bound=Hashable)

_SLACK = 8
"""More than a group is worth keeping together: recomputing a prefix is cheaper than waiting behind so many."""
_MAX_HOMES = 1 << 16


class Router(Generic[EngineT]):
    """Counts what each engine is sampling, and remembers which one sampled which context. Thread safe.

    A context goes to the engine that sampled the longest earlier context it begins with, whose cache holds that part:
    siblings of a group and the turns of a trajectory stay together. Instructions that all prompts share tie nothing,
    since no earlier context ends with them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._homes: OrderedDict[int, EngineT] = OrderedDict()
        """From the hash of a whole earlier context to the engine that sampled it, oldest first."""
        self._running: Counter[EngineT] = Counter()

    def assign(self, context: Sequence[int], engines: Sequence[EngineT]) -> EngineT:
        """One of `engines`, with one more context to sample until it is released."""
        with self._lock:
            engine = min(engines, key=lambda engine: self._running[engine])
            home, key = None, 0
            for key in accumulate(context, lambda prefix, token: hash((prefix, token)), initial=0):
                home = self._homes.get(key, home)
            if home in engines and self._running[home] <= _SLACK + 1.25 * self._running[engine]:
                engine = home
            self._homes[key] = engine
            self._homes.move_to_end(key)
            if len(self._homes) > _MAX_HOMES:
                self._homes.popitem(last=False)
            self._running[engine] += 1
            return engine

    def release(self, engine: EngineT, count: int = 1) -> None:
        with self._lock:
            self._running[engine] -= count

    def forget_homes(self) -> None:
        """The engines dropped their caches."""
        with self._lock:
            self._homes.clear()
