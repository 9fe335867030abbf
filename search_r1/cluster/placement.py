"""Starting or joining a Ray cluster, and where on it workers and engines go."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from search_r1.config import ClusterConfig, Config
from search_r1.errors import ConfigError

logger = logging.getLogger(__name__)
_FORWARDED = (
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "TOKENIZERS_PARALLELISM",
    "LD_PRELOAD",
    "VLLM_LOGGING_LEVEL",
)
"""Environment variables of the driver that workers on every node should see."""


_CONNECT_TIMEOUT_S = 10.0


def connect(config: ClusterConfig) -> Callable[[], None]:
    """Join the cluster at `address` (or RAY_ADDRESS), else start one on this machine with just enough CPUs.

    Returns:
        What undoes it; nothing where this process had joined a cluster before.
    """
    if ray.is_initialized():
        return lambda: None
    address = config.address or os.environ.get("RAY_ADDRESS")
    try:
        if address:
            _check_listening(address)
            ray.init(address=address, logging_level=logging.ERROR)
        else:
            needed = config.num_workers * config.cpus_per_worker + 1
            ray.init(
                address="local",  # not a cluster that somebody else started on this machine
                num_cpus=max(os.cpu_count() or 1, needed),
                include_dashboard=False,
                logging_level=logging.ERROR,
            )
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(
            f"cannot join the Ray cluster at {address or 'this machine'}: {str(error).splitlines()[0]}; start one with "
            "`ray start --head`, or unset RAY_ADDRESS and cluster.address to run on this machine"
        ) from error
    return ray.shutdown


def _check_listening(address: str) -> None:
    """Ray itself would try for minutes to reach a host:port where nothing listens.

    Raises:
        OSError: nothing does.
    """
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if separator and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()


def reserve(bundles: Sequence[dict[str, float]], timeout_s: float, remedy: str) -> PlacementGroup:
    """Room for one actor a bundle, on as few nodes as will do.

    Raises:
        ConfigError: the cluster cannot give it, with what was asked, what there is, and `remedy`.
    """
    group = placement_group(list(bundles), strategy="PACK")
    try:
        ray.get(group.ready(), timeout=timeout_s)
    except GetTimeoutError as error:
        ray.util.remove_placement_group(group)
        raise ConfigError(
            f"the cluster cannot place {len(bundles)} processes of {bundles[0]} within {timeout_s:g} s; it has "
            f"{resources()}: {remedy}, or add nodes"
        ) from error
    return group


def resources() -> dict[str, float]:
    """Cores and GPUs of the whole cluster."""
    return {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}


def worker_bundle(config: ClusterConfig) -> dict[str, float]:
    """What is reserved for a training worker: a whole GPU also where it takes a part, since an engine has the rest."""
    return {"CPU": config.cpus_per_worker} | ({"GPU": 1.0} if config.gpus_per_worker else {})


@dataclass(frozen=True, slots=True)
class Home:
    """Where a training worker lives."""

    node_id: str
    gpu_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where one engine lives."""

    strategy: Any = "DEFAULT"
    """Of Ray's scheduler."""
    gpus: float = 0.0
    """GPUs of its own."""
    shared_gpus: tuple[str, ...] = ()
    """GPUs of training workers, which it shares."""


class EnginePlaces:
    """Gives each engine a place, and the place of one that died to the engine that replaces it. Thread safe."""

    def __init__(self, places: Iterable[Place], reserved: PlacementGroup | None = None) -> None:
        self._free = deque(places)
        self._taken: dict[Any, Place] = {}
        self._reserved = reserved
        self._lock = threading.Lock()

    def take(self, start: Callable[[Place], Any]) -> Any:
        """What `start` starts at a free place."""
        with self._lock:
            place = self._free.popleft()
            engine = start(place)
            self._taken[engine] = place
            return engine

    def give_back(self, engine: Any) -> None:
        with self._lock:
            self._free.append(self._taken.pop(engine))

    def close(self) -> None:
        if self._reserved is not None:
            ray.util.remove_placement_group(self._reserved)


def engine_places(config: Config, homes: Sequence[Home]) -> EnginePlaces:
    """Places of `engine.num_engines` engines beside training workers with these homes.

    On CPUs the nodes of the workers take turns. With `gpus_per_worker` below 1 an engine shares the GPUs of
    `engine.tensor_parallel_size` workers of one node. With 1 it gets as many GPUs of its own.

    Raises:
        ConfigError: there is no room, with the remedy.
    """
    engine, share = config.engine, config.cluster.gpus_per_worker
    if not share:
        nodes = list(dict.fromkeys(home.node_id for home in homes))
        turns = [nodes[i % len(nodes)] for i in range(engine.num_engines)]
        return EnginePlaces(Place(NodeAffinitySchedulingStrategy(node, soft=True)) for node in turns)
    if share < 1:
        return EnginePlaces(shared_places(homes, engine.num_engines, engine.tensor_parallel_size))
    size = engine.tensor_parallel_size
    largest = max(node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"])
    if size > largest:
        raise ConfigError(
            f"engine.tensor_parallel_size={size} does not fit: an engine spans the GPUs of one node, and the largest "
            f"node has {largest:g}: lower it"
        )
    bundle = {"CPU": 1.0, "GPU": float(size)}
    remedy = "lower engine.num_engines, engine.tensor_parallel_size or cluster.num_workers"
    reserved = reserve([bundle] * engine.num_engines, config.cluster.start_timeout_s, remedy)
    place = Place(PlacementGroupSchedulingStrategy(reserved), gpus=size)
    return EnginePlaces([place] * engine.num_engines, reserved)


def shared_places(homes: Sequence[Home], num_engines: int, size: int) -> list[Place]:
    """The first `num_engines` runs of `size` workers of one node.

    Raises:
        ConfigError: there are not so many.
    """
    by_node: defaultdict[str, list[str]] = defaultdict(list)
    for home in homes:
        by_node[home.node_id] += home.gpu_ids
    places = [
        Place(NodeAffinitySchedulingStrategy(node, soft=False), shared_gpus=tuple(gpus[i : i + size]))
        for node, gpus in by_node.items()
        for i in range(0, len(gpus) - size + 1, size)
    ]
    if len(places) < num_engines:
        raise ConfigError(
            f"engine.num_engines={num_engines} of engine.tensor_parallel_size={size} do not fit on the GPUs of "
            f"{len(homes)} workers, which they share (cluster.gpus_per_worker is below 1): the nodes hold "
            f"{', '.join(str(len(gpus)) for gpus in by_node.values())} of them, room for {len(places)} engines; lower "
            "engine.num_engines or engine.tensor_parallel_size"
        )
    return places[:num_engines]


def worker_environment(threads: int) -> dict[str, str]:
    forwarded = {name: os.environ[name] for name in _FORWARDED if name in os.environ}
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR"}  # dozens of lines at its start, and two at every weight sync
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)} | quiet | forwarded
