"""A transformers model run token by token over many sequences, computing each token once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from search_r1.engines.kv_cache import RowCache, WritePlan
from search_r1.engines.prefixes import match_prefixes

_PREFILL_TOKENS = 2048
"""Padded tokens of one prefill pass; one longer context goes alone."""


class IncrementalModel:
    """Next-token logits of a batch of sequences that grow. R rows in the batch, V tokens of vocabulary.

    Row r of the batch is row r of the cache. What a batch leaves behind stays cached, and the next one starts from
    the longest beginnings it shares with it.
    """

    def __init__(self, model: Any, *, max_cached_tokens: int | None, dtype: torch.dtype | None) -> None:
        self._model = model
        self._max_cached_tokens = max_cached_tokens
        self._dtype = dtype
        self._cache: RowCache | None = None
        self._held: list[list[int]] = []
        """The tokens of each cache row."""
        self.num_computed_tokens = 0
        """Tokens passed through the model so far, padding aside."""

    def forget(self) -> None:
        """Drop everything cached."""
        self._cache, self._held = None, []

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """No gradients, evaluation mode, and SDPA, the attention that takes boolean masks of any form."""
        model, config = self._model, self._model.config
        training, attention = model.training, config._attn_implementation
        model.eval()
        config._attn_implementation = "sdpa"
        autocast = torch.autocast(model.device.type, dtype=self._dtype, enabled=self._dtype is not None)
        try:
            with torch.no_grad(), autocast:
                yield
        finally:
            config._attn_implementation = attention
            model.train(training)

    def start(self, contexts: Sequence[list[int]], room: int) -> tuple[list[int], Tensor]:
        """Begin a batch whose sequences grow to at most `room` tokens.

        Returns:
            The index of the context in each row, and (R, V) logits of what follows each.
        """
        cache = self._cache_for(len(contexts), max(map(len, contexts)), room)
        order, cached = self._place(cache, contexts)
        rows = [contexts[index] for index in order]
        self._held[: len(rows)] = [list(row) for row in rows]
        twins = _twins(rows, cached)
        leaders = sorted(set(twins))
        suffixes = {r: rows[r][cached[r] :] for r in leaders}
        found: dict[int, Tensor] = {}
        for chunk in _chunks(leaders, suffixes):
            logits = self._prefill(cache, chunk, [suffixes[r] for r in chunk], [cached[r] for r in chunk])
            found.update(zip(chunk, logits, strict=True))
        followers = [r for r, leader in enumerate(twins) if leader != r]
        cache.copy([twins[r] for r in followers], followers, max(map(len, rows)))
        return order, torch.stack([found[leader] for leader in twins])

    def step(self, tokens: Sequence[int], running: Sequence[bool]) -> Tensor:
        """Append one token to each running row of the batch, the first len(tokens) rows; (R, V) logits.

        The logits of rows that do not run mean nothing; their sequences stay as they are.
        """
        assert self._cache is not None, "start comes before step"
        device = self._model.device
        positions = torch.tensor([len(self._held[r]) for r in range(len(tokens))], device=device)
        for held, token, runs in zip(self._held, tokens, running, strict=False):
            if runs:
                held.append(token)
        length = int(positions.max()) + 1
        self._cache.reserve(length)
        rows = torch.arange(len(tokens), device=device)
        self._cache.plan = WritePlan(slice(0, len(tokens)), rows, positions, rows, torch.zeros_like(rows), length)
        self.num_computed_tokens += sum(running)
        return self._forward(torch.tensor(tokens, device=device)[:, None], positions[:, None], length)

    def compact(self, running: Sequence[int], num_rows: int) -> list[int]:
        """Shrink a batch of `num_rows` to its `running` rows; which old row each new one is."""
        assert self._cache is not None, "start comes before compact"
        kept = set(running)
        holes = [r for r in range(len(running)) if r not in kept]
        movers = [r for r in running if r >= len(running)]
        self._swap(self._cache, holes, movers)
        moved = dict(zip(holes, movers, strict=True))
        return [moved.get(r, r) for r in range(len(running))]

    def _cache_for(self, num_rows: int, longest: int, room: int) -> RowCache:
        """The present cache where it is large enough and within the limit, else a new one."""
        cache, limit = self._cache, self._max_cached_tokens
        if cache is not None and cache.num_rows >= num_rows:
            within = limit is None or cache.num_rows * max(room, cache.length) <= limit
            if within:
                cache.reserve(longest)
                return cache
        self._cache = RowCache(self._model.config.num_hidden_layers, num_rows, longest)
        self._held = [[] for _ in range(num_rows)]
        return self._cache

    def _place(self, cache: RowCache, contexts: Sequence[list[int]]) -> tuple[list[int], list[int]]:
        """Bring reusable rows to the front; per row the context it takes and its cached tokens."""
        found = match_prefixes(self._held, contexts)
        row_of = {index: row for index, (row, _) in found.items()}
        used = set(row_of.values())
        free = [row for row in range(len(contexts)) if row not in used]
        behind = [index for index, row in row_of.items() if row >= len(contexts)]
        holes = free[: len(behind)]
        self._swap(cache, holes, [row_of[index] for index in behind])
        row_of.update(zip(behind, holes, strict=True))
        fresh = [index for index in range(len(contexts)) if index not in row_of]
        row_of.update(zip(fresh, free[len(behind) :], strict=True))
        order = sorted(range(len(contexts)), key=row_of.__getitem__)
        return order, [found[index][1] if index in found else 0 for index in order]

    def _swap(self, cache: RowCache, first: Sequence[int], second: Sequence[int]) -> None:
        rows = [*first, *second]
        cache.swap(first, second, max((len(self._held[row]) for row in rows), default=0))
        for a, b in zip(first, second, strict=True):
            self._held[a], self._held[b] = self._held[b], self._held[a]

    def _prefill(
        self, cache: RowCache, rows: Sequence[int], suffixes: Sequence[list[int]], starts: Sequence[int]
    ) -> Tensor:
        """Compute the suffixes behind `starts` cached tokens. They end in the last column, padding stands first."""
        device = self._model.device
        width = max(map(len, suffixes))
        padded = torch.tensor([[0] * (width - len(suffix)) + suffix for suffix in suffixes], device=device)
        pads = torch.tensor([width - len(suffix) for suffix in suffixes], device=device)
        columns = torch.arange(width, device=device)
        query_rows, query_columns = (columns >= pads[:, None]).nonzero(as_tuple=True)
        positions = (columns - pads[:, None]).clamp(min=0) + torch.tensor(starts, device=device)[:, None]
        length = max(start + len(suffix) for start, suffix in zip(starts, suffixes, strict=True))
        row_ids = torch.tensor(rows, device=device)
        first = list(rows) == list(range(len(rows)))
        cache.plan = WritePlan(
            slice(0, len(rows)) if first else row_ids,
            row_ids[query_rows],
            positions[query_rows, query_columns],
            query_rows,
            query_columns,
            length,
        )
        self.num_computed_tokens += len(query_rows)
        return self._forward(padded, positions, length)

    def _forward(self, input_ids: Tensor, positions: Tensor, length: int) -> Tensor:
        """(R, V) logits after the last column of `input_ids` (R, T), which stand at `positions` (R, T)."""
        mask = torch.arange(length, device=positions.device) <= positions[:, None, :, None]
        logits: Tensor = self._model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1]


def _twins(rows: Sequence[list[int]], cached: Sequence[int]) -> list[int]:
    """For each row the one that computes for all rows equal to it: a group's prompt is computed once."""
    leaders: dict[tuple[int, ...], int] = {}
    for r in sorted(range(len(rows)), key=lambda r: -cached[r]):
        leaders.setdefault(tuple(rows[r]), r)
    return [leaders[tuple(row)] for row in rows]


def _chunks(rows: Sequence[int], suffixes: dict[int, list[int]]) -> Iterator[list[int]]:
    """Rows cut into prefill passes of similar lengths; in order when one pass takes them all."""
    if max(map(len, suffixes.values())) * len(rows) > _PREFILL_TOKENS:
        rows = sorted(rows, key=lambda r: len(suffixes[r]))
    chunk: list[int] = []
    width = 0
    for r in rows:
        width = max(width, len(suffixes[r]))
        if chunk and (len(chunk) + 1) * width > _PREFILL_TOKENS:
            yield chunk
            chunk, width = [], len(suffixes[r])
        chunk.append(r)
    yield chunk
