"""Errors that end in one clear sentence: at start with exit code 2, in a request with an HTTP status."""

from __future__ import annotations

from collections.abc import Mapping


class StartError(Exception):
    """A file, an index or a setting is wrong. The message names it and the remedy."""


class RequestError(Exception):
    """A request is refused. `status` is its HTTP status; the message tells the client what to change."""

    def __init__(self, status: int, message: str, *, reason: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        """One word for the metrics, e.g. invalid, too_large, busy, deadline, failed."""
        self.retry_after_s = retry_after_s


class QueriesFailed(RequestError):
    """Some queries of a search are refused and the others are not. Reads as the first refusal."""

    def __init__(self, causes: Mapping[int, RequestError]) -> None:
        first = next(iter(causes.values()))
        super().__init__(first.status, str(first), reason=first.reason, retry_after_s=first.retry_after_s)
        self.causes = causes
        """By the query's position in the search."""
