"""Do engine and trainer give the same tokens the same log-probs? Looked at after each sync, and explained if not.

P probes; K candidates of each.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from search_r1.config import Config
from search_r1.errors import SearchR1Error, TrainingError
from search_r1.protocols import Metrics, Scorer
from search_r1.trainer.life_cycle import LifeCycle
from search_r1.types import RolloutBatch, SamplingConfig, Status, Trajectory

logger = logging.getLogger(__name__)

_FIRST_LOOK, _SECOND_LOOK, _DIAGNOSIS = 8, 64, 12
"""Probes: usually; when these disagree, before anybody is alarmed; and to find the cause."""
_DOUBTFUL = 8
"""Of so many drawn places the least likely token is looked at: a policy that is sure of a token hides a difference."""
_CANDIDATES = 6
_FEWEST_TO_FIT = 4
"""Candidates: fewer than these lie on a line too easily."""
_LEVEL = 1e-3
"""Log-probs of an even distribution differ by less."""
_FACTOR = 3.0
"""An explanation leaves less than this part of the difference."""

CAUSES = {
    "stale weights": "the engine samples under other weights than were sent",
    "stale head": "the engine multiplies by another output head than was sent",
    "stale prefix cache": "it agrees as soon as its cache is dropped",
    "sampling parameters": "its log-probs are those of another temperature, or of a distribution that was cut",
    "precision": "rounding in the rollout dtype alone moves the trainer's log-probs as far; set engine.dtype and "
    "model.dtype to the same, or raise engine.max_parity_error",
    "re-tokenisation": "its log-probs are those of the contexts decoded and encoded again",
}


class LogProbs(Protocol):
    def __call__(self, batch: RolloutBatch) -> Tensor:
        """(B, T) at the sampling temperature, 0 outside the loss mask."""
        ...


class Resend(Protocol):
    def __call__(self, edit: str = "") -> Metrics:
        """Carry the policy's weights to the engine; `edit` names how they are changed on the way (see `EDITS`)."""
        ...


EDITS = {"stale weights": ("no_norm", "no_offset_norm"), "stale head": ("flat_head",)}
"""What is stale if none of these changes of the weights makes every token equally likely: the final norm multiplies by
zero, or all rows of the output head are the same."""


@dataclass(frozen=True, slots=True)
class ProbedEngine:
    """The engines as one: what each of them says."""

    score: Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]], SamplingConfig], list[list[list[float]]]]
    """As `ScoringEngine.score`, one table an engine."""
    forget: Callable[[], object]
    """All drop what they cached."""


@dataclass(frozen=True, slots=True)
class Probes:
    """Places in trajectories, and tokens that may stand there."""

    contexts: list[list[int]]
    candidates: list[list[int]]
    """The token that was sampled there comes first."""
    recorded: list[float] = field(default_factory=list)
    """The engine's log-prob of that token when it was sampled."""


def choose(
    trajectories: Sequence[Trajectory], count: int, seed: int, *, num_candidates: int = 1, num_places: int = 1
) -> Probes:
    """`count` sampled tokens of as many trajectories as can be, drawn by `seed`.

    Each is the one of `num_places` drawn places whose token was the least likely. With 1 place they stand for all.
    """
    draws = random.Random(seed)
    kept = [t for t in trajectories if t.status is not Status.VOID and any(t.loss_mask)]
    drawn = [draws.choice(kept) for _ in range(max(count - len(kept), 0))] if kept else []
    probes = Probes([], [])
    for trajectory in [*draws.sample(kept, min(count, len(kept))), *drawn]:
        places = [place for place, is_sampled in enumerate(trajectory.loss_mask) if is_sampled]
        place = min(draws.choices(places, k=num_places), key=trajectory.log_probs.__getitem__)
        probes.contexts.append([*trajectory.prompt.token_ids, *trajectory.response_ids[:place]])
        probes.candidates.append([trajectory.response_ids[place]])
        probes.recorded.append(trajectory.log_probs[place])
    others = [tokens[0] for tokens in probes.candidates]
    for context, tokens in zip(probes.contexts, probes.candidates, strict=True):
        tokens += list(dict.fromkeys(t for t in [*others, *context] if t != tokens[0]))[: num_candidates - 1]
    fewest = min(map(len, probes.candidates), default=0)
    return replace(probes, candidates=[tokens[:fewest] for tokens in probes.candidates])


