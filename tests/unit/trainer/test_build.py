from __future__ import annotations

from itertools import islice

from search_r1.config import Config
from search_r1.trainer.build import engine_factories


def test_each_engine_of_a_pool_has_a_seed_of_its_own_and_so_has_one_that_replaces_another() -> None:
    factories = engine_factories(Config(seed=7))
    assert [factory.args[0].seed for factory in islice(factories, 2)] == [7, 8]  # type: ignore[attr-defined]
    assert next(factories).args[0].seed == 9  # type: ignore[attr-defined]
