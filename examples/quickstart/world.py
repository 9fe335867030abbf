"""A fictional encyclopedia: towns, companies, people and books with invented names, told in plain English.

Nothing in it can be known beforehand, so a question is answered by searching or not at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ONSETS = _words("b br d dr f g gr h j k kl l m n p r s sk st t tr v w z")
_VOWELS = _words("a e i o u")
_CODAS = ("", "", "", "l", "n", "r", "s", "m", "nd", "rk", "x")
_ADJECTIVES = _words(
    "Amber Silent Broken Golden Distant Hidden Crimson Frozen Hollow Ivory Pale Restless Scarlet Velvet Winter Burning "
    "Gentle Iron Lonely Marble Northern Patient Quiet Rusted Secret Tender Vanished Weary Wild Young"
)
_NOUNS = _words(
    "Orchard Harbor Lantern Garden Mirror Bridge Compass River Tower Meadow Feather Letter Shadow Kingdom Window "
    "Forest Island Anchor Clock Ladder Candle Falcon Key Ocean Crown Violin Bell Road Storm Map"
)
_BRANCHES = _words("Mills Foundry Brothers Press Shipping Glassworks Trading Motors Textiles Instruments")
_JOBS = _words("cartographer painter botanist engineer poet chemist sculptor historian composer astronomer")
_PRODUCTS = _words("glass paper clocks rope engines cloth lamps tools ink bricks")

RELATIONS: Mapping[str, tuple[str, ...]] = {
    "person": ("birthplace", "employer", "spouse"),
    "town": ("country", "river"),
    "company": ("headquarters", "founder"),
    "book": ("author", "publisher"),
}
"""What the encyclopedia says about each kind of entity."""


@dataclass(frozen=True, slots=True)
class Entity:
    """Something with a passage of its own."""

    name: str
    kind: str
    facts: Mapping[str, str]
    """Relation to the name of what stands in it."""


@dataclass(frozen=True, slots=True)
class World:
    """Entities and the passages that tell of them, a few of them of nothing one is asked about."""

    entities: Mapping[str, Entity]
    passages: tuple[tuple[str, str], ...]
    """Title and text."""
    words: frozenset[str]
    """Every invented word in it."""


@dataclass(frozen=True, slots=True)
class Size:
    """How many of everything a world holds."""

    people: int
    towns: int
    companies: int
    books: int
    distractors: int

    @property
    def passages(self) -> int:
        return self.people + self.towns + self.companies + self.books + self.distractors


class Names:
    """Invents words from one inventory of syllables and never gives the same word twice."""

    def __init__(self, rng: random.Random, taken: Iterable[str] = ()) -> None:
        self._rng = rng
        self._taken = {*taken, *_ADJECTIVES, *_NOUNS, *_BRANCHES}
        self.given: set[str] = set()

    def word(self, syllables: int | None = None) -> str:
        while True:
            count = syllables or self._rng.choice((2, 2, 2, 3))
            word = "".join(self._rng.choice(SYLLABLES) for _ in range(count)).capitalize()
            if len(word) <= 9 and word not in self._taken:
                self._taken.add(word)
                self.given.add(word)
                return word


def _syllables(count: int) -> tuple[str, ...]:
    rng = random.Random(7)
    found: set[str] = set()
    while len(found) < count:
        found.add(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS))
    return tuple(sorted(found))


SYLLABLES = _syllables(140)


def make_world(seed: int, size: Size, taken: Iterable[str] = ()) -> World:
    """A world of `size`, none of whose invented words is in `taken`."""
    rng = random.Random(seed)
    names = Names(rng, taken)
    entities = _entities(rng, names, size)
    by_kind = {kind: [entity for entity in entities.values() if entity.kind == kind] for kind in RELATIONS}
    passages = [(entity.name, _TELL[entity.kind](rng, entity)) for entity in entities.values()]
    passages += _distractors(rng, by_kind, size.distractors)
    return World(entities, tuple(passages), frozenset(names.given))


def _entities(rng: random.Random, names: Names, size: Size) -> dict[str, Entity]:
    first = [names.word(2) for _ in range(size.people // 3)]
    last = [names.word() for _ in range(size.people // 2)]
    countries = [names.word(3) for _ in range(max(4, size.towns // 12))]
    rivers = [names.word() for _ in range(max(4, size.towns // 3))]
    places = [names.word() for _ in range(max(4, size.books // 2))]
    towns = [names.word() for _ in range(size.towns)]
    companies = [f"{names.word()} {rng.choice(_BRANCHES)}" for _ in range(size.companies)]
    people = _distinct(size.people, lambda: f"{rng.choice(first)} {rng.choice(last)}")
    books = _distinct(size.books, lambda: f"The {rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)} of {rng.choice(places)}")
    pick: Mapping[str, list[str]] = {
        "country": countries,
        "river": rivers,
        "headquarters": towns,
        "birthplace": towns,
        "employer": companies,
        "publisher": companies,
        "founder": people,
        "author": people,
    }
    entities = {}
    for kind, kind_names in (("town", towns), ("company", companies), ("person", people), ("book", books)):
        for name in kind_names:
            facts = {relation: rng.choice(pick[relation]) for relation in RELATIONS[kind] if relation != "spouse"}
            if kind == "person":
                facts["spouse"] = rng.choice([other for other in people if other != name])
            entities[name] = Entity(name, kind, facts)
    return entities


def _distinct(count: int, make: Callable[[], str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[make()] = None
    return list(found)


def _tell_town(rng: random.Random, town: Entity) -> str:
    name, country, river = town.name, town.facts["country"], town.facts["river"]
    place = (
        f"{name} is a town in {country}.",
        f"{name} is a market town in the country of {country}.",
        f"The town of {name} lies in {country}.",
        f"{name} is an old town of {country}.",
    )
    water = (
        f"The river {river} runs through it.",
        f"It stands on the river {river}.",
        f"It was founded in {rng.randint(1100, 1800)} on the banks of the {river}.",
        f"Its mills are driven by the river {river}.",
    )
    return f"{rng.choice(place)} {rng.choice(water)}"


def _tell_company(rng: random.Random, company: Entity) -> str:
    name, town, founder = company.name, company.facts["headquarters"], company.facts["founder"]
    product, year = rng.choice(_PRODUCTS), rng.randint(1820, 1990)
    seat = (
        f"{name} is a company based in {town} that makes {product}.",
        f"{name} makes {product} and has its headquarters in {town}.",
        f"{name} is a maker of {product} with head offices in {town}.",
        f"From its seat in {town}, {name} sells {product}.",
    )
    origin = (
        f"It was founded by {founder} in {year}.",
        f"{founder} founded it in {year}.",
        f"Its founder was {founder}.",
        f"It was set up by {founder}.",
    )
    return f"{rng.choice(seat)} {rng.choice(origin)}"


def _tell_person(rng: random.Random, person: Entity) -> str:
    name, job, year = person.name, rng.choice(_JOBS), rng.randint(1820, 1990)
    town, employer, spouse = (person.facts[relation] for relation in RELATIONS["person"])
    birth = (
        f"{name} was a {job} born in {town} in {year}.",
        f"{name} was born in {year} in {town} and became a {job}.",
        f"Born in {town}, {name} was a noted {job}.",
        f"{name} was a {job} who came from {town}.",
    )
    work = (
        f"The {job} worked for {employer}",
        f"{name.split()[0]} was employed by {employer}",
        f"Most of the career was spent at {employer}",
    )
    marriage = (f" and married {spouse}.", f" and was the spouse of {spouse}.", f". A wedding with {spouse} followed.")
    return f"{rng.choice(birth)} {rng.choice(work)}{rng.choice(marriage)}"


def _tell_book(rng: random.Random, book: Entity) -> str:
    name, author, publisher = book.name, book.facts["author"], book.facts["publisher"]
    year = rng.randint(1880, 2010)
    writing = (
        f"{name} is a novel by {author}.",
        f"{name} is a book written by {author} in {year}.",
        f"{author} wrote the novel {name}.",
        f"{name} is the best known work of {author}.",
    )
    printing = (
        f"It was published by {publisher}.",
        f"{publisher} published it in {year}.",
        f"The publisher was {publisher}.",
        f"It came out with {publisher}.",
    )
    return f"{rng.choice(writing)} {rng.choice(printing)}"


_TELL: Mapping[str, Callable[[random.Random, Entity], str]] = {
    "town": _tell_town,
    "company": _tell_company,
    "person": _tell_person,
    "book": _tell_book,
}


def _distractors(rng: random.Random, by_kind: Mapping[str, list[Entity]], count: int) -> list[tuple[str, str]]:
    """Passages that share names with the entities' own and answer no question."""
    town, person, company = (lambda kind=kind: rng.choice(by_kind[kind]).name for kind in ("town", "person", "company"))
    passages = []
    for _ in range(count):
        shape = rng.randrange(4)
        if shape == 0:
            title = f"{town()} Fair"
            text = f"The {title} is held each summer. It draws visitors from {town()} and {town()}."
        elif shape == 1:
            title = f"{person().split()[1]} Prize"
            text = f"The {title} is given to a {rng.choice(_JOBS)}. {person()} won it in {rng.randint(1950, 2015)}."
        elif shape == 2:
            title = f"{rng.choice(by_kind['town']).facts['river']} Bridge"
            text = f"The {title} crosses the river near {town()}. {company()} built it in {rng.randint(1820, 1990)}."
        else:
            title = f"{company().split()[0]} Museum"
            text = f"The {title} shows old {rng.choice(_PRODUCTS)} and {rng.choice(_PRODUCTS)}. It stands in {town()}."
        passages.append((title, text))
    return passages
