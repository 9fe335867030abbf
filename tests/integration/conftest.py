"""What several integration tests start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A Ray of four CPUs on this machine, shared by the tests of a file."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()
