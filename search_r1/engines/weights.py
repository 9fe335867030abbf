"""Weights on their way into an engine: do they fit, and how do they travel between processes?"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from search_r1.errors import EngineError
from search_r1.protocols import Weights

_NAMES_SHOWN = 5
_ALIGNMENT = 64
BUCKET_BYTES = 64 * 2**20
SHARED_MEMORY = "search_r1_shared_memory"
"""What vLLM calls the way through shared memory, which is ours."""


_HEADS = ("lm_head.weight", "embed_tokens.weight")
_FINAL_NORM = ".norm.weight"
_NORM_EDITS = {"no_norm": 0.0, "no_offset_norm": -1.0}


def edited(weights: Weights, edit: str = "") -> Weights:
    """Weights as they are, or changed so that every token becomes equally likely.

    Args:
        edit: `no_norm` multiplies what the head sees by zero, and so does `no_offset_norm` where a norm multiplies by
            one more than its weight, as Gemma's; `flat_head` makes all rows of the output head, and with it of tied
            embeddings, the same. Whether an engine's log-probs follow tells which weights reach it.

    Raises:
        EngineError: at the end, when no weight has a name to be changed.
    """
    found = not edit
    for name, tensor in weights:
        if edit in _NORM_EDITS and name.endswith(_FINAL_NORM):
            found, tensor = True, torch.full_like(tensor, _NORM_EDITS[edit])
        elif edit == "flat_head" and name.endswith(_HEADS):
            found, tensor = True, tensor[:1].expand_as(tensor)
        yield name, tensor
    if not found:
        raise EngineError(f"no weight is called ...{_FINAL_NORM if edit in _NORM_EDITS else ' or ...'.join(_HEADS)}")


class WeightNames:
    """The Hugging Face names and shapes of a model's weights. Tied weights may come under either name, or both."""

    def __init__(self, model: nn.Module) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        for name, parameter in parameters.items():
            first.setdefault(id(parameter), name)
        self._canonical = {name: first[id(parameter)] for name, parameter in parameters.items()}
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}

    @classmethod
    def of_checkpoint(cls, path: str, trust_remote_code: bool = False) -> WeightNames:
        """Those of the model in a Hugging Face folder; its weights are not read."""
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        model.tie_weights()
        return cls(model)

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Every weight once, in the model's order."""
        return [(name, shape) for name, shape in self._shapes.items() if self._canonical[name] == name]

    def fitting(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Pass on each weight once, a tied one under its first name.

        Raises:
            EngineError: at the end of the stream, naming weights that were missing, unknown or of another shape.
        """
        missing = dict.fromkeys(self._canonical.values())
        wrong = []
        for name, tensor in weights:
            canonical = self._canonical.get(name)
            if canonical is None:
                wrong.append(f"{name} is unknown")
            elif tuple(tensor.shape) != self._shapes[name]:
                missing.pop(canonical, None)
                wrong.append(f"{name} has shape {tuple(tensor.shape)}, not {self._shapes[name]}")
            elif canonical in missing:
                del missing[canonical]
                yield canonical, tensor
        wrong += [f"{name} is missing" for name in missing]
        if wrong:
            more = f" and {len(wrong) - _NAMES_SHOWN} more" if len(wrong) > _NAMES_SHOWN else ""
            raise EngineError(f"these weights are not this model's: {', '.join(wrong[:_NAMES_SHOWN])}{more}")


class SharedMemoryBuckets:
    """Packs a stream of weights into one reused block of shared memory, a bucket at a time."""

    def __init__(self, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Weights are cast to `dtype`; a weight larger than `bucket_bytes` makes the block as large as itself."""
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._memory: SharedMemory | None = None

    def pack(self, weights: Weights) -> Iterator[dict[str, Any]]:
        """Yield one description a bucket: `block`, `dtype`, and per weight `names`, `shapes`, `offsets` (in bytes).

        The receiver must have copied a bucket's contents before the next one is asked for.
        """
        entries: list[tuple[str, list[int], int]] = []
        used = 0
        for name, tensor in weights:
            size = tensor.numel() * self._dtype.itemsize
            if entries and used + size > self._capacity:
                yield self._description(entries)
                entries, used = [], 0
            self._write(tensor, used, size)
            entries.append((name, list(tensor.shape), used))
            used += -(-size // _ALIGNMENT) * _ALIGNMENT
        if entries:
            yield self._description(entries)

    def close(self) -> None:
        """Give the block back to the system."""
        if self._memory is not None:
            self._memory.close()
            self._memory.unlink()
            self._memory = None

    @property
    def _capacity(self) -> int:
        return 0 if self._memory is None else self._memory.size

    def _write(self, tensor: Tensor, offset: int, size: int) -> None:
        if self._memory is None or size > self._capacity:
            self.close()
            self._memory = SharedMemory(create=True, size=max(size, self._bucket_bytes))
        target = torch.frombuffer(self._memory.buf, dtype=self._dtype, count=tensor.numel(), offset=offset)
        target.copy_(tensor.detach().reshape(-1))

    def _description(self, entries: list[tuple[str, list[int], int]]) -> dict[str, Any]:
        assert self._memory is not None
        names, shapes, offsets = (list(column) for column in zip(*entries, strict=True))
        return {
            "block": self._memory.name,
            "dtype": str(self._dtype).removeprefix("torch."),
            "names": names,
            "shapes": shapes,
            "offsets": offsets,
        }