class Parity:
    """Compares after each sync, and stops a run whose engine does not sample from the trainer's policy."""

    def __init__(
        self,
        engine: ProbedEngine,
        trainer: LogProbs,
        trainer_in_rollout_dtype: LogProbs,
        resend: Resend,
        recode: Callable[[Sequence[int]], list[int]],
        sampling: SamplingConfig,
        max_error: float,
    ) -> None:
        """
        Args:
            trainer, trainer_in_rollout_dtype: Score with the policy's current weights.
            resend: Syncs once more, to see what arrives. Only called for a run that stops.
            recode: Decodes token ids and encodes the text again.
            sampling: As in training.
            max_error: Largest mean absolute difference of log-probs.
        """
        self._engine = engine
        self._trainer = trainer
        self._trainer_in_rollout_dtype = trainer_in_rollout_dtype
        self._resend = resend
        self._recode = recode
        self._sampling = sampling
        self._max_error = max_error

    def __call__(self, trajectories: Sequence[Trajectory], step: int) -> Metrics:
        """To be called between a sync and the next rollout. The first look is at doubtful tokens, the second at all.

        Raises:
            TrainingError: the two differ by more than `max_error`, with the cause.
        """
        gap = 0.0
        for count, num_places in ((_FIRST_LOOK, _DOUBTFUL), (_SECOND_LOOK, 1)):
            probes = choose(trajectories, count, step, num_places=num_places)
            if not probes.contexts:
                return {}
            expected = self._trained(probes)
            gap = max((_gap(found, expected) for found in self._scores(probes)), default=0.0)
            if gap <= self._max_error:
                return {"parity/log_prob_gap": gap}
        raise TrainingError(
            f"step {step}: after the weight sync, engine and trainer log-probs of the same tokens differ by {gap:.3g} "
            f"on average, above engine.max_parity_error={self._max_error}: {self.diagnose(trajectories, step)}"
        )

    def diagnose(self, trajectories: Sequence[Trajectory], step: int) -> str:
        """Name the cause as far as probes find it. The engine's weights are undefined afterwards."""
        try:
            probes = choose(trajectories, _DIAGNOSIS, step, num_candidates=_CANDIDATES, num_places=_DOUBTFUL)
            cause = self._find(probes)
        except (SearchR1Error, LookupError, ValueError) as error:  # the latter two: an engine left meanwhile
            return f"the cause was not found, since a probe failed ({error})"
        return f"{cause}: {CAUSES[cause]}" if cause else f"none of its probes ({', '.join(CAUSES)}) found the cause"

    def _find(self, probes: Probes) -> str | None:
        """The first explanation that holds: what can be seen without touching the weights comes first."""
        expected = self._trained(probes)
        tables = self._scores(probes)
        worst = max(range(len(tables)), key=lambda engine: _gap(tables[engine], expected))
        found, gap = tables[worst], _gap(tables[worst], expected)
        self._engine.forget()
        if _gap(self._scores(probes)[worst], expected) <= min(self._max_error, gap / _FACTOR):
            return "stale prefix cache"
        if _is_reshaped(found, expected, gap):
            return "sampling parameters"
        if self._matches_recoded(probes, found, gap):
            return "re-tokenisation"
        for cause, edits in EDITS.items():
            if not any(self._arrives(edit, probes, worst) for edit in edits):
                return cause
        self._resend()
        if _gap(self._scores(probes)[worst], expected) <= min(self._max_error, gap / _FACTOR):
            return "stale weights"
        rounded = self._score(self._trainer_in_rollout_dtype, probes)
        if _gap(found, rounded) <= gap / _FACTOR or _gap(rounded, expected) >= gap / _FACTOR:
            return "precision"
        recorded = torch.tensor(probes.recorded)[:, None]
        if _gap(found[:, :1], recorded) <= _gap(found[:, :1], expected[:, :1]) / _FACTOR:
            return "stale weights"
        return None

    def _arrives(self, edit: str, probes: Probes, engine: int) -> bool:
        """Plain weights go ahead, so that an engine that is one sync behind does not show the edit before this one."""
        self._resend()
        self._resend(edit)
        return _is_even(self._scores(probes)[engine])

    def _matches_recoded(self, probes: Probes, found: Tensor, gap: float) -> bool:
        contexts = [self._recode(context) for context in probes.contexts]
        if contexts == probes.contexts or not all(contexts):
            return False
        return _gap(found, self._trained(Probes(contexts, probes.candidates))) <= gap / _FACTOR

    def _scores(self, probes: Probes) -> list[Tensor]:
        """(P, K) of each engine."""
        return [torch.tensor(t) for t in self._engine.score(probes.contexts, probes.candidates, self._sampling)]

    def _trained(self, probes: Probes) -> Tensor:
        return self._score(self._trainer, probes)

    def _score(self, log_probs: LogProbs, probes: Probes) -> Tensor:
        """(P, K): each candidate as the last token of a row of its own."""
        rows = [
            [*context, token]
            for context, tokens in zip(probes.contexts, probes.candidates, strict=True)
            for token in tokens
        ]
        lengths = torch.tensor([len(row) for row in rows])
        input_ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        columns = torch.arange(input_ids.shape[1])
        last = columns == lengths[:, None] - 1
        nothing = torch.zeros(len(rows))
        batch = RolloutBatch(
            input_ids, columns < lengths[:, None], last, torch.zeros(input_ids.shape), nothing, nothing.long()
        )
        return log_probs(batch)[last].view(len(probes.contexts), -1)


