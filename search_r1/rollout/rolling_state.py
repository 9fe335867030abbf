"""The trajectories of one batch while they roll forward, each at its own turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from search_r1.config import RolloutConfig
from search_r1.errors import VoidLimitError
from search_r1.types import Action, Completion, Observation, Prompt, SamplingConfig, Status, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What an engine needs to sample one turn of one trajectory."""

    context: list[int]
    sampling: SamplingConfig
    """`max_new_tokens` is the room this trajectory has left, where that is less than a turn's limit."""
    seed: int


class RollingState:
    """Holds every trajectory of a batch; only it appends tokens and ends trajectories.

    Tokens are appended, never changed, and the loss mask is written in the same moment: what was sampled is what is
    trained on. At any time `response_ids` is the turns' completions and observations one after the other.
    All methods speak of one trajectory by its index in the batch, so that a schedule may advance them in any order.
    """

    def __init__(
        self, prompts: Sequence[Prompt], config: RolloutConfig, sampling: SamplingConfig, policy_version: int = 0
    ) -> None:
        self._config = config
        self._sampling = sampling
        self.trajectories = [Trajectory(prompt, policy_version=policy_version) for prompt in prompts]
        for index, trajectory in enumerate(self.trajectories):
            if len(trajectory.prompt.token_ids) > config.max_start_length or self.room(index) < 1:
                trajectory.status = Status.OUT_OF_TOKENS

    @property
    def active(self) -> list[int]:
        """Indices of the trajectories that still run."""
        return [index for index, trajectory in enumerate(self.trajectories) if trajectory.status is Status.RUNNING]

    def room(self, index: int) -> int:
        """Tokens that still fit into the context budget."""
        trajectory = self.trajectories[index]
        return self._config.max_prompt_length - len(trajectory.prompt.token_ids) - len(trajectory.response_ids)

    def request(self, index: int) -> TurnRequest:
        """The next turn of a running trajectory, seeded by its index and turn whoever its batch-mates are."""
        trajectory = self.trajectories[index]
        assert trajectory.status is Status.RUNNING, f"trajectory {index} has ended: {trajectory.status}"
        limit = min(self._sampling.max_new_tokens, self._config.max_response_length, self.room(index))
        seed = turn_seed(self._sampling.seed, index, len(trajectory.turns))
        return TurnRequest(trajectory.context_ids, replace(self._sampling, max_new_tokens=limit), seed)

    def append_completion(self, index: int, completion: Completion, action: Action) -> None:
        """Append a sampled turn. An answer, an ending, the last turn or a full context ends the trajectory."""
        trajectory, num_sampled = self.trajectories[index], len(completion.token_ids)
        assert num_sampled <= self.room(index), f"{num_sampled} sampled tokens in a room of {self.room(index)}"
        _append(trajectory, completion.token_ids, completion.log_probs, sampled=True)
        trajectory.turns.append(Turn(completion, action))
        if action.kind in ("answer", "final"):
            trajectory.status = Status.ANSWERED
        elif self.room(index) < 1:
            trajectory.status = Status.OUT_OF_TOKENS
        elif len(trajectory.turns) > self._config.max_turns or self._gave_up(completion, action):
            trajectory.status = Status.OUT_OF_TURNS

    def _gave_up(self, completion: Completion, action: Action) -> bool:
        """The turn ended with the end-of-text token and no action, and the config or the environment lets that end
        the trajectory."""
        ended_by_tag = any(stop in completion.text for stop in self._sampling.stop)
        ended_by_eos = completion.finish_reason == "stop" and not ended_by_tag
        return action.kind == "end" or (self._config.end_on_eos and ended_by_eos and action.kind == "invalid")

    def append_observation(self, index: int, observation: Observation) -> None:
        """Append what the environment answered to the last turn.

        A failed one voids the trajectory. One that leaves no room for another sampled token ends it OUT_OF_TOKENS and
        is left out: nothing would ever be sampled after it.
        """
        trajectory = self.trajectories[index]
        if observation.failure:
            self.void(index, observation.failure)
        elif len(observation.token_ids) >= self.room(index):
            trajectory.status = Status.OUT_OF_TOKENS
        else:
            _append(trajectory, observation.token_ids, [0.0] * len(observation.token_ids), sampled=False)
            trajectory.turns[-1].observation = observation

    def void(self, index: int, cause: str) -> None:
        """End a trajectory that an infrastructure failure cut short: it is counted and shown, never trained on."""
        trajectory = self.trajectories[index]
        trajectory.status, trajectory.failure = Status.VOID, cause


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


def turn_seed(seed: int, index: int, turn: int) -> int:
    """A 63-bit seed for one turn of one trajectory, the same on every machine and in every schedule."""
    digest = blake2b(f"{seed}/{index}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _append(trajectory: Trajectory, token_ids: Sequence[int], log_probs: Sequence[float], *, sampled: bool) -> None:
    assert len(token_ids) == len(log_probs), f"{len(token_ids)} tokens with {len(log_probs)} log-probs"
    trajectory.response_ids.extend(token_ids)
    trajectory.log_probs.extend(log_probs)
    trajectory.loss_mask.extend([sampled] * len(token_ids))
