"""Pushdown automaton of a grammar, which finds the shortest completion of a partial output.

An output of limited length completes its grammar only if it heads for the end in time. So the
grammar is also kept as an automaton over bytes and marker tokens, whose states know their distance
to acceptance. An output is tracked token by token; since the grammar may be ambiguous, the tracker
holds several configurations at once, each a state and a stack of return states.
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

ACCEPT_STATE = 0  # the final state of every rule
MAX_STATES = 1 << 18
MAX_CONFIGURATIONS = 512  # tracked at once
EPSILON_COST = 2.0**-20  # cost of an epsilon edge, so that no shortest path has a cycle
# Characters that need no escape in JSON strings.
_UNESCAPED = ((0x20, 0x21), (0x23, 0x5B), (0x5D, ebnf.MAX_CODEPOINT))
_PREFERRED = (ord("a"), ord("0"))  # bytes to choose where several are possible


class UnsupportedGrammarError(ValueError):
    """The grammar is too large or has parts that this automaton does not support."""


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
    """Call of a rule, and the state to return to."""

    rule: int
    to: int


@dataclass(frozen=True, slots=True)
class EpsilonEdge:
    to: int


Edge = ByteEdge | TokenEdge | RuleEdge | EpsilonEdge


@dataclass(frozen=True, slots=True)
class PushdownAutomaton:
    """States, edges and distances to acceptance."""

    edges: tuple[tuple[Edge, ...], ...]  # of each state
    distance: tuple[float, ...]  # min bytes and markers from each state to the end of its rule
    start: int


def build_automaton(text: str, regex: Callable[[str], str]) -> PushdownAutomaton | None:
    """Build the automaton of a grammar as xgrammar prints it; `regex` prints the grammar of a
    regular expression. None if the grammar is not supported."""
    try:
        builder = _Builder(regex)
        start = builder.add(text)
    except (ebnf.EbnfSyntaxError, UnsupportedGrammarError, RecursionError):
        return None
    edges = tuple(map(tuple, builder.edges))
    return PushdownAutomaton(edges, _distances(edges), start)


class _Builder:
    """Builds every expression backwards, from the state that follows it."""

    def __init__(self, regex: Callable[[str], str]) -> None:
        self.edges: list[list[Edge]] = [[]]
        self._regex = regex
        self._rules: dict[str, int] = {}
        self._in_json = False

    def add(self, text: str) -> int:
        """Add these rules; returns the start state of the rule "root"."""
        rules = ebnf.parse_rules(text)
        outer, self._rules = self._rules, {name: self._state() for name in rules}
        found = self._rules
        for name, body in rules.items():
            self.edges[found[name]].append(EpsilonEdge(self._build(body, ACCEPT_STATE)))
        self._rules = outer
        return found["root"]

    def _state(self, *edges: Edge) -> int:
        if len(self.edges) >= MAX_STATES:
            raise UnsupportedGrammarError("too many states")
        self.edges.append(list(edges))
        return len(self.edges) - 1

    def _build(self, expression: Expression, to: int) -> int:
        match expression:
            case ebnf.StringLiteral(text):
                return self._literal(text, to)
            case CharacterClass(ranges, star):
                return self._class(ranges, star, to)
            case RuleRef(name):
                if name not in self._rules:
                    raise UnsupportedGrammarError(f"rule {name} not found")
                return self._state(RuleEdge(self._rules[name], to))
            case TokenSet(ids):
                return self._state(TokenEdge(ids, to))
            case RegexLiteral(regex, in_json):
                return self._pattern(regex, in_json, to)
            case Repetition(item, min_count):
                loop = self._state(EpsilonEdge(to))
                self.edges[loop].append(EpsilonEdge(self._build(item, loop)))
                return self._concatenation([item] * min_count, loop)
            case ebnf.Concatenation(items):
                return self._concatenation(items, to)
            case Alternation(options):
                return self._state(*(EpsilonEdge(self._build(option, to)) for option in options))

    def _concatenation(self, items: Iterable[Expression], to: int) -> int:
        for item in reversed(list(items)):
            to = self._build(item, to)
        return to

    def _literal(self, text: str, to: int) -> int:
        if self._in_json and any(not _within(ord(char), _UNESCAPED) for char in text):
            return self._state()  # a dead end
        for byte in reversed(text.encode()):
            to = self._state(ByteEdge(byte, byte, to))
        return to

    def _class(self, ranges: tuple[tuple[int, int], ...], star: bool, to: int) -> int:
        if self._in_json:
            ranges = _intersection(ranges, _UNESCAPED)
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


def _distances(edges: tuple[tuple[Edge, ...], ...]) -> tuple[float, ...]:
    distance = [inf] * len(edges)
    distance[ACCEPT_STATE] = 0
    changed = True
    while changed:
        changed = False
        for state, several in enumerate(edges):
            best = min((_length(edge, distance) for edge in several), default=distance[state])
            if best < distance[state]:
                distance[state], changed = best, True
    return tuple(distance)


def _length(edge: Edge, distance: list[float] | tuple[float, ...]) -> float:
    match edge:
        case EpsilonEdge(to):
            return EPSILON_COST + distance[to]
        case RuleEdge(rule, to):
            return EPSILON_COST + distance[rule] + distance[to]
    return 1 + distance[edge.to]


def _within(code: int, ranges: Iterable[tuple[int, int]]) -> bool:
    return any(first <= code <= last for first, last in ranges)


def _intersection(
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
    """Sequences of byte ranges whose union is the UTF-8 encoding of these characters."""
    for first, last in _intersection(ranges, _WIDTHS):
        yield from _rows(chr(first).encode(), chr(last).encode())


def _rows(low: bytes, high: bytes) -> Iterator[list[tuple[int, int]]]:
    """Byte-range sequences from `low` to `high`, which have the same length."""
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


# --- tracking an output ---------------------------------------------------------------------------


class DecodedVocab:
    """The bytes of every token. Marker tokens have no bytes."""

    def __init__(
        self, token_bytes: list[bytes], markers: frozenset[int], excluded: frozenset[int]
    ) -> None:
        self.token_bytes, self.markers = token_bytes, markers
        self._ids: dict[bytes, int] = {}
        for token, piece in enumerate(token_bytes):
            if piece and token not in markers and token not in excluded:
                self._ids.setdefault(piece, token)
        self._max_len = min(32, max(map(len, self._ids), default=0))

    def shortest_tokenization(self, text: bytes) -> list[int] | None:
        """The fewest tokens with these bytes; None if there are none."""
        count, last = [0.0, *[inf] * len(text)], [0] * (len(text) + 1)
        for end in range(1, len(text) + 1):
            for start in range(max(0, end - self._max_len), end):
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
    """Interned stack of return states: equal stacks are the same object."""

    __slots__ = ("_above", "below", "distance", "to")

    def __init__(self, to: int, below: "_Stack | None", distance: float) -> None:
        self.to, self.below, self.distance = to, below, distance
        self._above: dict[int, _Stack] = {}

    def push(self, to: int, distance: float) -> "_Stack":
        if to not in self._above:
            self._above[to] = _Stack(to, self, self.distance + distance)
        return self._above[to]


_Configuration = tuple[int, _Stack]
_Configurations = dict[_Configuration, None]  # ordered, hence deterministic


class PushdownState:
    """The configurations of one output."""

    def __init__(self, automaton: PushdownAutomaton, vocab: DecodedVocab) -> None:
        self._automaton, self._vocab = automaton, vocab
        self._configurations = self._closure([(automaton.start, _Stack(ACCEPT_STATE, None, 0))])

    def advance(self, token: int) -> Self | None:
        """The state after `token`; None if it is not allowed or cannot be tracked."""
        configurations = self._configurations
        if token in self._vocab.markers:
            configurations = self._closure(self._consume_token(configurations, token))
        else:
            for byte in self._vocab.token_bytes[token]:
                configurations = self._closure(self._consume_byte(configurations, byte))
        if not configurations:
            return None
        found = object.__new__(type(self))
        found._automaton, found._vocab, found._configurations = (
            self._automaton,
            self._vocab,
            configurations,
        )
        return found

    @property
    def max_tokens_to_accept(self) -> int:
        """Upper bound of the tokens to acceptance: one per byte."""
        return int(min(self._distance(configuration) for configuration in self._configurations))

    def shortest_path(self) -> list[int] | None:
        """Tokens of the shortest completion; None if no tokens spell it."""
        tokens: list[int] = []
        text = bytearray()
        for step in self._steps(min(self._configurations, key=self._distance)):
            if isinstance(step, ByteEdge):
                preferred = (byte for byte in _PREFERRED if step.first <= byte <= step.last)
                text.append(next(preferred, step.first))
                continue
            tokens_of_text = self._vocab.shortest_tokenization(bytes(text))
            if tokens_of_text is None:
                return None
            tokens += [*tokens_of_text, min(step.ids)]
            text.clear()
        tokens_of_text = self._vocab.shortest_tokenization(bytes(text))
        return None if tokens_of_text is None else tokens + tokens_of_text

    def _distance(self, configuration: _Configuration) -> float:
        state, stack = configuration
        return self._automaton.distance[state] + stack.distance

    def _steps(self, configuration: _Configuration) -> Iterator[ByteEdge | TokenEdge]:
        """The edges of the shortest path that consume something."""
        distance, (state, stack) = self._automaton.distance, configuration
        while state != ACCEPT_STATE or stack.below is not None:
            if state == ACCEPT_STATE:
                assert stack.below is not None
                state, stack = stack.to, stack.below
                continue
            edge = min(self._automaton.edges[state], key=lambda edge: _length(edge, distance))
            if isinstance(edge, RuleEdge):
                stack = stack.push(edge.to, distance[edge.to])
                state = edge.rule
                continue
            if not isinstance(edge, EpsilonEdge):
                yield edge
            state = edge.to

    def _closure(self, configurations: Iterable[_Configuration]) -> _Configurations:
        """Epsilon closure: the configurations that consume next, or accept."""
        edges, distance = self._automaton.edges, self._automaton.distance
        found: _Configurations = {}
        seen: set[_Configuration] = set()
        todo = list(configurations)
        while todo:
            configuration = todo.pop()
            state, stack = configuration
            if configuration in seen or self._distance(configuration) == inf:
                continue
            seen.add(configuration)
            if len(seen) > 8 * MAX_CONFIGURATIONS or len(found) > MAX_CONFIGURATIONS:
                return {}
            if state == ACCEPT_STATE:
                if stack.below is None:
                    found[configuration] = None
                else:
                    todo.append((stack.to, stack.below))
                continue
            for edge in edges[state]:
                if isinstance(edge, EpsilonEdge):
                    todo.append((edge.to, stack))
                elif isinstance(edge, RuleEdge):  # tail call: no return state needed
                    deeper = (
                        stack if edge.to == ACCEPT_STATE else stack.push(edge.to, distance[edge.to])
                    )
                    todo.append((edge.rule, deeper))
                else:
                    found[configuration] = None
        return found

    def _consume_byte(self, configurations: _Configurations, byte: int) -> Iterator[_Configuration]:
        for state, stack in configurations:
            for edge in self._automaton.edges[state]:
                if isinstance(edge, ByteEdge) and edge.first <= byte <= edge.last:
                    yield edge.to, stack

    def _consume_token(
        self, configurations: _Configurations, token: int
    ) -> Iterator[_Configuration]:
        for state, stack in configurations:
            for edge in self._automaton.edges[state]:
                if isinstance(edge, TokenEdge) and token in edge.ids:
                    yield edge.to, stack