def build_parity(
    config: Config, tokenizer: Any, engine: Any, score: Scorer, life_cycle: LifeCycle, sync: Resend
) -> Parity:
    """What compares engine and trainer after each sync."""

    def score_each(*args: Any) -> list[list[list[float]]]:
        return engine.score_each(*args) if hasattr(engine, "score_each") else [engine.score(*args)]

    def recode(token_ids: Sequence[int]) -> list[int]:
        text = tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return list(tokenizer.encode(text, add_special_tokens=False))

    return Parity(
        ProbedEngine(life_cycle.sampling(score_each), engine.forget),
        life_cycle.training(lambda batch: score(batch, ["policy"])["policy"]),
        life_cycle.training(lambda batch: score(batch, ["recast_policy"])["recast_policy"]),
        life_cycle.awake(sync),
        recode,
        SamplingConfig(1, config.rollout.temperature, config.rollout.top_p),
        config.engine.max_parity_error,
    )


def _gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().mean())


def _is_even(log_probs: Tensor) -> bool:
    return bool((log_probs.amax(dim=1) - log_probs.amin(dim=1)).max() < _LEVEL)


def _is_reshaped(found: Tensor, expected: Tensor, gap: float) -> bool:
    """Tokens were ruled out, or, up to what normalises each row, `found` is a multiple of `expected`."""
    if bool(found.isinf().any()) or found.shape[1] < _FEWEST_TO_FIT:
        return bool(found.isinf().any())
    a, b = expected - expected.mean(dim=1, keepdim=True), found - found.mean(dim=1, keepdim=True)
    slope = (a * b).sum() / (a * a).sum().clamp(min=1e-12)
    return _gap(b, slope * a) <= gap / (3 * _FACTOR)
