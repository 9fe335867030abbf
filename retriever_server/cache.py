"""An exact-string LRU of search results, bounded in bytes."""

from __future__ import annotations

import sys
from collections import OrderedDict

from retriever_server.retriever import ScoredPassage

_ENTRY_BYTES = 350
_PASSAGE_BYTES = 150


Key = tuple[str, str, int]
"""Index fingerprint, query, top-k."""


class ResultCache:
    """Results by key, the least recently used leave first. `max_bytes` 0 keeps nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[Key, tuple[list[ScoredPassage], int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> list[ScoredPassage] | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Key, passages: list[ScoredPassage]) -> None:
        if not self._max_bytes:
            return
        size = _ENTRY_BYTES + sys.getsizeof(key[1])
        for passage in passages:
            size += _PASSAGE_BYTES + len(passage.document)
        if size > self._max_bytes:
            return
        replaced = self._entries.pop(key, None)
        self._num_bytes += size - (replaced[1] if replaced else 0)
        self._entries[key] = passages, size
        while self._num_bytes > self._max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self._num_bytes -= freed
