"""The receiving half of `SharedMemoryBuckets`, inside vLLM's worker processes.

Importing this module registers the back-end, and lets the process end with its driver. vLLM imports it there because
`worker_extension_cls` names `Extension`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from search_r1.engines.orphans import end_with_driver
from search_r1.engines.weights import SHARED_MEMORY


class Extension:
    """Adds nothing to the worker: naming it imports this module."""


@dataclass
class Init(WeightTransferInitInfo):
    """Nothing to agree on beforehand: every bucket describes itself."""


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """What `SharedMemoryBuckets.pack` yields."""

    block: str
    dtype: str
    names: list[str]
    shapes: list[list[int]]
    offsets: list[int]


class SharedMemoryWeightTransfer(WeightTransferEngine[Init, Bucket]):
    """Loads buckets of full Hugging Face weights; vLLM shards and fuses them as it does a checkpoint."""

    init_info_cls = Init
    update_info_cls = Bucket
    _memory: SharedMemory | None = None

    def init_transfer_engine(self, init_info: Init) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Bucket) -> None:
        self.model.load_weights(self._copies(update_info))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._refresh_output_head()
        self.shutdown()

    def shutdown(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _copies(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """Copies, because the reload holds on to a layer's weights until all of them have come."""
        if self._memory is None or self._memory.name != bucket.block:
            self.shutdown()
            self._memory = SharedMemory(bucket.block)
        dtype = getattr(torch, bucket.dtype)
        for name, shape, offset in zip(bucket.names, bucket.shapes, bucket.offsets, strict=True):
            count = torch.Size(shape).numel()
            shared = torch.frombuffer(self._memory.buf, dtype=dtype, count=count, offset=offset)
            yield name, shared.view(shape).to(self.device, copy=True)

    def _refresh_output_head(self) -> None:
        """On a CPU the head multiplies by a packed copy of its weight, which a reload of tied embeddings forgets."""
        head = getattr(self.model, "lm_head", None)
        if self.device.type == "cpu" and hasattr(head, "quant_method"):
            head.quant_method.process_weights_after_loading(head)


WeightTransferEngineFactory.register_engine(SHARED_MEMORY, SharedMemoryWeightTransfer)
if multiprocessing.parent_process() is not None:
    end_with_driver()
