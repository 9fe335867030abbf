"""A key/value cache whose rows hold sequences of different lengths without padding.

Row r keeps token t of its sequence at index t, so a row can be cut back to any prefix and continued later: that is
what lets a conversation's next turn prefill only what was appended since the last one. Whatever lies behind a row's
length is garbage, hidden by the attention mask and overwritten when the row grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_LENGTH_STEP = 64
"""Tokens by which the buffers grow at least."""


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Where one forward pass puts its keys and values, shared by all layers. R rows, T query tokens, N true ones."""

    rows: slice | Tensor
    """The cache rows in the batch: the first R as a slice, or (R,) int64."""
    target_rows: Tensor
    """(N,) cache row of each true token."""
    target_positions: Tensor
    """(N,) its index in the row."""
    query_rows: Tensor
    """(N,) its row in the batch."""
    query_columns: Tensor
    """(N,) its column in the batch; T - 1 alone in a decoding step."""
    length: int
    """Keys that attention sees: 1 + the largest position of the batch."""


class RowLayer(CacheLayerMixin):
    """One layer's buffers, (rows, heads, length, head dimension)."""

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        self._cache = cache
        self.device = torch.device("cpu")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        size = (self._cache.num_rows, key_states.shape[1], self._cache.length)
        self.keys = key_states.new_zeros(*size, key_states.shape[3])
        self.values = value_states.new_zeros(*size, value_states.shape[3])
        self.device = key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store (R, heads, T, dim) states as planned; return all keys and values the batch may look at."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self._cache.plan
        assert plan is not None, "RowCache.plan is set before each forward pass"
        return (
            _write_and_view(self.keys, key_states, plan),
            _write_and_view(self.values, value_states, plan),
        )

    def grow(self, length: int) -> None:
        if self.is_initialized:
            self.keys = _longer(self.keys, length)
            self.values = _longer(self.values, length)

    def swap(self, first: Tensor, second: Tensor, length: int) -> None:
        if self.is_initialized:
            for buffer in (self.keys, self.values):
                kept = buffer[first, :, :length]
                buffer[first, :, :length] = buffer[second, :, :length]
                buffer[second, :, :length] = kept

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        if self.is_initialized:
            for buffer in (self.keys, self.values):
                buffer[targets, :, :length] = buffer[sources, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return 0 if self._cache.plan is None else self._cache.plan.length

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """The cache of `num_rows` sequences over all layers. Set `plan` before each forward pass."""

    def __init__(self, num_layers: int, num_rows: int, length: int) -> None:
        self.num_rows = num_rows
        self.length = _rounded(length)
        self.plan: WritePlan | None = None
        super().__init__(layers=[RowLayer(self) for _ in range(num_layers)])

    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens, keeping what is stored."""
        if length > self.length:
            self.length = _rounded(max(length, self.length * 5 // 4))
            for layer in self.layers:
                layer.grow(self.length)

    def swap(self, first: Sequence[int], second: Sequence[int], length: int) -> None:
        """Exchange rows pairwise, as far as `length` tokens. The two lists name distinct rows."""
        for layer in self.layers if first else ():
            layer.swap(torch.tensor(first, device=layer.device), torch.tensor(second, device=layer.device), length)

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Overwrite each of `targets` with one of `sources`, as far as `length` tokens."""
        for layer in self.layers if targets else ():
            layer.copy(torch.tensor(sources, device=layer.device), torch.tensor(targets, device=layer.device), length)


def _write_and_view(buffer: Tensor, states: Tensor, plan: WritePlan) -> Tensor:
    new = states.transpose(1, 2)[plan.query_rows, plan.query_columns]
    buffer[plan.target_rows, :, plan.target_positions] = new.to(buffer.dtype)
    return buffer[plan.rows, :, : plan.length]


def _longer(buffer: Tensor, length: int) -> Tensor:
    rows, heads, old_length, dim = buffer.shape
    longer = buffer.new_zeros(rows, heads, length, dim)
    longer[:, :, :old_length] = buffer
    return longer


def _rounded(length: int) -> int:
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP
