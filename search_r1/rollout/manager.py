"""The rollout loop: the policy and the environment take turns."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from search_r1.config import RolloutConfig
from search_r1.errors import VoidLimitError
from search_r1.protocols import Environment, RolloutEngine
from search_r1.rollout.rolling_state import RollingState, TurnRequest
from search_r1.types import Completion, Prompt, SamplingConfig, Status, Trajectory

OnTurn = Callable[[int, int], None]
"""Called after every turn with the numbers of finished and of all trajectories."""


class LLMGenerationManager:
    """Rolls a batch of prompts forward until every trajectory has ended.

    A trajectory acts `max_turns` times; one last generation follows, whose search is not executed.
    """

    def __init__(self, engine: RolloutEngine, environment: Environment, config: RolloutConfig) -> None:
        self.engine = engine
        self.environment = environment
        self.config = config

    def run_llm_loop(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        policy_version: int = 0,
        on_turn: OnTurn | None = None,
    ) -> list[Trajectory]:
        """One finished trajectory a prompt, in order, in the lockstep schedule: all that run take a turn together.

        `sampling.stop` is replaced by the environment's stop strings; a turn samples at most `max_response_length`
        tokens, or what is left of the context budget.

        Raises:
            VoidLimitError: more than `max_void_share` of the trajectories were lost to infrastructure failures.
        """
        state = RollingState(prompts, self.config, replace(sampling, stop=self.environment.stop), policy_version)
        while active := state.active:
            completions = self._generate([state.request(index) for index in active])
            for index, completion in zip(active, completions, strict=True):
                state.append_completion(index, completion, self.environment.parse(completion))
            self._observe(state)
            check_void_share(state.trajectories, self.config.max_void_share)
            if on_turn is not None:
                on_turn(len(prompts) - len(state.active), len(prompts))
        return state.trajectories

    def _generate(self, requests: Sequence[TurnRequest]) -> list[Completion]:
        """One engine call for all rows; rows that are short of room go with those that have the same room."""
        rows_by_sampling: defaultdict[SamplingConfig, list[int]] = defaultdict(list)
        for row, request in enumerate(requests):
            rows_by_sampling[request.sampling].append(row)
        completions: dict[int, Completion] = {}
        for sampling, rows in rows_by_sampling.items():
            contexts = [requests[row].context for row in rows]
            seeds = [requests[row].seed for row in rows]
            completions.update(zip(rows, self.engine.generate(contexts, sampling, seeds), strict=True))
        return [completions[row] for row in range(len(requests))]

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


def check_void_share(trajectories: Sequence[Trajectory], max_void_share: float) -> None:
    """Stop a step of which too much was lost, with the commonest cause.

    Raises:
        VoidLimitError: the share of VOID trajectories is above `max_void_share`.
    """
    causes = Counter(trajectory.failure for trajectory in trajectories if trajectory.status is Status.VOID)
    if causes.total() > max_void_share * len(trajectories):
        (cause, count), total = causes.most_common(1)[0], causes.total()
        raise VoidLimitError(
            f"{total} of {len(trajectories)} trajectories failed, above rollout.max_void_share={max_void_share}; "
            f"the commonest cause ({count} of {total}): {cause}"
        )
