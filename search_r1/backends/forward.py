"""From token ids to log-probs and values.

Rows are right-padded, so causal attention alone keeps padding out; or packed, where each row attends to itself alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from search_r1.algorithms.log_probs import chunked_log_probs
from search_r1.backends.packing import pack


class PolicyModule(nn.Module):
    """A causal language model that returns log-probs of chosen tokens instead of logits.

    The output head runs on the hidden states before sampled tokens only, in chunks: no (T, vocabulary) tensor is ever
    held for the whole batch. It is one module with one forward, so that a sharding wrapper sees every parameter's use.
    """

    def __init__(self, lm: PreTrainedModel, autocast_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.lm = lm
        self.autocast_dtype = autocast_dtype

    def forward(
        self, input_ids: Tensor, loss_mask: Tensor, temperature: float, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            input_ids: (B, T) int64.
            loss_mask: (B, T) bool, tokens to score; the first token has no context and is never scored.
            temperature: divides the logits.
            lengths: (B,) int64, tokens of each row; given, the forward pass is packed.

        Returns:
            log_probs, entropy: (B, T) float32, 0 outside `loss_mask`.
        """
        states, places = _hidden_states(self.lm, input_ids, loss_mask, lengths, self.autocast_dtype)
        rows, columns = index = _scored(loss_mask)
        head = self.lm.get_output_embeddings()
        with torch.autocast(input_ids.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            log_probs, entropy = chunked_log_probs(
                states[places],
                head.weight,
                input_ids[rows, columns],
                temperature,
                head_bias=head.bias,
                with_entropy=True,
                logit_softcap=getattr(self.lm.config, "final_logit_softcapping", None),
            )
        return _scatter(log_probs, index, loss_mask), _scatter(entropy, index, loss_mask)


class ValueModule(nn.Module):
    """A causal trunk with a scalar head: the value of the state before each token."""

    def __init__(self, trunk: PreTrainedModel, autocast_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.trunk = trunk
        self.value_head = nn.Linear(trunk.config.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.autocast_dtype = autocast_dtype

    def forward(self, input_ids: Tensor, loss_mask: Tensor, lengths: Tensor | None = None) -> Tensor:
        """
        Returns:
            values: (B, T) float32; entry `t` is read before token `t`; 0 outside `loss_mask`.
        """
        states, places = _hidden_states(self.trunk, input_ids, loss_mask, lengths, self.autocast_dtype)
        values = self.value_head(states[:, :-1].float()).squeeze(-1)
        if lengths is None:
            return torch.cat([torch.zeros_like(values[:, :1]), values], dim=1).where(loss_mask, 0.0)
        return _scatter(values[places], _scored(loss_mask), loss_mask)


def _scored(loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the tokens to score."""
    rows, columns = loss_mask[:, 1:].nonzero(as_tuple=True)
    return rows, columns + 1


def _hidden_states(
    model: PreTrainedModel,
    input_ids: Tensor,
    loss_mask: Tensor,
    lengths: Tensor | None,
    autocast_dtype: torch.dtype | None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The decoder's last hidden states, (B, T, d) or packed (1, N, d), and where those before scored tokens stand."""
    rows, columns = _scored(loss_mask)
    arguments: dict[str, Any] = {"input_ids": input_ids}
    places = rows, columns - 1
    if lengths is not None:
        packed = pack(input_ids, lengths)
        arguments = packed.arguments()
        places = torch.zeros_like(rows), packed.index(*places)
    with torch.autocast(input_ids.device.type, autocast_dtype, enabled=autocast_dtype is not None):
        return model.base_model(**arguments, use_cache=False).last_hidden_state, places


def _scatter(values: Tensor, index: tuple[Tensor, Tensor], like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=values.dtype, device=values.device).index_put(index, values)
