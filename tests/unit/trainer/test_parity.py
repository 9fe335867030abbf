"""An engine with one deliberate fault: the check after the sync stops the run and names it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from search_r1.engines.hf_engine import HFEngine
from search_r1.engines.weights import edited
from search_r1.errors import EngineError, TrainingError
from search_r1.protocols import Weights
from search_r1.trainer.parity import CAUSES, Parity, ProbedEngine, choose
from search_r1.types import Prompt, RolloutBatch, SamplingConfig, Status, Trajectory
from tests.fakes import make_question
from tests.model_factory import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SAMPLING = SamplingConfig(1, temperature=0.8)
Table = list[list[float]]


def recode(token_ids: Sequence[int]) -> list[int]:
    return list(TOKENIZER.encode(TOKENIZER.decode(list(token_ids)), add_special_tokens=False))


class StaleWeights(HFEngine):
    def load_weights(self, weights: Weights) -> None:
        self.forget()
        for _ in weights:
            pass


class OneSyncBehind(HFEngine):
    """It takes the weights of the sync before."""

    _late: dict[str, Tensor] | None = None

    def load_weights(self, weights: Weights) -> None:
        arrived = {name: tensor.detach().clone() for name, tensor in weights}
        super().load_weights((self._late or arrived).items())
        self._late = arrived


class StaleHead(HFEngine):
    """It multiplies by a copy of the head that a sync does not reach."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        packed = model.get_output_embeddings().weight.detach().clone()
        model.lm_head.forward = lambda states: linear(states, packed)


class StalePrefixCache(HFEngine):
    _is_loading = False

    def load_weights(self, weights: Weights) -> None:
        self._is_loading = True
        super().load_weights(weights)
        self._is_loading = False

    def forget(self) -> None:
        if not self._is_loading:
            super().forget()


class OtherTemperature(HFEngine):
    def score(self, contexts: Any, candidates: Any, sampling: SamplingConfig) -> Table:
        return super().score(contexts, candidates, SamplingConfig(1, temperature=1.0))


class CutDistribution(HFEngine):
    """It samples from the likelier half of the vocabulary, though nobody asked it to."""

    def score(self, contexts: Any, candidates: Any, sampling: SamplingConfig) -> Table:
        size = len(TOKENIZER)
        scores = torch.tensor(super().score(contexts, [list(range(size))] * len(contexts), sampling))
        least = scores.median(dim=1, keepdim=True).values
        cut = scores.where(scores >= least, -torch.inf).log_softmax(dim=1)
        return [row[tokens].tolist() for row, tokens in zip(cut, candidates, strict=True)]


class LowPrecision(HFEngine):
    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer, dtype=torch.bfloat16)


class Retokenizing(HFEngine):
    def score(self, contexts: Any, candidates: Any, sampling: SamplingConfig) -> Table:
        return super().score([recode(context) for context in contexts], candidates, sampling)


FAULTS = {
    "stale weights": StaleWeights,
    "stale weights, one sync behind": OneSyncBehind,
    "stale head": StaleHead,
    "stale prefix cache": StalePrefixCache,
    "sampling parameters, another temperature": OtherTemperature,
    "sampling parameters, tokens ruled out": CutDistribution,
    "precision": LowPrecision,
    "re-tokenisation": Retokenizing,
}


