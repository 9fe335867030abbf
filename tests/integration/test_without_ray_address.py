"""A machine on which somebody else's Ray cluster is up."""

from __future__ import annotations

import pytest
import ray
from ray._private.utils import read_ray_address
from ray.cluster_utils import Cluster

from search_r1.cluster.placement import connect
from search_r1.config import ClusterConfig


def test_without_an_address_a_run_has_a_ray_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        assert read_ray_address() == cluster.address, "what ray.init would join if it were not told"
        disconnect = connect(ClusterConfig(num_workers=1, cpus_per_worker=1))
        try:
            assert ray.get_runtime_context().gcs_address != cluster.address
        finally:
            disconnect()
    finally:
        cluster.shutdown()
