"""The trajectories of each step: rolled out when the step asks for them, or ahead of it while the policy is updated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from search_r1.config import Config
from search_r1.data.questions import QuestionStream
from search_r1.protocols import State
from search_r1.rollout.event_loop import Job
from search_r1.trainer.step import Roles
from search_r1.types import Prompt, Question, SamplingConfig, Trajectory

OnTurn = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A batch that is rolled out in the background."""

    job: Job[list[Trajectory]]
    data_state: State
    """Where the questions stood once this batch was drawn."""


class StepRollouts:
    """Draws questions and rolls them out.

    With `rollout.max_staleness` of s, the batches of the next s steps are under way while a step is learned: each is
    trained on at most s updates after it was begun.
    """

    def __init__(self, roles: Roles, stream: QuestionStream, config: Config, total_steps: int) -> None:
        self._roles = roles
        self._stream = stream
        self._config = config
        self._total_steps = total_steps
        self._ahead: deque[_Ahead] = deque()
        self._last_begun = 0
        self._data_state = stream.state()

    def take(self, step: int, on_turn: OnTurn | None = None) -> list[Trajectory]:
        """What `step` trains on. Steps are taken in order."""
        manager, staleness = self._roles.manager, self._config.rollout.max_staleness
        if staleness == 0:
            prompts, sampling = self._draw(step)
            self._data_state = self._stream.state()
            with self._roles.life_cycle.generating():
                return manager.run_llm_loop(prompts, sampling, step - 1, on_turn)
        self._begin(step, until=step)
        ahead = self._ahead.popleft()
        trajectories = ahead.job.result()
        self._data_state = ahead.data_state
        self._begin(step, until=step + staleness)
        return trajectories

    def state(self) -> State:
        """Where the questions stood once those of the last step taken were drawn; what is ahead is drawn again."""
        return self._data_state

    def close(self) -> None:
        """Cancel what is ahead."""
        while self._ahead:
            self._ahead.pop().job.cancel()

    def _begin(self, step: int, until: int) -> None:
        """Begin the batches up to step `until` that are not yet under way, with the weights that `step` begins with."""
        for later in range(max(self._last_begun + 1, step), min(until, self._total_steps) + 1):
            prompts, sampling = self._draw(later)
            job = self._roles.manager.start(prompts, sampling, step - 1)
            self._ahead.append(_Ahead(job, self._stream.state()))
            self._last_begun = later

    def _draw(self, step: int) -> tuple[list[Prompt], SamplingConfig]:
        rollout = self._config.rollout
        prompts = make_prompts(self._roles.encode_prompt, self._stream.next_batch(), rollout.group_size)
        seed = self._config.seed + step
        return prompts, SamplingConfig(rollout.max_response_length, rollout.temperature, rollout.top_p, seed=seed)


def make_prompts(
    encode_prompt: Callable[[Question], tuple[int, ...]], questions: Sequence[Question], group_size: int
) -> list[Prompt]:
    """Each question `group_size` times; the group is the place in the batch, so equal rows stay apart."""
    return [
        Prompt(question, group_id, token_ids)
        for group_id, question in enumerate(questions)
        for token_ids in [encode_prompt(question)]
        for _ in range(group_size)
    ]
