"""The Ray actors: a training worker with its roles, and an engine in a process of its own."""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist

from search_r1.cluster.placement import Home
from search_r1.protocols import RolloutEngine
from search_r1.rollout.blocking import as_async_engine
from search_r1.types import Completion, RolloutBatch, SamplingConfig

Factory = Callable[[], dict[str, Any]]


@ray.remote
class Worker:
    """One rank: it joins the process group, builds its roles, and runs their methods when told."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.roles: dict[str, Any] = {}
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

    def home(self) -> Home:
        context = ray.get_runtime_context()
        return Home(context.get_node_id(), tuple(map(str, ray.get_gpu_ids())))

    def sees(self, path: str) -> bool:
        """Whether this worker's node has the file."""
        return os.path.exists(path)

    def rendezvous(self) -> tuple[str, int]:
        """Address and free port for the process group, on this worker's node."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return ray.util.get_node_ip_address(), int(listener.getsockname()[1])

    def build(self, address: str, port: int, factory: Factory) -> None:
        if self.world_size > 1:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(
                backend,
                init_method=f"tcp://{address}:{port}",
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(minutes=10),
            )
        self.roles = factory()

    def call(self, role: str, method: str, *args: Any) -> Any:
        return getattr(self.roles[role], method)(*args)

    def score(self, batch: RolloutBatch, names: Sequence[str]) -> dict[str, torch.Tensor]:
        from search_r1.backends.policy import score_roles

        return score_roles(self.roles, batch, names)

    def offload(self) -> None:
        """What is trained, or scores, to host memory, until it is needed again."""
        for role in self.roles.values():
            if hasattr(role, "offload"):
                role.offload()


@ray.remote
class EngineWorker:
    """A rollout engine in an actor of its own, sampling many contexts at once; weights arrive bucket by bucket."""

    def __init__(self, factory: Callable[[], RolloutEngine], shared_gpus: Sequence[str] = ()) -> None:
        """`shared_gpus`: those of training workers, which Ray gave to them."""
        if shared_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shared_gpus)
        self.engine = factory()
        self._async_engine = as_async_engine(self.engine)
        self._incoming: queue.Queue[list[tuple[str, torch.Tensor]] | None] = queue.Queue(maxsize=2)
        self._loader: threading.Thread | None = None
        self._failure: BaseException | None = None

    async def ready(self) -> bool:
        return True

    async def agenerate(self, context: list[int], sampling: SamplingConfig, seed: int) -> Completion:
        return await self._async_engine.agenerate(context, sampling, seed)

    async def generate(self, *args: Any) -> list[Completion]:
        return await asyncio.to_thread(self.engine.generate, *args)

    async def receive_weights(self, references: list[Any]) -> None:
        if self._loader is None:
            self._failure = None
            self._loader = threading.Thread(target=self._load, daemon=True)
            self._loader.start()
        await asyncio.to_thread(self._incoming.put, await references[0])

    async def finish_weights(self) -> None:
        await asyncio.to_thread(self._incoming.put, None)
        if self._loader is not None:
            await asyncio.to_thread(self._loader.join)
        self._loader = None
        if self._failure is not None:
            raise self._failure

    def _load(self) -> None:
        arriving = iter(self._incoming.get, None)
        try:
            self.engine.load_weights(item for bucket in arriving for item in bucket)
        except BaseException as error:  # noqa: BLE001  carried to finish_weights, which raises it
            self._failure = error
            for _ in arriving:
                continue

    async def call(self, method: str, *args: Any) -> Any:
        """Any other method of the engine, which blocks."""
        return await asyncio.to_thread(getattr(self.engine, method), *args)

    async def close(self) -> None:
        await asyncio.to_thread(self.engine.close)
