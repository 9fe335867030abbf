"""Where a turn ends: stop strings found in the text of sampled tokens, without decoding every token twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from search_r1.errors import EngineError

_SLACK_TOKENS = 8
"""Tokens decoded before the longest possible match, so that a character cut at the start of the tail stays outside."""


class StopMatcher:
    """Tells whether the newest token completed a stop string.

    Tokens and characters do not line up: one token may hold the end of a stop string and what follows it, and one
    character may need several tokens. So the text decides. A token whose own text lacks the last character of every
    stop string cannot complete one; only for the few others is the tail of the completion decoded.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tail = max((len(text.encode()) for text in stop), default=0) + _SLACK_TOKENS
        self._endings = self._tokens_that_may_end_a_match(vocab_size)

    def __call__(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of a completion's `token_ids` completed a stop string (earlier ones did not)."""
        if not self._stop or (self._endings is not None and token_ids[-1] not in self._endings):
            return False
        text = decode(self._tokenizer, token_ids[-self._tail :])
        return any(stop in text for stop in self._stop)

    def _tokens_that_may_end_a_match(self, vocab_size: int) -> frozenset[int] | None:
        """None when every token may: a last character of several bytes, or white space, which decoders may strip."""
        last = {text[-1] for text in self._stop}
        if any(not character.isascii() or character.isspace() for character in last):
            return None
        texts: Iterable[str] = self._tokenizer.batch_decode(
            [[token] for token in range(vocab_size)], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return frozenset(token for token, text in enumerate(texts) if any(character in text for character in last))


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of `token_ids`, special tokens included, nothing tidied."""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def end_of_text_ids(*sources: Any) -> frozenset[int]:
    """All end-of-text ids that configs, generation configs or tokenizers name (one id, a list, or none)."""
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return frozenset(found)


def new_token_limits(contexts: Sequence[Sequence[int]], max_new_tokens: int, window: int | None) -> list[int]:
    """How many tokens each context may be given within a model's window of `window` tokens.

    Raises:
        EngineError: a context is empty or leaves no room; the message names its row.
    """
    limits = []
    for row, context in enumerate(contexts):
        room = max_new_tokens if window is None else min(max_new_tokens, window - len(context))
        if not len(context):
            raise EngineError(f"context {row} is empty: there is nothing to continue")
        if room < 1:
            raise EngineError(
                f"context {row} has {len(context)} tokens, which leaves no room in the model's window of {window}"
                if max_new_tokens > 0
                else f"max_new_tokens={max_new_tokens} must be above 0"
            )
        limits.append(room)
    return limits
