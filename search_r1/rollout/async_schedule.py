"""The asynchronous schedule: every trajectory is a task of its own, and searching overlaps generating."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from search_r1.errors import EngineLostError
from search_r1.protocols import Environment, RolloutEngine
from search_r1.rollout.blocking import Gathered, as_async_engine, as_async_environment
from search_r1.rollout.rolling_state import RollingState, TurnRequest, check_void_share
from search_r1.types import Completion, Observation, Status, Trajectory

OnTurn = Callable[[int, int], None]
"""Called after every turn with the numbers of finished and of all trajectories."""


@dataclass(frozen=True, slots=True)
class AsyncLimits:
    """How much may be in flight at once, over all batches, and how long one call may take."""

    max_generations: int = 256
    max_searches: int = 256
    generation_timeout_s: float = 600.0
    search_timeout_s: float = 600.0
    """Of one environment call with whatever retries it makes."""


def no_completion(timeout_s: float) -> EngineLostError:
    return EngineLostError(f"the engine gave no completion within engine.timeout_s={timeout_s:g}")


class AsyncSchedule:
    """Rolls batches forward on one event loop; those that overlap share the limits.

    A call that outlives its deadline, and an engine that is lost for good, void the one trajectory that waited for it.
    """

    def __init__(
        self, engine: RolloutEngine, environment: Environment, limits: AsyncLimits, max_void_share: float
    ) -> None:
        self._engine = as_async_engine(engine)
        self._environment = as_async_environment(environment)
        self._parse = environment.parse
        self._limits = limits
        self._max_void_share = max_void_share
        self._generations = asyncio.Semaphore(limits.max_generations)
        self._searches = asyncio.Semaphore(limits.max_searches)
        self.policy_version = 0
        """The weights that the engine has now; a trajectory that begins later than its batch is sampled by them."""

    async def roll_out(self, state: RollingState, on_turn: OnTurn | None = None) -> list[Trajectory]:
        """Every trajectory to its end, each at its own pace. The first error cancels all others and is raised.

        Raises:
            VoidLimitError: more than `max_void_share` of the trajectories were lost to infrastructure failures.
        """
        active = state.active
        num_ended = len(state.trajectories) - len(active)

        async def roll(index: int) -> None:
            nonlocal num_ended
            trajectory = state.trajectories[index]
            while trajectory.status is Status.RUNNING:
                await self._take_turn(state, index)
                if trajectory.failure:
                    check_void_share(state.trajectories, self._max_void_share)
                num_ended += trajectory.status is not Status.RUNNING
                if on_turn is not None:
                    on_turn(num_ended, len(state.trajectories))

        try:
            async with asyncio.TaskGroup() as tasks:
                for index in active:
                    tasks.create_task(roll(index))
        except BaseException as error:  # noqa: BLE001  raised again
            await self._settle()
            raise (error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error) from None
        return state.trajectories

    async def _settle(self) -> None:
        """Where a call was given up, a blocking engine or environment may still be at it."""
        if isinstance(self._engine, Gathered):
            await self._engine.settle(self._limits.generation_timeout_s)
        if isinstance(self._environment, Gathered):
            await self._environment.settle(self._limits.search_timeout_s)

    async def _take_turn(self, state: RollingState, index: int) -> None:
        trajectory = state.trajectories[index]
        try:
            async with self._generations:
                if not trajectory.turns:
                    trajectory.policy_version = max(trajectory.policy_version, self.policy_version)
                completion = await self._generate(state.request(index))
        except EngineLostError as error:
            state.void(index, str(error))
            return
        state.append_completion(index, completion, self._parse(completion))
        if trajectory.status is Status.RUNNING:
            async with self._searches:
                observation = await self._observe(trajectory)
            state.append_observation(index, observation)

    async def _generate(self, request: TurnRequest) -> Completion:
        limit = self._limits.generation_timeout_s
        try:
            async with asyncio.timeout(limit):
                return await self._engine.agenerate(request.context, request.sampling, request.seed)
        except TimeoutError as error:
            raise no_completion(limit) from error

    async def _observe(self, trajectory: Trajectory) -> Observation:
        limit = self._limits.search_timeout_s
        try:
            async with asyncio.timeout(limit):
                return await self._environment.astep(trajectory.turns[-1].action, trajectory.prompt)
        except TimeoutError:
            return Observation("", (), seconds=limit, failure=f"the environment gave no answer within {limit:g} s")
