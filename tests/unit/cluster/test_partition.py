from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from search_r1.cluster.partition import gather, pad_to_multiple, scatter, trim


@given(st.lists(st.integers(), min_size=1, max_size=30), st.integers(1, 9))
def test_any_batch_divides_over_any_number_of_workers_and_comes_back_in_order(items: list[int], workers: int) -> None:
    padded = pad_to_multiple(items, workers)
    parts = scatter(padded, workers)
    assert len({len(part) for part in parts}) == 1
    assert len(padded) - len(items) < workers
    assert trim(gather(parts), len(items)) == items
