"""Generated knowledge graph of people, towns, companies, schools, books and rivers.

Every relation has one object per subject: following it forward leads to one entity, backward to any
number of them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Literal

Kind = Literal["person", "town", "company", "school", "book", "river"]
_SHARES: dict[Kind, int] = {  # percent of all entities
    "person": 34,
    "town": 20,
    "company": 14,
    "school": 10,
    "book": 14,
    "river": 8,
}


@dataclass(frozen=True, slots=True)
class Relation:
    name: str
    subject: Kind
    object: Kind
    sentences: tuple[str, ...]  # alternative wordings with {s} and {o}
    ahead: str  # description of the object by the subject
    back: str  # description of the subject by the object


RELATIONS = {
    relation.name: relation
    for relation in (
        Relation(
            "born",
            "person",
            "town",
            ("{s} was born in {o}.", "The birthplace of {s} is {o}."),
            "the town in which {} was born",
            "the person who was born in {}",
        ),
        Relation(
            "works",
            "person",
            "company",
            ("{s} works for {o}.", "Among the people of {o} is {s}."),
            "the company that {} works for",
            "the person who works for {}",
        ),
        Relation(
            "studied",
            "person",
            "school",
            ("{s} studied at {o}.", "A former student of {o} is {s}."),
            "the school at which {} studied",
            "the person who studied at {}",
        ),
        Relation(
            "seat",
            "company",
            "town",
            ("{s} has its seat in {o}.", "The offices of {s} are found in {o}."),
            "the town in which {} has its seat",
            "the company that has its seat in {}",
        ),
        Relation(
            "founded",
            "company",
            "person",
            ("{s} was founded by {o}.", "The founder of {s} was {o}."),
            "the founder of {}",
            "the company that {} founded",
        ),
        Relation(
            "stands",
            "school",
            "town",
            ("{s} stands in {o}.", "One of the schools of {o} is {s}."),
            "the town in which {} stands",
            "the school that stands in {}",
        ),
        Relation(
            "wrote",
            "book",
            "person",
            ("{s} was written by {o}.", "The author of {s} is {o}."),
            "the author of {}",
            "the book that {} wrote",
        ),
        Relation(
            "plays",
            "book",
            "town",
            ("{s} is set in {o}.", "The events of {s} take place in {o}."),
            "the town in which {} is set",
            "the book that is set in {}",
        ),
        Relation(
            "lies",
            "town",
            "river",
            ("{s} lies on {o}.", "The river that runs through {s} is {o}."),
            "the river on which {} lies",
            "the town that lies on {}",
        ),
    )
}


@dataclass(frozen=True, slots=True, order=True)
class Fact:
    subject: str
    relation: str
    object: str


@dataclass(frozen=True, slots=True)
class Hop:
    """One hop, forward or backward along a relation."""

    relation: str
    ahead: bool

    def leads_to(self) -> Kind:
        relation = RELATIONS[self.relation]
        return relation.object if self.ahead else relation.subject

    def describe(self, name: str) -> str:
        relation = RELATIONS[self.relation]
        return (relation.ahead if self.ahead else relation.back).format(name)


class KnowledgeGraph:
    """Entities with their kinds, and facts about them."""

    def __init__(self, kinds: Mapping[str, Kind], facts: frozenset[Fact]) -> None:
        self.kinds, self.facts = kinds, facts
        self._next: dict[str, dict[Hop, set[str]]] = {}
        for fact in sorted(facts):
            for here, there, ahead in (
                (fact.subject, fact.object, True),
                (fact.object, fact.subject, False),
            ):
                steps = self._next.setdefault(here, {})
                steps.setdefault(Hop(fact.relation, ahead), set()).add(there)

    def neighbours(self, name: str, step: Hop) -> set[str]:
        """All entities one hop away."""
        return self._next.get(name, {}).get(step, set())

    def unique_hops(self, name: str) -> list[tuple[Hop, str]]:
        """Hops that lead to exactly one entity, with that entity."""
        steps = self._next.get(name, {}).items()
        return [(step, next(iter(there))) for step, there in steps if len(there) == 1]

    @cached_property
    def mentions(self) -> Counter[str]:
        """Number of facts each entity takes part in."""
        return Counter(name for fact in self.facts for name in (fact.subject, fact.object))


def generate_graph(rng: Random, entities: int) -> KnowledgeGraph:
    """A graph with about `entities` entities and every relation of every subject. Objects follow a
    power law: some are far more popular than others."""
    kinds: dict[str, Kind] = {}
    for kind, share in _SHARES.items():
        for _ in range(max(2, entities * share // 100)):
            name, tries = _name(rng, kind, 1), 1
            while name in kinds:
                tries += 1
                name = _name(rng, kind, 1 + tries // 4)  # short names run out
            kinds[name] = kind
    by_kind: dict[Kind, list[str]] = {}
    for name, kind in kinds.items():
        by_kind.setdefault(kind, []).append(name)
    facts = set()
    for relation in RELATIONS.values():
        objects = by_kind[relation.object]
        weights = [1 / (1 + rank) ** 0.7 for rank in range(len(objects))]
        for subject in by_kind[relation.subject]:
            (chosen,) = rng.choices(objects, weights)
            facts.add(Fact(subject, relation.name, chosen))
    return KnowledgeGraph(kinds, frozenset(facts))


_HEADS = ("Bal", "Cor", "Dor", "Fen", "Gar", "Hol", "Kes", "Lor", "Mir", "Nor", "Os", "Pel", "Ran")
_MIDDLES = ("a", "e", "i", "o", "u", "an", "el", "in", "or", "ur")
_TAILS = ("bek", "dan", "fell", "gar", "lin", "mond", "nor", "rick", "sen", "tov", "vik", "wen")
_ENDS: dict[Kind, tuple[str, ...]] = {
    "person": ("",),
    "town": ("",),
    "company": (" Works", " Mills", " Trading", " Instruments"),
    "school": (" Academy", " College", " Institute"),
    "book": ("",),
    "river": ("",),
}
_TITLES = ("Letters", "Songs", "Winters", "Shadows", "Maps", "Gardens", "Bridges", "Clocks")


def _name(rng: Random, kind: Kind, length: int) -> str:
    def word() -> str:
        rest = (rng.choice(_MIDDLES) + rng.choice(_TAILS) for _ in range(length))
        return rng.choice(_HEADS) + "".join(rest)

    match kind:
        case "person":
            return f"{word()} {word()}"
        case "book":
            return f"{rng.choice(_TITLES)} from {word()}"
        case "river":
            return f"River {word()}"
        case _:
            return word() + rng.choice(_ENDS[kind])
