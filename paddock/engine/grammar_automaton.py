"""The shortest way to the end of a grammar, from wherever a reply stands.

A reply of limited length satisfies its grammar only if it turns towards the end in time. So the
grammar is also kept as an automaton over bytes and marker tokens, whose states know how many of
them the end is away. A reply is followed through it token by token; since the grammar may be
ambiguous, it stands in several places at once, each a state and a stack of rules to return to.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Self

from paddock.engine import ebnf
from paddock.engine.ebnf import (
    Alternation,
    CharacterClass,
    Expression,
    RegexLiteral,
    Repetition,
    RuleRef,
    TokenSet,
)

ACCEPT_STATE = 0  # the state every rule ends in
MAX_STATES = 1 << 18
MAX_CONFIGURATIONS = 512  # where a reply may stand at once
EPSILON_COST = 2.0**-20  # what an edge that reads nothing costs, so that no way goes in circles
_UNQUOTED = (
    (0x20, 0x21),
    (0x23, 0x5B),
    (0x5D, ebnf.MAX_CODEPOINT),
)  # stand for themselves in JSON strings
_LIKED = (ord("a"), ord("0"))  # of several bytes, the ones that people would take


class UnsupportedGrammarError(ValueError):
    """The way to the end cannot be told for this grammar."""


@dataclass(frozen=True, slots=True)
class ByteEdge:
    first: int
    last: int
    to: int


@dataclass(frozen=True, slots=True)
class TokenEdge:
    ids: frozenset[int]
    to: int


@dataclass(frozen=True, slots=True)
class RuleEdge:
    """A rule to go through, and the state behind it."""

    rule: int
    to: int


@dataclass(frozen=True, slots=True)
class EpsilonEdge:
    to: int


Edge = ByteEdge | TokenEdge | RuleEdge | EpsilonEdge


@dataclass(frozen=True, slots=True)
class PushdownAutomaton:
    edges: tuple[tuple[Edge, ...], ...]  # of each state
    distance: tuple[float, ...]  # bytes and markers from each state to the end of its rule
    start: int


def build_automaton(text: str, regex: Callable[[str], str]) -> PushdownAutomaton | None:
    """Of a grammar as the library prints it; `regex` prints that of a regular expression. None if
    there is something in it that cannot be followed."""
    try:
        builder = _Builder(regex)
        start = builder.add(text)
    except (ebnf.EbnfSyntaxError, UnsupportedGrammarError, RecursionError):
        return None
    edges = tuple(map(tuple, builder.edges))
    return PushdownAutomaton(edges, _away(edges), start)


class _Builder:
    """Every expression is built in front of the state that follows it."""

    def __init__(self, regex: Callable[[str], str]) -> None:
        self.edges: list[list[Edge]] = [[]]
        self._regex = regex
        self._rules: dict[str, int] = {}
        self._in_json = False

    def add(self, text: str) -> int:
        """The state in which the rule "root" of these rules begins."""
        rules = ebnf.parse_rules(text)
        outer, self._rules = self._rules, {name: self._state() for name in rules}
        found = self._rules
        for name, body in rules.items():
            self.edges[found[name]].append(EpsilonEdge(self._built(body, ACCEPT_STATE)))
        self._rules = outer
        return found["root"]

    def _state(self, *edges: Edge) -> int:
        if len(self.edges) >= MAX_STATES:
            raise UnsupportedGrammarError("too many states")
        self.edges.append(list(edges))
        return len(self.edges) - 1

    def _built(self, expression: Expression, to: int) -> int:
        match expression:
            case ebnf.StringLiteral(text):
                return self._text(text, to)
            case CharacterClass(ranges, star):
                return self._class(ranges, star, to)
            case RuleRef(name):
                if name not in self._rules:
                    raise UnsupportedGrammarError(f"no rule {name}")
                return self._state(RuleEdge(self._rules[name], to))
            case TokenSet(ids):
                return self._state(TokenEdge(ids, to))
            case RegexLiteral(regex, in_json):
                return self._pattern(regex, in_json, to)
            case Repetition(item, least):
                loop = self._state(EpsilonEdge(to))
                self.edges[loop].append(EpsilonEdge(self._built(item, loop)))
                return self._row([item] * least, loop)
            case ebnf.Concatenation(items):
                return self._row(items, to)
            case Alternation(options):
                return self._state(*(EpsilonEdge(self._built(option, to)) for option in options))

    def _row(self, items: Iterable[Expression], to: int) -> int:
        for item in reversed(list(items)):
            to = self._built(item, to)
        return to

    def _text(self, text: str, to: int) -> int:
        if self._in_json and any(not _within(ord(char), _UNQUOTED) for char in text):
            return self._state()  # leads nowhere
        for byte in reversed(text.encode()):
            to = self._state(ByteEdge(byte, byte, to))
        return to

    def _class(self, ranges: tuple[tuple[int, int], ...], star: bool, to: int) -> int:
        if self._in_json:
            ranges = _common(ranges, _UNQUOTED)
        start = self._state()
        for row in _utf8(ranges):
            after = start if star else to
            for first, last in reversed(row[1:]):
                after = self._state(ByteEdge(first, last, after))
            self.edges[start].append(ByteEdge(*row[0], after))
        if star:
            self.edges[start].append(EpsilonEdge(to))
        return start

    def _pattern(self, regex: str, in_json: bool, to: int) -> int:
        outer, self._in_json = self._in_json, in_json
        start = self.add(self._regex(regex))
        self._in_json = outer
        return self._state(RuleEdge(start, to))


def _away(edges: tuple[tuple[Edge, ...], ...]) -> tuple[float, ...]:
    away = [inf] * len(edges)
    away[ACCEPT_STATE] = 0
    changed = True
    while changed:
        changed = False
        for state, several in enumerate(edges):
            best = min((_length(edge, away) for edge in several), default=away[state])
            if best < away[state]:
                away[state], changed = best, True
    return tuple(away)


def _length(edge: Edge, away: list[float] | tuple[float, ...]) -> float:
    match edge:
        case EpsilonEdge(to):
            return EPSILON_COST + away[to]
        case RuleEdge(rule, to):
            return EPSILON_COST + away[rule] + away[to]
    return 1 + away[edge.to]


def _within(code: int, ranges: Iterable[tuple[int, int]]) -> bool:
    return any(first <= code <= last for first, last in ranges)


def _common(
    some: tuple[tuple[int, int], ...], others: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    pairs = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return tuple((first, last) for first, last in pairs if first <= last)


_WIDTHS = (
    (0, 0x7F),
    (0x80, 0x7FF),
    (0x800, 0xD7FF),
    (0xE000, 0xFFFF),
    (0x10000, ebnf.MAX_CODEPOINT),
)


def _utf8(ranges: tuple[tuple[int, int], ...]) -> Iterator[list[tuple[int, int]]]:
    """Rows of ranges of bytes that together spell exactly these characters."""
    for first, last in _common(ranges, _WIDTHS):
        yield from _rows(chr(first).encode(), chr(last).encode())


def _rows(low: bytes, high: bytes) -> Iterator[list[tuple[int, int]]]:
    """Of the spellings from `low` to `high`, which are of the same length."""
    if low[1:] == bytes([0x80]) * (len(low) - 1) and high[1:] == bytes([0xBF]) * (len(low) - 1):
        yield [(low[0], high[0]), *[(0x80, 0xBF)] * (len(low) - 1)]
    elif low[0] == high[0]:
        for row in _rows(low[1:], high[1:]):
            yield [(low[0], low[0]), *row]
    else:
        rest = len(low) - 1
        for row in _rows(low[1:], bytes([0xBF]) * rest):
            yield [(low[0], low[0]), *row]
        if low[0] + 1 < high[0]:
            yield [(low[0] + 1, high[0] - 1), *[(0x80, 0xBF)] * rest]
        for row in _rows(bytes([0x80]) * rest, high[1:]):
            yield [(high[0], high[0]), *row]


# --- following a reply ----------------------------------------------------------------------------


class DecodedVocab:
    """What the tokens of a vocabulary spell. Markers spell nothing but themselves."""

    def __init__(self, spelled: list[bytes], markers: frozenset[int], mute: frozenset[int]) -> None:
        self.token_bytes, self.markers = spelled, markers
        self._ids: dict[bytes, int] = {}
        for token, piece in enumerate(spelled):
            if piece and token not in markers and token not in mute:
                self._ids.setdefault(piece, token)
        self._longest = min(32, max(map(len, self._ids), default=0))

    def shortest_tokenization(self, text: bytes) -> list[int] | None:
        """The fewest tokens that spell `text`; None if there are none."""
        count, last = [0.0, *[inf] * len(text)], [0] * (len(text) + 1)
        for end in range(1, len(text) + 1):
            for start in range(max(0, end - self._longest), end):
                if count[start] + 1 < count[end] and text[start:end] in self._ids:
                    count[end], last[end] = count[start] + 1, start
        if count[-1] == inf:
            return None
        found: list[int] = []
        end = len(text)
        while end:
            found.append(self._ids[text[last[end] : end]])
            end = last[end]
        return found[::-1]


class _Stack:
    """States to return to. The same ones are the same object."""

    __slots__ = ("_above", "away", "below", "to")

    def __init__(self, to: int, below: "_Stack | None", away: float) -> None:
        self.to, self.below, self.away = to, below, away
        self._above: dict[int, _Stack] = {}

    def push(self, to: int, away: float) -> "_Stack":
        if to not in self._above:
            self._above[to] = _Stack(to, self, self.away + away)
        return self._above[to]


_Place = tuple[int, _Stack]
_Places = dict[_Place, None]  # in order, so that chance has no say


class PushdownState:
    """Where one reply stands."""

    def __init__(self, automaton: PushdownAutomaton, pieces: DecodedVocab) -> None:
        self._automaton, self._pieces = automaton, pieces
        self._places = self._settled([(automaton.start, _Stack(ACCEPT_STATE, None, 0))])

    def advance(self, token: int) -> Self | None:
        """Where it stands when `token` follows; None if that cannot be told."""
        places = self._places
        if token in self._pieces.markers:
            places = self._settled(self._marked(places, token))
        else:
            for byte in self._pieces.token_bytes[token]:
                places = self._settled(self._read(places, byte))
        if not places:
            return None
        found = object.__new__(type(self))
        found._automaton, found._pieces, found._places = self._automaton, self._pieces, places
        return found

    @property
    def max_tokens_to_accept(self) -> int:
        """Tokens to the end, at most: one for each byte."""
        return int(min(self._away(place) for place in self._places))

    def shortest_path(self) -> list[int] | None:
        """The tokens of the shortest way to the end; None if no tokens spell it."""
        tokens: list[int] = []
        text = bytearray()
        for step in self._steps(min(self._places, key=self._away)):
            if isinstance(step, ByteEdge):
                liked = (byte for byte in _LIKED if step.first <= byte <= step.last)
                text.append(next(liked, step.first))
                continue
            spelled = self._pieces.shortest_tokenization(bytes(text))
            if spelled is None:
                return None
            tokens += [*spelled, min(step.ids)]
            text.clear()
        spelled = self._pieces.shortest_tokenization(bytes(text))
        return None if spelled is None else tokens + spelled

    def _away(self, place: _Place) -> float:
        state, stack = place
        return self._automaton.distance[state] + stack.away

    def _steps(self, place: _Place) -> Iterator[ByteEdge | TokenEdge]:
        """Along the shortest way."""
        away, (state, stack) = self._automaton.distance, place
        while state != ACCEPT_STATE or stack.below is not None:
            if state == ACCEPT_STATE:
                assert stack.below is not None
                state, stack = stack.to, stack.below
                continue
            edge = min(self._automaton.edges[state], key=lambda edge: _length(edge, away))
            if isinstance(edge, RuleEdge):
                stack = stack.push(edge.to, away[edge.to])
                state = edge.rule
                continue
            if not isinstance(edge, EpsilonEdge):
                yield edge
            state = edge.to

    def _settled(self, places: Iterable[_Place]) -> _Places:
        """The places where something is read next, or the reply has ended."""
        edges, away = self._automaton.edges, self._automaton.distance
        found: _Places = {}
        seen: set[_Place] = set()
        todo = list(places)
        while todo:
            place = todo.pop()
            state, stack = place
            if place in seen or self._away(place) == inf:
                continue
            seen.add(place)
            if len(seen) > 8 * MAX_CONFIGURATIONS or len(found) > MAX_CONFIGURATIONS:
                return {}
            if state == ACCEPT_STATE:
                if stack.below is None:
                    found[place] = None
                else:
                    todo.append((stack.to, stack.below))
                continue
            for edge in edges[state]:
                if isinstance(edge, EpsilonEdge):
                    todo.append((edge.to, stack))
                elif isinstance(edge, RuleEdge):  # what only returns need not be returned to
                    deeper = (
                        stack if edge.to == ACCEPT_STATE else stack.push(edge.to, away[edge.to])
                    )
                    todo.append((edge.rule, deeper))
                else:
                    found[place] = None
        return found

    def _read(self, places: _Places, byte: int) -> Iterator[_Place]:
        for state, stack in places:
            for edge in self._automaton.edges[state]:
                if isinstance(edge, ByteEdge) and edge.first <= byte <= edge.last:
                    yield edge.to, stack

    def _marked(self, places: _Places, token: int) -> Iterator[_Place]:
        for state, stack in places:
            for edge in self._automaton.edges[state]:
                if isinstance(edge, TokenEdge) and token in edge.ids:
                    yield edge.to, stack
