from __future__ import annotations

import pytest
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from search_r1.cluster.placement import EnginePlaces, Home, Place, engine_places, shared_places, worker_bundle
from search_r1.config import ClusterConfig, Config, EngineConfig
from search_r1.errors import ConfigError

FIRST, SECOND = "a" * 56, "b" * 56


def homes(*nodes: str) -> list[Home]:
    """A worker with a GPU of its own on each of these nodes."""
    counts: dict[str, int] = {}
    found = []
    for node in nodes:
        found.append(Home(node, (str(counts.get(node, 0)),)))
        counts[node] = counts.get(node, 0) + 1
    return found


def where(places: list[Place]) -> list[tuple[str, tuple[str, ...]]]:
    return [(place.strategy.node_id, place.shared_gpus) for place in places]


def test_on_cpus_the_workers_nodes_take_turns_with_the_engines() -> None:
    config = Config(engine=EngineConfig(num_engines=3))
    places = engine_places(config, [Home(FIRST), Home(FIRST), Home(SECOND)])
    taken: list[Place] = []
    for number in range(3):
        places.take(lambda place, number=number: (taken.append(place), number)[1])
    assert [place.strategy.node_id for place in taken] == [FIRST, SECOND, FIRST]
    assert all(place.strategy.soft for place in taken), "an engine whose node left starts on another one"
    assert all(place.gpus == 0 for place in taken)


def test_engines_share_the_gpus_of_neighbours_on_one_node() -> None:
    interleaved = homes(FIRST, SECOND, FIRST, SECOND, FIRST, SECOND)
    assert where(shared_places(interleaved, 2, 2)) == [(FIRST, ("0", "1")), (SECOND, ("0", "1"))]
    assert where(shared_places(interleaved, 3, 1)) == [(FIRST, ("0",)), (FIRST, ("1",)), (FIRST, ("2",))]
    assert where(shared_places(interleaved, 1, 3)) == [(FIRST, ("0", "1", "2"))]
    for place in shared_places(interleaved, 2, 2):
        assert isinstance(place.strategy, NodeAffinitySchedulingStrategy)
        assert not place.strategy.soft, "these GPUs are nowhere else"


@pytest.mark.parametrize(("num_engines", "size", "room"), [(4, 1, 3), (2, 2, 1), (1, 3, 0)])
def test_engines_without_workers_to_share_gpus_with_say_what_there_is(num_engines: int, size: int, room: int) -> None:
    with pytest.raises(ConfigError, match=rf"hold 2, 1 of them, room for {room} engines; lower engine\.num_engines"):
        shared_places(homes(FIRST, SECOND, FIRST), num_engines, size)


def test_an_engine_that_replaces_another_one_gets_its_place() -> None:
    places = EnginePlaces([Place(shared_gpus=("0",)), Place(shared_gpus=("1",))])
    started: list[tuple[str, Place]] = []

    def start(name: str) -> str:
        return str(places.take(lambda place: (started.append((name, place)), name)[1]))

    first, _ = start("first"), start("second")
    places.give_back(first)
    start("third")
    assert started[2][1] == started[0][1]


@pytest.mark.parametrize(("share", "gpus"), [(0.0, None), (0.4, 1.0), (1.0, 1.0)])
def test_a_worker_that_takes_part_of_a_gpu_reserves_all_of_it(share: float, gpus: float | None) -> None:
    assert worker_bundle(ClusterConfig(gpus_per_worker=share, cpus_per_worker=3)).get("GPU") == gpus
