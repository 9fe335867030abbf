"""Prefix matching against a quadratic search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from search_r1.engines.prefixes import match_prefixes, shared_length

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=6)


@given(held=SEQUENCES, contexts=SEQUENCES)
def test_matches_share_what_they_say_and_no_cached_sequence_is_given_twice(held, contexts):
    found = match_prefixes(held, contexts)
    rows = [row for row, _ in found.values()]
    assert len(rows) == len(set(rows))
    for index, (row, shared) in found.items():
        assert 0 < shared < len(contexts[index])
        assert held[row][:shared] == contexts[index][:shared]


@given(held=SEQUENCES, context=st.lists(st.integers(0, 2), min_size=2, max_size=8))
def test_a_lone_context_gets_the_longest_beginning_there_is(held, context):
    best = min(max((shared_length(tokens, context) for tokens in held), default=0), len(context) - 1)
    found = match_prefixes(held, [context])
    assert (found[0][1] if found else 0) == best


def test_every_conversation_of_a_group_finds_its_own_row():
    held = [[9, 9, turn, 1, 2] for turn in range(6)]
    contexts = [[*held[row], 4, 4] for row in (5, 1, 3)]
    assert match_prefixes(held, contexts) == {0: (5, 5), 1: (1, 5), 2: (3, 5)}
