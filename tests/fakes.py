"""Small stand-ins for the protocols, and builders of the types. Deterministic, in process, no mocking."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from search_r1.errors import RetrieverError
from search_r1.protocols import Weights
from search_r1.types import (
    Action,
    Completion,
    FinishReason,
    Observation,
    Passage,
    Prompt,
    Question,
    SamplingConfig,
    Status,
    Trajectory,
    Turn,
)

EOS_ID = 256
EOS_TEXT = "<|end|>"


def encode(text: str) -> list[int]:
    """UTF-8 bytes as token ids; `EOS_TEXT` in a text stays plain text."""
    return list(text.encode())


def decode(token_ids: Sequence[int]) -> str:
    """Inverse of `encode`; `EOS_ID` becomes `EOS_TEXT`, a broken character the replacement character."""
    parts = (EOS_TEXT.encode() if token_id == EOS_ID else bytes([token_id]) for token_id in token_ids)
    return b"".join(parts).decode(errors="replace")


def make_completion(text: str, finish_reason: FinishReason = "stop") -> Completion:
    """`text` as sampled byte tokens; a trailing `EOS_TEXT` becomes the one end-of-text token."""
    plain = text.removesuffix(EOS_TEXT)
    token_ids = tuple(encode(plain)) + ((EOS_ID,) if plain != text else ())
    return Completion(token_ids, tuple(-(1 + token_id) / 512 for token_id in token_ids), text, finish_reason)


class FunctionEngine:
    """Answers each context by a function of its text and seed; cuts at the token limit like a real engine."""

    def __init__(self, respond: Callable[[str, int], str]) -> None:
        self._respond = respond
        self.contexts: list[list[str]] = []
        """Decoded contexts, one list a call."""
        self.samplings: list[SamplingConfig] = []
        self.seeds: list[list[int]] = []

    def generate(
        self, contexts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[Completion]:
        texts = [decode(context) for context in contexts]
        self.contexts.append(texts)
        self.samplings.append(sampling)
        self.seeds.append(list(seeds))
        return [
            self._cut(make_completion(self._respond(text, seed)), sampling.max_new_tokens)
            for text, seed in zip(texts, seeds, strict=True)
        ]

    @staticmethod
    def _cut(whole: Completion, limit: int) -> Completion:
        if len(whole.token_ids) <= limit:
            return whole
        token_ids = whole.token_ids[:limit]
        return Completion(token_ids, whole.log_probs[:limit], decode(token_ids), "length")

    def load_weights(self, weights: Weights) -> None:
        for _ in weights:
            pass

    def close(self) -> None:
        pass


class ScriptedEngine(FunctionEngine):
    """Plays one list of texts a call, one text a context."""

    def __init__(self, *calls: Sequence[str]) -> None:
        texts = iter([text for call in calls for text in call])
        super().__init__(lambda context, seed: next(texts))


class AsyncEngine(FunctionEngine):
    """A `FunctionEngine` that samples single contexts too, each for some moments of the event loop."""

    def __init__(self, respond: Callable[[str, int], str], moments: Callable[[str, int], int] | None = None) -> None:
        super().__init__(respond)
        self._moments = moments or (lambda context, seed: 1)
        self.running = 0
        self.max_running = 0

    async def agenerate(self, context: Sequence[int], sampling: SamplingConfig, seed: int) -> Completion:
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            for _ in range(self._moments(decode(context), seed)):
                await asyncio.sleep(0)
            return self.generate([context], sampling, [seed])[0]
        finally:
            self.running -= 1


class FakeRetriever:
    """Finds what a function of the query returns (by default one passage that echoes it) and records every request."""

    def __init__(self, find: Callable[[str], Sequence[Passage]] | None = None, error: str = "") -> None:
        self._find = find or (lambda query: [Passage(title=query, text="echo", passage_id=f"id-{query}", score=1.0)])
        self.error = error
        """When set, every search raises it."""
        self.requests: list[list[str]] = []

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        self.requests.append(list(queries))
        if self.error:
            raise RetrieverError(self.error)
        return [list(self._find(query))[:top_k] for query in queries]


def make_question(text: str = "Who?", golden_answers: Sequence[str] = ("Paris",), data_source: str = "nq") -> Question:
    messages = ({"role": "user", "content": text},)
    return Question(f"{data_source}/test/{text}", data_source, text, messages, tuple(golden_answers))


def make_prompt(text: str = "Who?", group_id: int = 0, golden_answers: Sequence[str] = ("Paris",)) -> Prompt:
    return Prompt(make_question(text, golden_answers), group_id, tuple(encode(text)))


def search_turn(query: str, observation: str | None = "\n\n<information>echo</information>\n\n") -> Turn:
    observed = None if observation is None else Observation(observation, tuple(encode(observation)), seconds=0.5)
    return Turn(make_completion(f"<search>{query}</search>"), Action("search", query), observed)


def answer_turn(answer: str) -> Turn:
    return Turn(make_completion(f"<answer>{answer}</answer>"), Action("answer", answer))


def make_trajectory(
    turns: Sequence[Turn], status: Status = Status.ANSWERED, prompt: Prompt | None = None, failure: str = ""
) -> Trajectory:
    """A finished trajectory made of these turns, tokens and mask in step with them."""
    made = Trajectory(prompt or make_prompt(), turns=list(turns), status=status, failure=failure)
    for turn in turns:
        made.response_ids += turn.completion.token_ids
        made.log_probs += turn.completion.log_probs
        made.loss_mask += [True] * len(turn.completion.token_ids)
        if turn.observation is not None:
            made.response_ids += turn.observation.token_ids
            made.log_probs += [0.0] * len(turn.observation.token_ids)
            made.loss_mask += [False] * len(turn.observation.token_ids)
    return made
