"""The sending half of weight transfer, as vLLM's `TrainerWeightTransferEngine`s: one a way to an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from search_r1.engines.weights import BUCKET_BYTES, SHARED_MEMORY, SharedMemoryBuckets, WeightNames
from search_r1.protocols import Weights

Way = Literal["shm", "ipc", "nccl"]
BACKENDS: dict[Way, str] = {"shm": SHARED_MEMORY, "ipc": "ipc", "nccl": "nccl"}
"""vLLM's names for the ways: shared memory of one machine, memory of one GPU, NCCL between GPUs."""


class Stream(WeightSource):
    """The weights of the next transfer, each once and checked against the model's names."""

    def __init__(self, names: WeightNames, dtype: torch.dtype) -> None:
        self._names = names
        self.dtype = dtype
        """The engine's."""
        self.weights: Weights = ()
        """To be set before each transfer."""

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, self.dtype, shape) for name, shape in self._names.shapes]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._names.fitting(self.weights)

    @property
    def largest_bytes(self) -> int:
        return max(torch.Size(shape).numel() for _, shape in self._names.shapes) * self.dtype.itemsize


class DeviceStream(Stream):
    """The same on the trainer's GPU, in the engine's dtype."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().__iter__():
            yield name, tensor.detach().to("cuda", self.dtype)


@dataclass
class SharedMemoryInit(TrainerInitInfo):
    backend: ClassVar[str] = SHARED_MEMORY


class SharedMemorySender(TrainerWeightTransferEngine[SharedMemoryInit]):
    """Bucket by bucket through one block of shared memory."""

    init_info_cls = SharedMemoryInit

    def __init__(self, client: VLLMWeightSyncClient, source: Stream) -> None:
        super().__init__(client=client, source=source)
        self._stream = source
        self._buckets = SharedMemoryBuckets(source.dtype)

    @classmethod
    def trainer_init(
        cls, init_info: SharedMemoryInit, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> SharedMemorySender:
        assert isinstance(source, Stream), "shared memory carries a Stream"
        client.init_weight_transfer_engine({})
        return cls(client, source)

    def send_weights(self) -> None:
        self.client.start_weight_update()
        for bucket in self._buckets.pack(self._stream):
            self.client.update_weights(bucket)
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self._buckets.close()


def open_sender(
    way: Way,
    client: VLLMWeightSyncClient,
    source: Stream,
    *,
    rank: int = 0,
    address: tuple[str, int] = ("127.0.0.1", 0),
    num_receivers: int = 1,
) -> TrainerWeightTransferEngine[Any]:
    """Agree with the engines on the way; `send_weights` of what comes back is then called for each transfer.

    Args:
        client: Speaks to the engines; only rank 0 uses it.
        source: What is sent. With several trainer ranks each of them opens a sender and iterates its source.
        rank: Of this trainer process.
        address: nccl: host and free port of rank 0.
        num_receivers: nccl: GPUs of all engines.
    """
    info: TrainerInitInfo = SharedMemoryInit(rank=rank)
    size = max(BUCKET_BYTES, source.largest_bytes)
    if way == "ipc":
        info = IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=size)
    elif way == "nccl":
        host, port = address
        info = NCCLTrainerInitInfo(host, port, 1 + num_receivers, packed_buffer_size_bytes=size, rank=rank)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


WeightTransferTrainerFactory.register_engine(SHARED_MEMORY, SharedMemorySender)