class Run:
    """A model that is trained, an engine with a copy of it, and trajectories that the engine sampled."""

    def __init__(self, kind: type[HFEngine], tied: bool, architecture: str = "qwen2") -> None:
        self.model = tiny_model(architecture, tied=tied)
        self.engine = kind(copy.deepcopy(self.model), TOKENIZER)
        self.others: list[HFEngine] = []
        self.sent: list[str] = []
        self.sync()
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(3, len(TOKENIZER), (10, 40), generator=generator).tolist()
        self.engine.score(rows * 7, [[0]] * 70, SAMPLING)  # leaves them in a cache of many rows
        self.trajectories = [
            Trajectory(
                Prompt(make_question(), group, tuple(ids[:15])),
                ids[15:],
                [True] * 25,
                [-1.0] * 25,
                status=Status.ANSWERED,
            )
            for group, ids in enumerate(rows)
        ]

    def learn(self) -> None:
        """An update."""
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)

    def sync(self, edit: str = "") -> dict[str, float]:
        self.sent.append(edit)
        for engine in [self.engine, *self.others]:
            engine.load_weights(edited(self.model.named_parameters(), edit))
        return {}

    def log_probs(self, batch: RolloutBatch) -> Tensor:
        with torch.no_grad():
            logits = self.model(batch.input_ids, attention_mask=batch.attention_mask).logits
        before = (logits[:, :-1].float() / SAMPLING.temperature).log_softmax(-1)
        found = before.gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
        return torch.cat([torch.zeros(len(found), 1), found], dim=1).where(batch.loss_mask, 0.0)

    def log_probs_in_bfloat16(self, batch: RolloutBatch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.log_probs(batch)

    def check(self, max_error: float = 1e-3) -> dict[str, float]:
        engines = [*self.others, self.engine]
        probed = ProbedEngine(
            lambda *args: [engine.score(*args) for engine in engines], lambda: [engine.forget() for engine in engines]
        )
        parity = Parity(probed, self.log_probs, self.log_probs_in_bfloat16, self.sync, recode, SAMPLING, max_error)
        return parity(self.trajectories, 3)


@contextmanager
def stopped(message: str) -> Iterator[None]:
    with pytest.raises(TrainingError, match=message):
        yield


both = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


@both
@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_of_an_engine_is_named_by_its_probe(fault: str, tied: bool) -> None:
    run = Run(FAULTS[fault], tied)
    run.learn()
    run.sync()
    cause = fault.split(",")[0]
    with stopped(rf"step 3: after the weight sync, .* above engine.max_parity_error=0.001: {cause}: {CAUSES[cause]}"):
        run.check()


@pytest.mark.parametrize("fault", ["stale weights", "stale head", "precision"])
def test_a_fault_is_named_also_where_a_norm_adds_one_to_its_weight(fault: str) -> None:
    run = Run(FAULTS[fault], tied=True, architecture="gemma")
    run.learn()
    run.sync()
    with stopped(f"max_parity_error=1e-05: {fault}"):
        run.check(max_error=1e-5)


@both
def test_an_engine_without_a_fault_agrees_and_is_left_alone(tied: bool) -> None:
    run = Run(HFEngine, tied)
    run.learn()
    run.sync()
    assert run.check()["parity/log_prob_gap"] < 1e-5
    assert run.sent == ["", ""]


def test_one_faulty_engine_among_several_is_found() -> None:
    run = Run(StaleHead, tied=True)
    run.others = [HFEngine(copy.deepcopy(run.model), TOKENIZER) for _ in range(3)]
    run.learn()
    run.sync()
    with stopped("stale head"):
        run.check()


def test_weights_that_were_lost_once_are_called_stale() -> None:
    """A single transfer failed silently; the same transfer done again mends it."""
    run = Run(HFEngine, tied=True)
    run.learn()
    with stopped("stale weights"):
        run.check()


def test_a_difference_without_a_known_cause_is_told_as_such() -> None:
    class Noisy(HFEngine):
        def score(self, contexts: Any, candidates: Any, sampling: SamplingConfig) -> Table:
            rows = zip(super().score(contexts, candidates, sampling), candidates, strict=True)
            if run.sent[-1]:  # an edit arrives as it should
                return [row for row, _ in rows]
            return [[v + (t % 7 - 3) / 2 for v, t in zip(row, tokens, strict=True)] for row, tokens in rows]

    run = Run(HFEngine, tied=True)
    run.engine = Noisy(copy.deepcopy(run.model), TOKENIZER)
    with stopped(r"none of its probes \(stale weights, stale head, .*\) found the cause"):
        run.check()


def test_a_probe_that_fails_does_not_hide_the_difference() -> None:
    run = Run(StaleWeights, tied=True)
    run.learn()

    def fail(edit: str = "") -> dict[str, float]:
        raise EngineError("the engine died")

    run.sync = fail  # type: ignore[method-assign]
    with stopped(r"differ by .* a probe failed \(the engine died\)"):
        run.check()


def test_nothing_is_compared_where_nothing_was_sampled() -> None:
    run = Run(StaleWeights, tied=True)
    run.learn()
    run.trajectories = [Trajectory(Prompt(make_question(), 0, (1, 2)), status=Status.VOID)]
    assert run.check() == {}


def test_probes_stand_at_sampled_tokens_only_and_repeat_with_their_seed() -> None:
    prompt = Prompt(make_question(), 0, (1, 2, 3))
    trajectory = Trajectory(prompt, [4, 5, 6, 7], [True, False, False, True], [-0.4, 0.0, 0.0, -0.7])
    probes = choose([trajectory], 16, seed=1, num_candidates=3)
    found = {tuple(context): tokens for context, tokens in zip(probes.contexts, probes.candidates, strict=True)}
    assert set(found) == {(1, 2, 3), (1, 2, 3, 4, 5, 6)}
    assert found[1, 2, 3][0] == 4
    assert found[1, 2, 3, 4, 5, 6][0] == 7
    assert set(probes.recorded) == {-0.4, -0.7}
    assert all(len(set(tokens)) == len(tokens) == 3 for tokens in probes.candidates)
    assert choose([trajectory], 16, seed=1, num_candidates=3) == probes


def test_usual_probes_stand_where_the_policy_was_in_doubt() -> None:
    trajectory = Trajectory(Prompt(make_question(), 0, (1,)), [4, 5], [True, True], [-2.0, 0.0])
    assert choose([trajectory], 200, seed=0, num_places=8).recorded.count(-2.0) > 190
    assert 60 < choose([trajectory], 200, seed=0).recorded.count(-2.0) < 140
