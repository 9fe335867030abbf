"""Which cached sequence does a context continue?"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Leading tokens that two lists have in common.

    >>> shared_length([1, 2, 3], [1, 2, 9, 9])
    2
    """
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(t for t in range(length) if first[t] != second[t])


def match_prefixes(held: Sequence[list[int]], contexts: Sequence[list[int]]) -> dict[int, tuple[int, int]]:
    """Give contexts the cached sequences they share the longest beginnings with, each at most once.

    Returns:
        Context index to (held index, shared tokens). At least one token of every context stays to be computed.
    """
    order = sorted((row for row, tokens in enumerate(held) if tokens), key=held.__getitem__)
    keys = [held[row] for row in order]
    taken: set[int] = set()
    found: dict[int, tuple[int, int]] = {}
    wishes = sorted(range(len(contexts)), key=lambda index: -_best(keys, contexts[index], taken)[1])
    for index in wishes:
        place, shared = _best(keys, contexts[index], taken)
        shared = min(shared, len(contexts[index]) - 1)
        if shared > 0:
            taken.add(place)
            found[index] = (order[place], shared)
    return found


def _best(keys: Sequence[list[int]], context: list[int], taken: set[int]) -> tuple[int, int]:
    """(place in `keys`, shared tokens) of the best sequence that is not taken.

    In lexicographic order the sequences that share most with a context are its neighbours.
    """
    after = bisect_right(keys, context)
    before = after - 1
    while before in taken:
        before -= 1
    while after in taken:
        after += 1
    places = [place for place in (before, after) if 0 <= place < len(keys)]
    return max(((place, shared_length(keys[place], context)) for place in places), key=lambda x: x[1], default=(0, 0))
