"""One-hop and two-hop questions over a world, in several wordings."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from examples.quickstart.world import RELATIONS, World

_ASK: Mapping[str, tuple[str, ...]] = {
    "birthplace": ("Where was {} born?", "What is the birthplace of {}?", "In which town was {} born?"),
    "employer": ("Which company did {} work for?", "Who was the employer of {}?", "Where did {} work?"),
    "spouse": ("Who was {} married to?", "Who was the spouse of {}?", "Whom did {} marry?"),
    "country": ("In which country is {}?", "Which country does {} belong to?", "What is the country of {}?"),
    "river": ("Which river runs through {}?", "On which river does {} stand?", "What is the river of {}?"),
    "headquarters": ("Where is {} based?", "In which town is {} based?", "Where are the head offices of {}?"),
    "founder": ("Who founded {}?", "Who was the founder of {}?", "Who set up {}?"),
    "author": ("Who wrote {}?", "Who is the author of {}?", "Who is the writer of {}?"),
    "publisher": ("Which company published {}?", "Who was the publisher of {}?", "Who published {}?"),
}
_DESCRIBE: Mapping[str, tuple[str, ...]] = {
    "birthplace": ("the town where {} was born", "the birthplace of {}"),
    "employer": ("the company that employed {}", "the employer of {}"),
    "headquarters": ("the town where {} is based", "the home town of {}"),
    "founder": ("the person who founded {}", "the founder of {}"),
    "author": ("the person who wrote {}", "the author of {}"),
    "publisher": ("the company that published {}", "the publisher of {}"),
}


@dataclass(frozen=True, slots=True)
class Riddle:
    """What a question asks: start at `subject`, follow `path`, one relation a hop."""

    subject: str
    path: tuple[str, ...]
    steps: tuple[str, ...]
    """What each hop arrives at; the last one is the answer."""

    @property
    def answer(self) -> str:
        return self.steps[-1]

    @property
    def entities(self) -> set[str]:
        """Subject, bridge and answer."""
        return {self.subject, *self.steps}


def all_riddles(world: World, hops: int) -> list[Riddle]:
    """Everything one may ask in `hops` (1 or 2) hops; no answer stands in its own question."""
    riddles = []
    for subject in world.entities.values():
        for first in RELATIONS[subject.kind]:
            bridge = subject.facts[first]
            if hops == 1:
                riddles.append(Riddle(subject.name, (first,), (bridge,)))
            elif first in _DESCRIBE:
                riddles += [
                    Riddle(subject.name, (first, second), (bridge, answer))
                    for second, answer in world.entities[bridge].facts.items()
                    if answer != subject.name
                ]
    return riddles


def ask(rng: random.Random, riddle: Riddle) -> str:
    """The question in words, ending in a question mark."""
    subject = riddle.subject
    for relation in riddle.path[:-1]:
        subject = rng.choice(_DESCRIBE[relation]).format(subject)
    return rng.choice(_ASK[riddle.path[-1]]).format(subject)


def sample_riddles(rng: random.Random, world: World, count: int) -> list[Riddle]:
    """`count` distinct riddles, one-hop and two-hop ones taking turns."""
    one, two = (rng.sample(all_riddles(world, hops), count) for hops in (1, 2))
    return [(one if i % 2 == 0 else two)[i // 2] for i in range(count)]
