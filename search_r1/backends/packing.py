"""Packed forward passes: sequences end to end in one row, without padding, each attending to itself alone.

Attention learns where sequences begin from `position_ids` that start anew and, where the kernel takes ragged input
(flash-attn, torch's varlen), from cumulative lengths. Elsewhere transformers builds a block-diagonal mask from the
positions: right, but quadratic in the length of the pack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface

VARLEN = "search_r1_varlen"
"""Name of torch's variable-length attention among transformers' implementations."""


@dataclass(frozen=True, slots=True)
class Pack:
    """N tokens of several sequences in one row."""

    input_ids: Tensor
    """(1, N) int64."""
    position_ids: Tensor
    """(1, N) int64, from 0 in every sequence."""
    starts: Tensor
    """(B + 1,) int32: where each sequence begins, and N."""
    longest: int

    def index(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Where the tokens at these places of the padded batch lie in the pack."""
        return self.starts[rows] + columns

    def arguments(self) -> dict[str, Any]:
        """What a transformers decoder takes."""
        ragged = {"cu_seq_lens_q": self.starts, "cu_seq_lens_k": self.starts}
        longest = {"max_length_q": self.longest, "max_length_k": self.longest}
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, **ragged, **longest}


def pack(input_ids: Tensor, lengths: Tensor) -> Pack:
    """Lay the rows of a right-padded batch end to end.

    Args:
        input_ids: (B, T) int64.
        lengths: (B,) int64, at least 1 each.
    """
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    real = positions < lengths[:, None]
    starts = functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return Pack(input_ids[real][None], positions[real][None], starts, int(lengths.max()))


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention over (B, heads, T, d) with torch's own ragged kernel; without a pack, B rows of length T."""
    batch, num_heads, length, _ = query.shape
    if cu_seq_lens_q is None or max_length_q is None:
        cu_seq_lens_q = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
        max_length_q = length
    q, k, v = (states.to(value.dtype).transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    out = varlen_attn(
        q,
        k,
        v,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1, 0) if sliding_window is None else (sliding_window - 1, 0),
        enable_gqa=key.shape[1] != num_heads,
    )
    assert isinstance(out, Tensor)
    return out.unflatten(0, (batch, length)), None


AttentionInterface.register(VARLEN, varlen_attention)
AttentionMaskInterface.register(VARLEN, lambda *_, **__: None)
