"""A light engine for actors in tests: it says who it is and which weights it has, and can be held up through files."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from search_r1.protocols import Weights
from search_r1.types import Completion, SamplingConfig
from tests.fakes import decode, make_completion

HELD = "hold"
"""A context with this word is sampled once the file `go` exists; until then `held-<pid>-<seed>` tells that it waits."""


class PoolEngine:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._version = 0.0
        (folder / f"engine-{os.getpid()}").touch()

    def generate(
        self, contexts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        for context, seed in zip(contexts, seeds, strict=True):
            while self._is_held(context, seed):
                time.sleep(0.01)
        return [self._complete(context) for context in contexts]

    async def agenerate(self, context: Sequence[int], sampling: SamplingConfig, seed: int) -> Completion:
        try:
            while self._is_held(context, seed):
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            (self._folder / f"cancelled-{seed}").touch()
            raise
        return self._complete(context)

    def _is_held(self, context: Sequence[int], seed: int) -> bool:
        if HELD not in decode(context) or (self._folder / "go").exists():
            return False
        (self._folder / f"held-{os.getpid()}-{seed}").touch()
        return True

    def _complete(self, context: Sequence[int]) -> Completion:
        text = decode(context)
        if "crash" in text:
            os._exit(1)
        if "information" not in text:
            return make_completion("<search>q</search>")
        return make_completion(f"<answer>{os.getpid()} {self._version:g}</answer>")

    def _die_if_told(self) -> None:
        """One engine of those that look takes the order away and dies."""
        with suppress(FileNotFoundError):
            (self._folder / "die-while-loading").unlink()
            os._exit(1)

    def load_weights(self, weights: Weights) -> None:
        self._die_if_told()
        ((_, tensor),) = weights
        self._version = float(tensor)

    def score(self, *args: object) -> list[list[float]]:
        return [[self._version]]

    def sleep(self, level: int) -> None:
        (self._folder / f"asleep-{os.getpid()}-{level}").touch()

    def wake_up(self, weights_only: bool) -> None:
        (self._folder / f"awake-{os.getpid()}").touch()

    def init_weight_transfer_engine(self, init_info: dict[str, int]) -> None:
        (self._folder / f"first-rank-{init_info['rank_offset']}").touch()

    def start_weight_update(self) -> None:
        self._die_if_told()

    def update_weights(self, update_info: dict[str, float]) -> None:
        self._version = update_info["version"]

    def finish_weight_update(self, weight_version: str | None) -> None:
        pass

    def close(self) -> None:
        pass
