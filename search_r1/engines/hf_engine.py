"""Sampling with a plain transformers model: exact, repeatable, and quick on small models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from search_r1.engines.incremental import IncrementalModel
from search_r1.engines.sampling import log_probs_at, sample, uniform_draws
from search_r1.engines.sleep import KEEP_WEIGHTS, SleepState
from search_r1.engines.stop import StopMatcher, decode, end_of_text_ids, new_token_limits
from search_r1.engines.weights import WeightNames
from search_r1.errors import EngineError
from search_r1.protocols import Weights
from search_r1.types import Completion, FinishReason, SamplingConfig

_COMPACT_SHARE = 0.9
"""Finished rows leave the batch once fewer than this share of it is still sampling."""


@dataclass(slots=True)
class _Row:
    """A completion in the making."""

    index: int
    """Its place in the caller's list."""
    context: list[int]
    max_new_tokens: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def max_length(self) -> int:
        return len(self.context) + self.max_new_tokens


class HFEngine:
    """A `RolloutEngine` over a transformers causal language model with full attention.

    The module may be the trainer's own: then its weights are always current, `load_weights` is not needed, and
    `forget` must be called after each update. The cache of the last call is kept: a context that begins like one
    of its sequences computes only the rest, so a multi-turn rollout computes every token once.

    Every row draws from its own seed, so a rollout is repeated whatever batch a row stands in, as far as the
    rounding of the model's arithmetic (about 1e-7, which differs between batch shapes) lets it.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        max_batch_size: int = 256,
        max_batch_tokens: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            model: A causal language model; its device is where sampling runs.
            tokenizer: The model's fast tokenizer; it decodes, it never encodes here.
            max_batch_size: Sequences decoded together.
            max_batch_tokens: Cached tokens at a time, rows times length; one longer sequence goes alone.
            dtype: Autocast to it; None computes in the weights' own.

        Raises:
            EngineError: the model has layers without full attention.
        """
        config: Any = model.config
        if _has_window(config):
            raise EngineError(
                f"{type(model).__name__} has layers without full attention, which the HF engine cannot decode: "
                "set engine.name=vllm"
            )
        self._model: Any = model
        self._tokenizer = tokenizer
        self._max_batch_size = max_batch_size
        self._max_batch_tokens = max_batch_tokens
        self._window: int | None = getattr(config, "max_position_embeddings", None)
        self._eos = end_of_text_ids(getattr(model, "generation_config", None), config, tokenizer)
        self._matchers: dict[tuple[str, ...], StopMatcher] = {}
        self._incremental = IncrementalModel(model, max_cached_tokens=max_batch_tokens, dtype=dtype)
        self._sleep = SleepState()

    def generate(
        self, contexts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        """One completion a context, in order; see `RolloutEngine`."""
        rows = self._rows(contexts, sampling.max_new_tokens)
        assert len(seeds) == len(rows), f"{len(seeds)} seeds for {len(rows)} contexts"
        with self._incremental.evaluating():
            for batch in self._batches(rows):
                self._sample(batch, sampling, [seeds[row.index] for row in batch])
        return [self._completion(row) for row in rows]

    def score(
        self, contexts: Sequence[Sequence[int]], candidates: Sequence[Sequence[int]], sampling: SamplingConfig
    ) -> list[list[float]]:
        """Log-probs of each context's candidates as its next token; see `ScoringEngine`."""
        found: dict[int, list[float]] = {}
        with self._incremental.evaluating():
            for batch in self._batches(self._rows(contexts, 1)):
                order, logits = self._incremental.start(
                    [row.context for row in batch], max(row.max_length for row in batch)
                )
                for place, log_probs in zip(order, log_probs_at(logits, sampling.temperature), strict=True):
                    index = batch[place].index
                    found[index] = log_probs[list(candidates[index])].tolist()
        return [found[index] for index in range(len(contexts))]

    def load_weights(self, weights: Weights) -> None:
        """Copy Hugging Face named tensors in place. With tied embeddings either name, or both, may come.

        Raises:
            EngineError: names missing, unknown or of another shape; the weights that fitted are loaded.
        """
        self._sleep.check_may_load()
        self.forget()
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, tensor in WeightNames(self._model).fitting(weights):
                parameters[name].copy_(tensor)
        self._sleep.take_weights()

    @property
    def num_computed_tokens(self) -> int:
        """Tokens passed through the model so far, prefill and decoding; what reuse saves does not count."""
        return self._incremental.num_computed_tokens

    def forget(self) -> None:
        """Drop what was cached; to be called whenever the module's weights changed."""
        self._incremental.forget()

    def sleep(self, level: int = KEEP_WEIGHTS) -> None:
        """Drop what was cached. The module is its owner's and stays where it is."""
        self._sleep.fall_asleep(level)
        self.forget()

    def wake_up(self, weights_only: bool = False) -> None:
        self._sleep.wake_up(weights_only)

    def close(self) -> None:
        """Free the cache; the model stays its owner's."""
        self.forget()

    def _rows(self, contexts: Sequence[Sequence[int]], max_new_tokens: int) -> list[_Row]:
        self._sleep.check_may_sample()
        limits = new_token_limits(contexts, max_new_tokens, self._window)
        pairs = zip(contexts, limits, strict=True)
        return [_Row(index, list(context), limit) for index, (context, limit) in enumerate(pairs)]

    def _batches(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        """Cut into batches within both limits, by length when one batch cannot hold them all."""
        ordered = sorted(rows, key=lambda row: row.max_length)
        batch: list[_Row] = []
        for row in ordered:
            tokens = (len(batch) + 1) * row.max_length
            too_long = self._max_batch_tokens is not None and tokens > self._max_batch_tokens
            if batch and (len(batch) == self._max_batch_size or too_long):
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    def _sample(self, rows: list[_Row], sampling: SamplingConfig, seeds: Sequence[int]) -> None:
        """Sample every row to its end. Rows that finish leave the batch when they have become many."""
        order, logits = self._incremental.start([row.context for row in rows], max(row.max_length for row in rows))
        num_steps = max(row.max_new_tokens for row in rows)
        uniforms = uniform_draws([seeds[index] for index in order], num_steps if sampling.temperature > 0 else 0)
        uniforms = uniforms.to(logits.device)
        rows = [rows[index] for index in order]
        matcher = self._matcher(sampling.stop)
        for step in range(num_steps):
            draws = uniforms[:, step] if sampling.temperature > 0 else None
            chosen, log_probs = sample(logits, sampling.temperature, sampling.top_p, draws)
            tokens = chosen.tolist()
            self._extend(rows, tokens, log_probs.tolist(), matcher)
            running = [r for r, row in enumerate(rows) if row.finish_reason is None]
            if not running:
                return
            if len(running) < _COMPACT_SHARE * len(rows):
                order = self._incremental.compact(running, len(rows))
                rows, tokens, uniforms = [rows[r] for r in order], [tokens[r] for r in order], uniforms[order]
            logits = self._incremental.step(tokens, [row.finish_reason is None for row in rows])

    def _extend(
        self, rows: Sequence[_Row], tokens: Sequence[int], log_probs: Sequence[float], matcher: StopMatcher
    ) -> None:
        for row, token, log_prob in zip(rows, tokens, log_probs, strict=True):
            if row.finish_reason is not None:
                continue
            row.token_ids.append(token)
            row.log_probs.append(log_prob)
            if token in self._eos or matcher(row.token_ids):
                row.finish_reason = "stop"
            elif len(row.token_ids) == row.max_new_tokens:
                row.finish_reason = "length"

    def _matcher(self, stop: tuple[str, ...]) -> StopMatcher:
        if stop not in self._matchers:
            self._matchers[stop] = StopMatcher(self._tokenizer, self._model.config.vocab_size, stop)
        return self._matchers[stop]

    def _completion(self, row: _Row) -> Completion:
        assert row.finish_reason is not None, f"context {row.index} was not sampled to its end"
        text = decode(self._tokenizer, row.token_ids)
        return Completion(tuple(row.token_ids), tuple(row.log_probs), text, row.finish_reason)


def _has_window(config: Any) -> bool:
    """Some layer does not see the whole context. Where configs name no kinds of layers, one window holds for all."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    window = getattr(config, "sliding_window", None)
    return window is not None and window < getattr(config, "max_position_embeddings", math.inf)
