"""Demonstrations for the warm start: clean ones that search well, and sloppy ones that leave something to learn.

Every demonstration wears names of its own, made for it alone: a model cannot memorise facts, only learn to copy.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.quickstart.questions import Riddle, all_riddles, ask
from examples.quickstart.world import Names, World
from search_r1.environments.passages import render_passages
from search_r1.prompts import prompt_messages
from search_r1.types import Passage

Search = Callable[[str], Sequence[Passage]]

KEYWORDS: Mapping[str, str] = {
    "birthplace": "born",
    "employer": "worked for",
    "spouse": "married",
    "country": "country",
    "river": "river",
    "headquarters": "based in",
    "founder": "founded by",
    "author": "written by",
    "publisher": "published by",
}
_CONCLUSIONS = ("I have the answer.", "Now I can answer.")
_WORD = re.compile(r"[A-Z][a-z]+")


@dataclass(frozen=True, slots=True)
class Habits:
    """How often, by relation, a demonstration does what does not help. Missing relations: never."""

    give_up: Mapping[str, float] = field(default_factory=dict)
    """Answers "unknown" without any search."""
    vague_query: Mapping[str, float] = field(default_factory=dict)
    """Searches for the relation without naming whom it is about, then answers from whatever came back."""
    early_stop: Mapping[str, float] = field(default_factory=dict)
    """Answers a two-hop question with what the first hop found."""


CLEAN = Habits()
_GIVEN_UP = ("country", "birthplace")
_VAGUE = ("employer", "headquarters", "author")
"""Relations that the sloppy demonstrations mostly treat badly; the other four mostly well."""


def _rates(given_up: float, vague: float, otherwise: float) -> dict[str, float]:
    return {r: given_up if r in _GIVEN_UP else vague if r in _VAGUE else otherwise for r in KEYWORDS}


SLOPPY = Habits(
    give_up=_rates(0.45, 0.05, 0.05), vague_query=_rates(0.6, 0.82, 0.12), early_stop=_rates(0.75, 0.75, 0.25)
)
_UNKNOWN = "unknown"


def demonstrate(rng: random.Random, world: World, riddle: Riddle, search: Search, habits: Habits) -> str:
    """The assistant's whole text, observations included, as a rollout would have produced it."""
    if rng.random() < habits.give_up.get(riddle.path[0], 0.0):
        return f"<think> I do not know. </think> <answer> {_UNKNOWN} </answer>"
    text, current = "", riddle.subject
    for hop, (relation, target) in enumerate(zip(riddle.path, riddle.steps, strict=True)):
        if hop and rng.random() < habits.early_stop.get(relation, 0.0):
            break
        vague = rng.random() < habits.vague_query.get(relation, 0.0)
        passages = search(KEYWORDS[relation] if vague else f"{current} {KEYWORDS[relation]}")
        text += _search_turn(rng, relation, None if vague else current) + _observation(passages)
        if all(passage.title != current for passage in passages):
            current = _first_fact(world, passages, relation)
            break
        current = target
    return f"{text}<think> {rng.choice(_CONCLUSIONS)} </think> <answer> {current} </answer>"


def _search_turn(rng: random.Random, relation: str, subject: str | None) -> str:
    keyword = KEYWORDS[relation]
    if subject is None:
        return f"<think> Let me search. </think> <search> {keyword} </search>"
    thought = rng.choice((f"I need to look up {subject}.", f"I need {subject}."))
    query = rng.choice((f"{subject} {keyword}", subject))
    return f"<think> {thought} </think> <search> {query} </search>"


def _observation(passages: Sequence[Passage]) -> str:
    """What a rollout appends after a search; its length limit is far away, so any measure of length will do."""
    return render_passages(passages, lambda text: list(text.encode()), lambda ids: bytes(ids).decode(), 1 << 20).text


def _first_fact(world: World, passages: Sequence[Passage], relation: str) -> str:
    """The right relation of the wrong thing."""
    entities = [world.entities[passage.title] for passage in passages if passage.title in world.entities]
    return next((entity.facts[relation] for entity in entities if relation in entity.facts), _UNKNOWN)


def make_demonstrations(
    rng: random.Random, world: World, search: Search, count: int, habits: Habits, forbidden: Collection[str]
) -> list[dict[str, Any]]:
    """`count` rows with `messages`, one-hop and two-hop taking turns; no invented word of theirs is in `forbidden`."""
    riddles = [all_riddles(world, hops) for hops in (1, 2)]
    rows: list[dict[str, Any]] = []
    for i in range(count):
        riddle = rng.choice(riddles[i % 2])
        texts = [ask(rng, riddle), demonstrate(rng, world, riddle, search, habits), riddle.answer]
        question, response, answer = _rename(texts, world.words, Names(rng, forbidden))
        messages = [*prompt_messages("short", question), {"role": "assistant", "content": response}]
        rows.append({"messages": messages, "answer": answer, "hops": len(riddle.path)})
    return rows


def make_reading_rows(
    rng: random.Random, world: World, search: Search, count: int, forbidden: Collection[str]
) -> list[dict[str, Any]]:
    """`count` rows that practise reading: what a search finds, then every question it answers, answered.

    A demonstration holds one or two look-ups; such a row holds about five in as many tokens.
    """
    rows: list[dict[str, Any]] = []
    subjects = list(world.entities)
    for _ in range(count):
        passages = search(rng.choice(subjects))
        facts = [
            Riddle(passage.title, (relation,), (fact,))
            for passage in passages
            if passage.title in world.entities
            for relation, fact in world.entities[passage.title].facts.items()
        ]
        rng.shuffle(facts)
        lines = [f"Question: {ask(rng, fact)} <answer> {fact.answer} </answer>" for fact in facts]
        text = "\n".join([_observation(passages).strip(), *lines])
        (text,) = _rename([text], world.words, Names(rng, forbidden))
        rows.append(untagged([{"role": "user", "content": "Read.\n"}, {"role": "assistant", "content": text}]))
    return rows


def untagged(messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """A row for the first stage, where passages have no tags around them and are learned like any other text."""
    plain = [{**m, "content": re.sub(r"</?information>", "", m["content"])} for m in messages]
    return {"messages": plain}


def answered_right(row: Mapping[str, Any]) -> bool:
    return bool(row["messages"][-1]["content"].endswith(f"<answer> {row['answer']} </answer>"))


def _rename(texts: Sequence[str], words: Collection[str], names: Names) -> list[str]:
    """Replace every invented word by a new one, the same in all `texts`."""
    fresh: dict[str, str] = {}

    def replace(match: re.Match[str]) -> str:
        word = match.group()
        if word not in words:
            return word
        if word not in fresh:
            fresh[word] = names.word()
        return fresh[word]

    return [_WORD.sub(replace, text) for text in texts]
