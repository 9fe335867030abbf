"""The dimensions of a model that its memory and its cost follow from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Counts of numbers, not bytes."""

    parameters: int
    """Without adapters."""
    embeddings: int
    """Of `parameters`: input embeddings and, where it is not the same matrix, the output head."""
    adapters: int
    """Of LoRA; 0 when all weights are trained."""
    layers: int
    hidden: int
    attention_width: int
    """Heads times their dimension."""

    @property
    def trainable(self) -> int:
        return self.adapters or self.parameters
