"""Pages generated from facts, and facts parsed from pages."""

import re
from collections.abc import Iterable
from functools import cache, lru_cache
from random import Random
from typing import cast, get_args

from paddock.envs.search.bm25 import WebPage
from paddock.envs.search.knowledge_graph import RELATIONS, Fact, Kind, KnowledgeGraph

_NAME = r"[A-Z]\w+(?:(?: from)? [A-Z]\w+)*"
_KIND = re.compile(rf"({_NAME}) is a ({'|'.join(get_args(Kind))})\b")
_FILLERS = (
    "Visitors remark on the quiet mornings here.",
    "Little else is recorded before that time.",
    "A short notice appeared in the regional paper.",
    "The older registers were lost in a fire.",
    "Several accounts disagree about the details.",
    "The name is spelt differently in early sources.",
)


def write_pages(rng: Random, graph: KnowledgeGraph) -> list[WebPage]:
    """One page per entity. Every fact is stated on the page of its subject, of its object or both,
    in one of its wordings, among filler sentences."""
    lines: dict[str, list[str]] = {name: [] for name in graph.kinds}
    for fact in sorted(graph.facts):
        homes = rng.choice(((fact.subject,), (fact.subject, fact.object), (fact.object,)))
        for home in homes:
            sentence = rng.choice(RELATIONS[fact.relation].sentences)
            lines[home].append(sentence.format(s=fact.subject, o=fact.object))
    pages = []
    for number, (name, kind) in enumerate(graph.kinds.items(), start=1):
        sentences = lines[name] + rng.sample(_FILLERS, 3)
        rng.shuffle(sentences)
        text = " ".join([f"{name} is a {kind} of the region.", *sentences])
        pages.append(WebPage(id=f"p{number}", title=name, text=text))
    return pages


@lru_cache(maxsize=4096)
def parse_facts(text: str) -> tuple[Fact, ...]:
    """The facts that a text states.

    >>> parse_facts("Corabek Dorin was born in Fenadan. Nobody knows more.")
    (Fact(subject='Corabek Dorin', relation='born', object='Fenadan'),)
    """
    return tuple(
        Fact(match["s"], relation, match["o"])
        for relation, pattern in _patterns()
        for match in pattern.finditer(text)
    )


def parse_graph(pages: Iterable[WebPage]) -> KnowledgeGraph:
    """The knowledge graph as stated by the pages."""
    pages = tuple(pages)
    facts = frozenset(fact for page in pages for fact in parse_facts(page.text))
    found = [_KIND.match(page.text) for page in pages]
    kinds = {match[1]: cast(Kind, match[2]) for match in found if match}
    return KnowledgeGraph(kinds, facts)


@cache
def _patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple(
        (relation.name, re.compile(sentence.format(s=f"(?P<s>{_NAME})", o=f"(?P<o>{_NAME})")))
        for relation in RELATIONS.values()
        for sentence in (text.replace(".", r"\.") for text in relation.sentences)
    )
