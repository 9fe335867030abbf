"""A real Ray cluster of two nodes on this machine, with one core each, and one GPU that Ray alone believes in."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from tests.pool_engine import PoolEngine

_SETTINGS = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 100 << 20}
_QUICK_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 2,
}


class GpuEngine(PoolEngine):
    """Tells where it lives."""

    def home(self) -> tuple[str, str]:
        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]


class TwoNodes:
    """The head and one more node, which may leave."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.head = cluster.head_node
        self.other: Any = None

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def complete(self) -> None:
        """Let the other node join where it is not there."""
        if self.other is None:
            self.other = self._cluster.add_node(**_SETTINGS)
            self._cluster.wait_for_nodes()

    def other_leaves(self) -> None:
        """All its processes are killed."""
        self._cluster.remove_node(self.other, allow_graceful=False)
        self.other = None

    def wait_for(self, actor: str) -> None:
        """Until both nodes run it; a process names itself a moment after it answers."""
        deadline = time.monotonic() + 30
        while not all(actor in actors for actors in self.actors()):
            assert time.monotonic() < deadline, f"{actor} runs here alone: {self.actors()}"
            time.sleep(0.05)

    def actors(self) -> list[set[str]]:
        """Names of the actor classes whose processes run on the head, and on the other node."""
        return [_actors_of(node) for node in (self.head, self.other)]


def _actors_of(node: Any) -> set[str]:
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    found = set()
    for child in raylet.children():
        try:
            title = child.cmdline()[0]
        except (psutil.NoSuchProcess, psutil.ZombieProcess, IndexError):
            continue
        if title.startswith("ray::"):
            found.add(title.removeprefix("ray::").split(".")[0])
    return found


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    head = {**_SETTINGS, "include_dashboard": False, "_system_config": _QUICK_HEALTH_CHECKS}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = TwoNodes(cluster)
        nodes.complete()
        yield nodes
    finally:
        cluster.shutdown()
