"""Requests to a service behind a retriever: pooled, timed out, tried again a bounded number of times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import orjson

from retriever_server.errors import RequestError

_RETRIED = (408, 429, 500, 502, 503, 504)
_MAX_WAIT_S = 5.0


class Upstream:
    """Speaks to one service. Its errors name the service and the status, never the address or what was sent: both may
    hold a key.

    Args:
        before_each: called before every request, repeated ones too; what it raises ends `ask`.
    """

    def __init__(
        self,
        name: str,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float = 20.0,
        tries: int = 3,
        before_each: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._tries = tries
        self._before_each = before_each
        limits = httpx.Limits(max_connections=32, max_keepalive_connections=32)
        self._client = httpx.Client(headers=headers, timeout=timeout_s, limits=limits, trust_env=False)

    def ask(self, method: str, url: str, **request: Any) -> Any:
        """The parsed JSON of a 200 answer; `request` as in httpx.

        Raises:
            RequestError: 503 where the service stays unreachable, overloaded or broken, with every retry used up.
            ValueError: it refused this request (another 4xx) or answered something that is no JSON.
        """
        wait_s, trouble = 0.0, ""
        for attempt in range(self._tries):
            time.sleep(wait_s)
            wait_s = min(0.2 * 4**attempt, _MAX_WAIT_S)
            self._before_each()
            try:
                response = self._client.request(method, url, **request)
            except httpx.TransportError as error:
                trouble = f"gave no answer ({type(error).__name__})"
                continue
            if response.status_code not in _RETRIED:
                return self._parsed(response)
            trouble = f"answered {response.status_code}"
            if response.headers.get("retry-after", "").isdecimal():
                wait_s = min(max(wait_s, float(response.headers["retry-after"])), _MAX_WAIT_S)
        raise RequestError(503, f"{self.name} {trouble}, {self._tries} times", reason="upstream", retry_after_s=2)

    def _parsed(self, response: httpx.Response) -> Any:
        if response.status_code in (401, 403):
            what = f"{self.name} answered {response.status_code}: the key is missing, wrong or used up"
            raise RequestError(503, what, reason="upstream")
        if response.status_code != 200:
            raise ValueError(f"{self.name} refused the request with {response.status_code}")
        try:
            return orjson.loads(response.content)
        except orjson.JSONDecodeError:
            raise ValueError(f"{self.name} answered something that is no JSON") from None
