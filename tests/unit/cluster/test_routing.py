from __future__ import annotations

from collections import Counter

from search_r1.cluster.routing import Router

ENGINES = ["a", "b", "c"]


def test_siblings_stay_together_and_groups_spread() -> None:
    router: Router[str] = Router()
    homes = [{router.assign([7, 7, 7, group], ENGINES) for _ in range(5)} for group in range(6)]
    assert all(len(home) == 1 for home in homes)
    assert Counter(home.pop() for home in homes) == {"a": 2, "b": 2, "c": 2}


def test_the_turns_of_a_trajectory_stay_together_though_all_prompts_share_a_preamble() -> None:
    router: Router[str] = Router()
    preamble = list(range(200))
    homes = [router.assign([*preamble, 1000 + number], ENGINES) for number in range(9)]
    for home in homes:
        router.release(home)
    for number in reversed(range(9)):
        context = [*preamble, 1000 + number, 1, 2, 3]
        assert router.assign(context, ENGINES) == homes[number]
        assert router.assign([*context, 4], ENGINES) == homes[number]


def test_an_engine_that_is_much_busier_keeps_nobody() -> None:
    router: Router[str] = Router()
    counts = Counter(router.assign([1, 2, 3], ENGINES) for _ in range(300))
    assert min(counts.values()) > 70


def test_what_is_released_counts_no_longer() -> None:
    router: Router[str] = Router()
    assert [router.assign([token], ["a", "b"]) for token in range(4)] == ["a", "b", "a", "b"]
    router.release("b", 2)
    assert [router.assign([9 + token], ["a", "b"]) for token in range(2)] == ["b", "b"]


def test_an_engine_that_is_gone_keeps_nobody() -> None:
    router: Router[str] = Router()
    assert router.assign([1], ["a"]) == "a"
    assert router.assign([1, 2], ["b", "c"]) == "b"


def test_dropped_caches_keep_nobody() -> None:
    router: Router[str] = Router()
    router.assign([5], ["a", "b"])
    router.assign([1], ["a", "b"])
    router.release("b")
    router.forget_homes()
    assert router.assign([5, 1], ["a", "b"]) == "b"
