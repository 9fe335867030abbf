"""The search environment: a query in tags goes in, passages in tags come out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from search_r1.config import EnvironmentConfig
from search_r1.environments.passages import Decode, Encode, fit_lines, render_passages
from search_r1.errors import ConfigError, RetrieverError
from search_r1.protocols import Retriever
from search_r1.rollout.actions import clean_query, parse_search_action
from search_r1.types import Action, Completion, Observation, Passage, Prompt

CORRECTION = (
    "That was no valid action. A query stands between an opening and a closing search tag, "
    "the final answer between an opening and a closing answer tag."
)
"""Answers an invalid action. It names the tags without writing one, so that nothing in it is parsed or scored."""


class SearchEnvironment:
    """Answers all searches of a turn with one batched request to the retriever."""

    def __init__(
        self, retriever: Retriever, encode: Encode, decode: Decode, config: EnvironmentConfig, max_obs_length: int
    ) -> None:
        """`encode` must treat special tokens as plain text: passages are others' text.

        Raises:
            ConfigError: `max_obs_length` has no room for the tags around the passages.
        """
        self._retriever: Any = retriever
        self._encode = encode
        self._decode = decode
        self._config = config
        self._max_obs_length = max_obs_length
        try:
            self._render([])
            correction = fit_lines([CORRECTION], ("\n\n", "\n\n"), encode, decode, max_obs_length)
        except ValueError as error:
            raise ConfigError(f"rollout.max_obs_length={max_obs_length} is too small: {error}; raise it") from error
        self._correction = Observation(correction.text, correction.token_ids)

    @property
    def stop(self) -> tuple[str, ...]:
        return ("</search>", "</answer>")

    def parse(self, completion: Completion) -> Action:
        return parse_search_action(completion.text)

    def step(self, actions: Sequence[Action], prompts: Sequence[Prompt]) -> list[Observation]:
        """Passages for a search, a correction for an invalid action, in order.

        Without a search the retriever is not called. When it fails, all searches of the turn come back as failed.
        """
        observations = [self._correction] * len(actions)
        searches = [index for index, action in enumerate(actions) if action.kind == "search"]
        found = self._search([actions[index].content for index in searches]) if searches else []
        for index, observation in zip(searches, found, strict=True):
            observations[index] = observation
        return observations

    async def astep(self, action: Action, prompt: Prompt) -> Observation:
        """The same for one action. A retriever without `asearch` is called in a thread."""
        if action.kind != "search":
            return self._correction
        query = self._query(action.content)
        start = perf_counter()
        try:
            if hasattr(self._retriever, "asearch"):
                passages = await self._retriever.asearch(query, self._config.top_k)
            else:
                (passages,) = await asyncio.to_thread(self._retriever.search, [query], self._config.top_k)
        except RetrieverError as error:
            return Observation("", (), seconds=perf_counter() - start, failure=str(error))
        return self._render(passages, perf_counter() - start)

    async def aclose(self) -> None:
        """Close what the retriever opened for `astep`."""
        if hasattr(self._retriever, "aclose"):
            await self._retriever.aclose()

    def _query(self, content: str) -> str:
        return clean_query(content)[: self._config.max_query_chars]

    def _search(self, contents: Sequence[str]) -> list[Observation]:
        queries = [self._query(content) for content in contents]
        start = perf_counter()
        try:
            results = self._retriever.search(queries, self._config.top_k)
        except RetrieverError as error:
            return [Observation("", (), seconds=perf_counter() - start, failure=str(error))] * len(queries)
        seconds = perf_counter() - start
        assert len(results) == len(queries), f"{len(results)} results for {len(queries)} queries"
        return [self._render(passages, seconds) for passages in results]

    def _render(self, passages: Sequence[Passage], seconds: float = 0.0) -> Observation:
        text, token_ids, truncated = render_passages(passages, self._encode, self._decode, self._max_obs_length)
        return Observation(text, token_ids, tuple(passages), seconds, truncated)
