"""Dividing a list over workers and putting the answers back in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def pad_to_multiple(items: Sequence[T], num_workers: int) -> list[T]:
    """Append copies of the first item until the length divides by `num_workers`; `trim` drops their results.

    >>> pad_to_multiple([1, 2, 3], 2)
    [1, 2, 3, 1]
    """
    missing = -len(items) % num_workers if items else 0
    return [*items, *[items[0]] * missing]


def scatter(items: Sequence[T], num_workers: int) -> list[list[T]]:
    """Equal consecutive parts; the length must divide (see `pad_to_multiple`)."""
    size, rest = divmod(len(items), num_workers)
    assert rest == 0, f"{len(items)} items do not divide over {num_workers} workers"
    return [list(items[i * size : (i + 1) * size]) for i in range(num_workers)]


def gather(parts: Sequence[Sequence[T]]) -> list[T]:
    return [item for part in parts for item in part]


def trim(items: Sequence[T], length: int) -> list[T]:
    """Drop the results of dummy items."""
    return list(items[:length])
