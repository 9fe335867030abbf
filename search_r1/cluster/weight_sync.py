"""A training worker's half of a weight sync. Each sender is a role of the worker, and every rank sends."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from search_r1.config import Config
from search_r1.engines.weights import WeightNames, edited
from search_r1.errors import EngineLostError, TrainingError
from search_r1.protocols import RolloutEngine, Weights
from search_r1.rollout.blocking import BoundedCaller

if TYPE_CHECKING:
    from search_r1.engines.vllm_senders import DeviceStream

_BUCKET_BYTES = 64 << 20
Bucket = list[tuple[str, torch.Tensor]]


class LocalSender:
    """To the engine in the same worker."""

    def __init__(self, policy: Any, engine: RolloutEngine) -> None:
        self._policy = policy
        self._engine = engine

    def send(self, engines: Sequence[Any], edit: str = "") -> None:
        self._engine.load_weights(edited(self._policy.weights(), edit))


class ObjectStoreSender:
    """Through Ray's object store, to engines on any node. Rank 0 sends; the others help to gather the weights."""

    def __init__(self, policy: Any, rank: int, dtype: torch.dtype) -> None:
        self._policy = policy
        self._rank = rank
        self._dtype = dtype

    def send(self, engines: Sequence[Any], edit: str = "") -> None:
        buckets = _buckets(edited(self._policy.weights(), edit), self._dtype)
        if self._rank == 0:
            send_weights(buckets, engines)
        for _ in buckets:
            continue


class DeviceSender:
    """From GPU to GPU by vLLM's own senders, which are opened anew when other engines take part than before."""

    def __init__(
        self,
        policy: Any,
        rank: int,
        way: Literal["ipc", "nccl"],
        stream: DeviceStream,
        gpus_per_engine: int,
        timeout_s: float,
    ) -> None:
        self._policy = policy
        self._rank = rank
        self._way = way
        self._stream = stream
        self._gpus_per_engine = gpus_per_engine
        self._timeout_s = timeout_s
        self._engines: list[Any] = []
        self._sender: Any = None
        self._bounded = BoundedCaller("weight-sync")

    def send(self, engines: Sequence[Any], edit: str = "") -> None:
        """
        Raises:
            TrainingError: the transfer did not end in time, as when an engine dies in the middle of it.
        """
        self._stream.weights = edited(self._policy.weights(), edit)
        try:
            self._bounded(lambda: self._send(list(engines)), self._timeout_s)
        except TimeoutError as error:
            raise TrainingError(
                f"the weights did not reach {len(engines)} engines within engine.timeout_s={self._timeout_s:g}"
            ) from error

    def _send(self, engines: list[Any]) -> None:
        from search_r1.engines.vllm_senders import open_sender

        if engines != self._engines:
            if self._sender is not None:
                self._sender.shutdown()
            self._sender = open_sender(
                self._way,
                EngineClients(engines, self._gpus_per_engine),
                self._stream,
                rank=self._rank,
                address=(ray.util.get_node_ip_address(), _free_port()),
                num_receivers=self._gpus_per_engine * len(engines),
            )
            self._engines = engines
        self._sender.send_weights()


class EngineClients:
    """vLLM's `VLLMWeightSyncClient` over engine actors. Those that die are left out from then on."""

    def __init__(self, engines: Sequence[Any], gpus_per_engine: int) -> None:
        self._engines = list(engines)
        self._gpus_per_engine = gpus_per_engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """With NCCL every engine's GPUs get ranks of their own, behind the trainer's."""
        infos = [dict(init_info) for _ in self._engines]
        for number, info in enumerate(infos):
            if "rank_offset" in info:
                info["rank_offset"] = 1 + number * self._gpus_per_engine
        calls = zip(self._engines, infos, strict=True)
        self._engines = survivors({e: e.call.remote("init_weight_transfer_engine", info) for e, info in calls})

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._all("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update", weight_version)

    def _all(self, method: str, *args: Any) -> None:
        self._engines = survivors({engine: engine.call.remote(method, *args) for engine in self._engines})


def build_sender(
    config: Config, policy: Any, engine: RolloutEngine | None, way: Literal["shm", "ipc", "nccl"], dtype: str
) -> LocalSender | ObjectStoreSender | DeviceSender:
    """The sender of one training worker; `dtype` is the engines'."""
    rank = policy.sharding.rank
    if engine is not None:
        return LocalSender(policy, engine)
    if way == "shm":
        return ObjectStoreSender(policy, rank, getattr(torch, dtype))
    from search_r1.engines.vllm_senders import DeviceStream

    names = WeightNames.of_checkpoint(config.model.path, config.model.trust_remote_code)
    stream = DeviceStream(names, getattr(torch, dtype))
    return DeviceSender(policy, rank, way, stream, config.engine.tensor_parallel_size, config.engine.timeout_s)


def send_weights(buckets: Iterable[Bucket], engines: Sequence[Any]) -> None:
    """Each bucket to all engines while the next one is gathered. Those that die on the way are left out."""
    pending: dict[Any, Any] = dict.fromkeys(engines)
    for bucket in buckets:
        reference = ray.put(bucket)
        pending = {engine: engine.receive_weights.remote([reference]) for engine in survivors(pending)}
    survivors({engine: engine.finish_weights.remote() for engine in survivors(pending)})


def survivors(calls: Mapping[Any, Any]) -> list[Any]:
    """The engines that did not die over their call; None is no call."""
    alive = []
    for engine, call in calls.items():
        try:
            if call is not None:
                ray.get(call)
            alive.append(engine)
        except RayActorError:
            continue
        except RayTaskError as error:
            if not isinstance(error.cause, EngineLostError):
                raise
    return alive


def _buckets(weights: Weights, dtype: torch.dtype) -> Iterator[Bucket]:
    bucket: Bucket = []
    size = 0
    for name, full in weights:
        tensor = full.detach().to(dtype).cpu()
        bucket.append((name, tensor))
        size += tensor.nbytes
        if size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
