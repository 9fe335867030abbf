from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from search_r1.data.micro_batches import (
    SequenceCost,
    balance,
    lengths_of,
    make_shares,
    micro_batch_rows,
    mini_batch_rows,
    packed_rows,
    select_rows,
)
from tests.batches import random_batch

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@given(LENGTHS, st.integers(1, 200))
def test_micro_batches_hold_every_row_once_within_the_cap(lengths: list[int], max_tokens: int) -> None:
    groups = micro_batch_rows(lengths, max_tokens)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        padded = len(group) * max(lengths[row] for row in group)
        assert padded <= max_tokens or len(group) == 1


@given(LENGTHS, st.integers(1, 200))
def test_packs_hold_every_row_once_within_the_cap_and_few_are_needed(lengths: list[int], max_tokens: int) -> None:
    groups = packed_rows(lengths, max_tokens)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    sizes = [sum(lengths[row] for row in group) for group in groups]
    assert all(size <= max_tokens or len(group) == 1 for size, group in zip(sizes, groups, strict=True))
    if lengths and max(lengths) <= max_tokens:
        assert sum(size <= max_tokens / 2 for size in sizes) <= 1


def test_first_fit_decreasing_fills_gaps_that_padding_cannot() -> None:
    assert packed_rows([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert len(micro_batch_rows([6, 5, 4, 3, 2], 10)) == 3


def test_a_pack_never_takes_a_sequence_above_the_cap_along(caplog: pytest.LogCaptureFixture) -> None:
    assert packed_rows([5, 50, 5], 10) == [[1], [0, 2]]
    assert "50 tokens" in caplog.text


def test_balance_by_cost_gives_the_long_sequence_less_company() -> None:
    """Where attention dominates, 8 tokens cost as much as four sequences of 4: 64 = 4 * 16."""
    lengths = [8, 4, 4, 4, 4]
    by_length = balance([SequenceCost()(n) for n in lengths], 2)
    by_cost = balance([SequenceCost(0.0, 1.0)(n) for n in lengths], 2)
    assert sorted(map(len, by_length)) == [2, 3]
    assert by_cost == [[0], [1, 2, 3, 4]]
    assert SequenceCost(2.0, 0.5)(10) == 70


def test_a_sequence_above_the_cap_goes_alone_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert micro_batch_rows([5, 50, 5], 10) == [[1], [0, 2]]
    assert "50 tokens" in caplog.text


@given(st.integers(0, 50), st.integers(1, 20))
def test_mini_batches_drop_nothing_and_are_even(num_rows: int, size: int) -> None:
    parts = mini_batch_rows(num_rows, size)
    assert [row for part in parts for row in part] == list(range(num_rows))
    assert len(parts) == -(-num_rows // size)
    assert all(0 < len(part) <= size for part in parts)


@given(LENGTHS, st.integers(1, 8))
def test_balance_deals_every_row_once_and_no_worker_has_twice_its_part(lengths: list[int], workers: int) -> None:
    parts = balance(lengths, workers)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    heaviest = max((sum(lengths[row] for row in part) for part in parts), default=0)
    assert heaviest <= sum(lengths) / workers + max(lengths, default=0)


def test_selected_rows_are_cut_to_their_effective_length() -> None:
    batch = random_batch((9, 14, 6, 11))
    part = select_rows(batch, [0, 2])
    assert part.rollout.input_ids.shape == (2, 9)
    assert torch.equal(part.advantages[1], batch.advantages[2, :9])


@pytest.mark.parametrize("num_workers", [1, 2, 3, 9])
def test_shares_carry_the_counts_of_the_whole_mini_batch(num_workers: int) -> None:
    batch = random_batch((9, 14, 6, 11, 7))
    sampled = batch.rollout.loss_mask.sum(dim=1)
    shares = make_shares(batch, 2, num_workers)
    assert len(shares) == num_workers
    counts = [mine.num_tokens for mine in shares[0]]
    assert counts == [int(sampled[rows].sum()) for rows in mini_batch_rows(5, 2)]
    assert all([share.num_tokens for share in worker] == counts for worker in shares)
    lengths = sorted(n for worker in shares for share in worker for n in lengths_of(share.batch.rollout))
    assert lengths == [6, 7, 9, 11, 14]
