"""Policy, reference and critic of a tiny model on Ray workers that form one process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import ray

from search_r1.cluster.remote import RemoteCritic, RemotePolicy, RemoteReference, RemoteScorer
from search_r1.cluster.worker_group import WorkerGroup
from search_r1.config import ClusterConfig, Config
from search_r1.data.micro_batches import SequenceCost
from search_r1.trainer.build import build_worker_roles


@dataclass(frozen=True)
class RemoteRoles:
    policy: RemotePolicy
    reference: RemoteReference
    critic: RemoteCritic


@contextmanager
def remote_roles(config: Config, num_workers: int) -> Iterator[RemoteRoles]:
    """As `build_ray_roles` wires them, without data and engines."""
    ray.init(address="local", num_cpus=num_workers, include_dashboard=False, logging_level="ERROR")
    try:
        group = WorkerGroup(ClusterConfig(num_workers=num_workers), partial(build_worker_roles, config, 100, 100))
        scorer = RemoteScorer(group, SequenceCost())
        size = config.rollout.group_size
        yield RemoteRoles(
            RemotePolicy(scorer, config.policy.mini_batch_size * size),
            RemoteReference(scorer),
            RemoteCritic(scorer, config.critic.mini_batch_size * size),
        )
        group.close()
    finally:
        ray.shutdown()
