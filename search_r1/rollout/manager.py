"""The rollout loop: the policy and the environment take turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from search_r1.config import RolloutConfig
from search_r1.errors import EngineLostError
from search_r1.protocols import Environment, RolloutEngine
from search_r1.rollout.async_schedule import AsyncLimits, AsyncSchedule, OnTurn, no_completion
from search_r1.rollout.blocking import BoundedCaller, generate_turns
from search_r1.rollout.event_loop import EventLoopThread, Job
from search_r1.rollout.rolling_state import RollingState, check_void_share
from search_r1.types import Prompt, SamplingConfig, Trajectory


class LLMGenerationManager:
    """Rolls a batch of prompts forward until every trajectory has ended.

    A trajectory acts `max_turns` times; one last generation follows, whose search is not executed. In the lockstep
    schedule all that run take a turn together, in the asynchronous one each is a task of its own; under greedy
    decoding both give the same trajectories. `auto` is asynchronous where the engine is.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        environment: Environment,
        config: RolloutConfig,
        limits: AsyncLimits | None = None,
    ) -> None:
        self.engine = engine
        self.environment = environment
        self.config = config
        self._limits = limits or AsyncLimits()
        self._bounded = BoundedCaller("lockstep")
        self._thread: EventLoopThread | None = None
        self._async: AsyncSchedule | None = None
        if config.schedule == "async" or (config.schedule == "auto" and hasattr(engine, "agenerate")):
            self._async = AsyncSchedule(engine, environment, self._limits, config.max_void_share)

    def run_llm_loop(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        policy_version: int = 0,
        on_turn: OnTurn | None = None,
    ) -> list[Trajectory]:
        """One finished trajectory a prompt, in order.

        `sampling.stop` is replaced by the environment's stop strings; a turn samples at most `max_response_length`
        tokens, or what is left of the context budget.

        Raises:
            VoidLimitError: more than `max_void_share` of the trajectories were lost to infrastructure failures.
        """
        if self._async is not None:
            return self.start(prompts, sampling, policy_version, on_turn).result()
        state = self._begin(prompts, sampling, policy_version)
        while active := state.active:
            self._generate(state, active)
            self._observe(state)
            check_void_share(state.trajectories, self.config.max_void_share)
            if on_turn is not None:
                on_turn(len(prompts) - len(state.active), len(prompts))
        return state.trajectories

    def start(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        policy_version: int = 0,
        on_turn: OnTurn | None = None,
    ) -> Job[list[Trajectory]]:
        """The same in the background; only in the asynchronous schedule. `on_turn` is called from another thread."""
        assert self._async is not None, f"rollout.schedule={self.config.schedule} cannot roll out in the background"
        if self._thread is None:
            self._thread = EventLoopThread("rollout")
        return self._thread.submit(self._async.roll_out(self._begin(prompts, sampling, policy_version), on_turn))

    def weights_changed(self, policy_version: int) -> None:
        """The engine has new weights: trajectories that begin from now on carry this version."""
        if self._async is not None:
            self._async.policy_version = policy_version

    def close(self) -> None:
        """Cancel what runs in the background, and close what the environment opened for it."""
        self._bounded.close()
        thread, self._thread = self._thread, None
        if thread is not None:
            if hasattr(self.environment, "aclose"):
                thread.submit(self.environment.aclose()).result()
            thread.close()
        if hasattr(self.environment, "close"):
            self.environment.close()

    def _begin(self, prompts: Sequence[Prompt], sampling: SamplingConfig, policy_version: int) -> RollingState:
        return RollingState(prompts, self.config, replace(sampling, stop=self.environment.stop), policy_version)

    def _generate(self, state: RollingState, active: Sequence[int]) -> None:
        """One turn of all that run; where the engine is lost, or gives no answer in time, they are void."""
        requests, limit = [state.request(index) for index in active], self._limits.generation_timeout_s
        try:
            completions = self._bounded(lambda: generate_turns(self.engine, requests), limit)
        except (EngineLostError, TimeoutError) as lost:
            error = lost if isinstance(lost, EngineLostError) else no_completion(limit)
            for index in active:
                state.void(index, str(error))
            return
        for index, completion in zip(active, completions, strict=True):
            state.append_completion(index, completion, self.environment.parse(completion))

    def _observe(self, state: RollingState) -> None:
        """Let the environment answer, in one call, every trajectory that still runs."""
        active = state.active
        if not active:
            return
        trajectories = [state.trajectories[index] for index in active]
        actions = [trajectory.turns[-1].action for trajectory in trajectories]
        observations = self.environment.step(actions, [trajectory.prompt for trajectory in trajectories])
        for index, observation in zip(active, observations, strict=True):
            state.append_observation(index, observation)
