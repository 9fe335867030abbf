"""Starting or joining a Ray cluster, and reserving room for the workers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group

from search_r1.config import ClusterConfig
from search_r1.errors import ConfigError

logger = logging.getLogger(__name__)
_FORWARDED = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "HF_HUB_OFFLINE", "HF_HOME", "TOKENIZERS_PARALLELISM", "LD_PRELOAD")
"""Environment variables of the driver that workers on every node should see."""


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
            ray.init(address=address, logging_level=logging.ERROR)
        else:
            needed = config.num_workers * config.cpus_per_worker + 1
            ray.init(num_cpus=max(os.cpu_count() or 1, needed), include_dashboard=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        raise ConfigError(
            f"cannot join the Ray cluster at {address or 'this machine'}: {str(error).splitlines()[0]}; start one with "
            "`ray start --head`, or unset RAY_ADDRESS and cluster.address to run on this machine"
        ) from error
    return ray.shutdown


def reserve(bundles: Sequence[dict[str, float]], timeout_s: float) -> PlacementGroup:
    """Room for one actor a bundle.

    Raises:
        ConfigError: the cluster cannot give it, with what was asked and what there is.
    """
    group = placement_group(list(bundles), strategy="PACK")
    try:
        ray.get(group.ready(), timeout=timeout_s)
    except GetTimeoutError as error:
        ray.util.remove_placement_group(group)
        raise ConfigError(
            f"the cluster cannot place {len(bundles)} workers of {bundles[0]} within {timeout_s:.0f} s; it has "
            f"{resources()}: lower cluster.num_workers, cpus_per_worker or gpus_per_worker, or add nodes"
        ) from error
    return group


def resources() -> dict[str, float]:
    """Cores and GPUs of the whole cluster."""
    return {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}


def worker_environment(threads: int) -> dict[str, str]:
    forwarded = {name: os.environ[name] for name in _FORWARDED if name in os.environ}
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)} | forwarded
