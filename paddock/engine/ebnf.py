"""Parser for grammars as xgrammar prints them, and a fix that makes their JSON valid.

The printed form is EBNF without left recursion: `name ::= ((a b) | ("c"))`, where an element is a
string literal, a character class (optionally starred), a rule reference (optionally repeated
`{min, max}`), `Token(id, ...)` or `Regex("...", json_string=true)`. A lookahead `(=...)` does not
restrict anything here and is skipped.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

# Invalid or unsafe JSON that xgrammar allows, and the replacement:
_JSON_FIXES = (
    # Raw control characters in strings with a length limit, which JSON parsers reject.
    (re.escape(r"[^\"\\\r\n]"), r"[^\\0-\\U0000001f\\" r'"\\\\\\r\\n]'),
    # Lone surrogates; pairs stay.
    (
        re.escape('("u" [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9])'),
        '("u" [0-9A-CE-Fa-ce-f] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9])'
        ' | ("u" [Dd] [0-7] [A-Fa-f0-9] [A-Fa-f0-9])'
        ' | ("u" [Dd] [89ABab] [A-Fa-f0-9] [A-Fa-f0-9]'
        r' "\\\\u" [Dd] [C-Fc-f] [A-Fa-f0-9] [A-Fa-f0-9])',
    ),
    # Numbers of unlimited length: infinite as floats, rejected as integers by Python.
    (r"(basic_number_4\w*) (basic_number_digits\w*)\{1, -1\}", r"\1 \2{1, 2}"),
    (r'"\." (basic_number_digits\w*)\{1, -1\}', r'"." \1{1, 17}'),
    (r"\[1-9\] \[0-9\]\*", "[1-9] basic_number_digits{0, 17}"),
)


_SHORT_ESCAPE = re.compile(r"(\\\\)|\\x(..)|\\u(....)")


def restrict_to_valid_json(text: str) -> str:
    """Fix a printed grammar: its JSON becomes valid, and its escapes unambiguous (xgrammar prints
    \\xdf but parses as many hex digits as follow).

    >>> print(restrict_to_valid_json(r'characters ::= (([^\\"\\\\\\r\\n]))'))
    characters ::= (([^\\0-\\U0000001f\\"\\\\\\r\\n]))
    """
    text = _SHORT_ESCAPE.sub(lambda found: found[1] or rf"\U{found[2] or found[3]:0>8}", text)
    for loose, strict in _JSON_FIXES:
        text = re.sub(loose, strict, text)
    text = _add_json_escapes(text)
    if "basic_number_digits{" in text and "basic_number_digits ::=" not in text:
        text += "basic_number_digits ::= (([0-9]))\n"
    return text


_LINE = re.compile(r"^(\w+) ::= (.*)$", re.MULTILINE)
# A rule that is the whole content of a JSON string.
_QUOTED = re.compile(r'"\\"" (\w+) "\\""')
_PIECE = re.compile(
    r'"(?P<text>(?:[^"\\]|\\.)*)"|'
    r"\[(?P<negated>\^?)(?P<class>(?:[^\]\\]|\\.)*)\](?P<star>\*?)"
)
_NEEDS_ESCAPE = frozenset([*map(chr, range(32)), '"', "\\"])  # in JSON strings


def _add_json_escapes(text: str) -> str:
    """Add JSON escapes to strings with a `pattern`. xgrammar has no rules for them: characters that
    need an escape would be generated unescaped."""
    rules = dict(_LINE.findall(text))
    todo, within = _QUOTED.findall(text), set()
    while todo:
        name = todo.pop()
        if name in rules and name not in within and "Regex(" not in rules[name]:
            within.add(name)
            todo += re.findall(r"\w+", _PIECE.sub(" ", rules[name]))
    return _LINE.sub(
        lambda rule: _PIECE.sub(_escape_piece, rule[0]) if rule[1] in within else rule[0], text
    )


def _escape_piece(piece: re.Match[str]) -> str:
    if piece["text"] is not None:
        text = "".join(char for char, _ in _characters(piece["text"]))
        return _json_literal(text) if _NEEDS_ESCAPE & set(text) else piece[0]
    ranges = _ranges(piece["class"])
    ranges = invert_ranges(ranges) if piece["negated"] else ranges
    escaped = [
        char for char in sorted(_NEEDS_ESCAPE) if any(a <= ord(char) <= b for a, b in ranges)
    ]
    if not escaped:
        return piece[0]
    rest = invert_ranges((*invert_ranges(ranges), *((ord(char), ord(char)) for char in escaped)))
    plain = "".join(rf"\U{a:08x}-\U{b:08x}" for a, b in rest)
    options = [*([f"[{plain}]"] if plain else []), *map(_json_literal, escaped)]
    return f"({' | '.join(options)})" + ("{0, -1}" if piece["star"] else "")


def _json_literal(text: str) -> str:
    """A string literal of the JSON-escaped text."""
    return '"' + "".join(rf"\U{ord(char):08x}" for char in json.dumps(text)[1:-1]) + '"'


# --- expressions ----------------------------------------------------------------------------------


class EbnfSyntaxError(ValueError):
    """A printed grammar that this parser does not support."""


@dataclass(frozen=True, slots=True)
class StringLiteral:
    text: str


@dataclass(frozen=True, slots=True)
class CharacterClass:
    ranges: tuple[tuple[int, int], ...]  # of code points, both ends included
    star: bool = False


@dataclass(frozen=True, slots=True)
class RuleRef:
    name: str


@dataclass(frozen=True, slots=True)
class TokenSet:
    ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class RegexLiteral:
    regex: str
    in_json: bool


@dataclass(frozen=True, slots=True)
class Repetition:
    item: "Expression"
    min_count: int


@dataclass(frozen=True, slots=True)
class Concatenation:
    items: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    options: tuple["Expression", ...]


Expression = (
    StringLiteral
    | CharacterClass
    | RuleRef
    | TokenSet
    | RegexLiteral
    | Repetition
    | Concatenation
    | Alternation
)

_LEXEME = re.compile(
    r"""\s*(?:
        (?P<rule>\w+)\s*::= |
        (?P<token>Token)\((?P<ids>[\d,\s]*)\) |
        Regex\("(?P<regex>(?:[^"\\]|\\.)*)"(?P<in_json>,\s*json_string=true)?\) |
        (?P<name>\w+) |
        "(?P<text>(?:[^"\\]|\\.)*)" |
        \[(?P<negated>\^?)(?P<class>(?:[^\]\\]|\\.)*)\](?P<star>\*?) |
        \{(?P<min>\d+),\s*-?\d+\} |
        (?P<mark>\(=|[()|])
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x(..)|u(....)|U(.{8})|(.))|(.)", re.DOTALL)
_PLAIN = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
MAX_CODEPOINT = 0x10FFFF


def parse_rules(text: str) -> dict[str, Expression]:
    """Parse the rules of a printed grammar, by name. Raises EbnfSyntaxError."""
    parser = _Parser(text)
    found: dict[str, Expression] = {}
    while parser.lexeme is not None:
        name = parser.take("rule")
        found[name] = parser.choice()
    return found


class _Parser:
    def __init__(self, text: str) -> None:
        self._lexemes = _lexemes(text)
        self.lexeme: re.Match[str] | None = None
        self._next()

    def _next(self) -> None:
        self.lexeme = next(self._lexemes, None)

    def _is(self, mark: str) -> bool:
        return self.lexeme is not None and self.lexeme["mark"] == mark

    def take(self, kind: str) -> str:
        if self.lexeme is None or self.lexeme[kind] is None:
            raise EbnfSyntaxError(f"expected a {kind}")
        found = self.lexeme[kind]
        self._next()
        return str(found)

    def choice(self) -> Expression:
        options = [self._sequence()]
        while self._is("|"):
            self._next()
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def _sequence(self) -> Expression:
        items: list[Expression] = []
        while (lexeme := self.lexeme) is not None:
            if lexeme["rule"] is not None or lexeme["mark"] in (")", "|"):
                break
            if lexeme["mark"] == "(=":  # lookahead: skipped
                self._group()
            elif lexeme["min"] is not None:
                items[-1] = Repetition(items[-1], int(self.take("min")))
            elif lexeme["mark"] == "(":
                items.append(self._group())
            else:
                items.append(_element(lexeme))
                self._next()
        return items[0] if len(items) == 1 else Concatenation(tuple(items))

    def _group(self) -> Expression:
        self._next()
        found = self.choice()
        if not self._is(")"):
            raise EbnfSyntaxError("expected ')'")
        self._next()
        return found


def _lexemes(text: str) -> Iterator[re.Match[str]]:
    at = 0
    while text[at:].strip():
        found = _LEXEME.match(text, at)
        if found is None or found["name"] in ("TagDispatch", "TokenTagDispatch", "ExcludeToken"):
            raise EbnfSyntaxError(f"unsupported syntax: {text[at : at + 40]!r}")
        yield found
        at = found.end()


def _element(lexeme: re.Match[str]) -> Expression:
    if lexeme["token"]:
        return TokenSet(frozenset(int(i) for i in lexeme["ids"].split(",") if i.strip()))
    if lexeme["regex"] is not None:
        pattern = "".join(char for char, _ in _characters(lexeme["regex"]))
        return RegexLiteral(pattern, lexeme["in_json"] is not None)
    if lexeme["name"] is not None:
        return RuleRef(lexeme["name"])
    if lexeme["text"] is not None:
        return StringLiteral("".join(char for char, _ in _characters(lexeme["text"])))
    ranges = _ranges(lexeme["class"])
    return CharacterClass(
        invert_ranges(ranges) if lexeme["negated"] else ranges, star=bool(lexeme["star"])
    )


def _characters(text: str) -> Iterator[tuple[str, bool]]:
    """Each character and whether it was escaped."""
    for short, long, longest, escaped, plain in _ESCAPE.findall(text):
        code = short or long or longest
        if code:
            yield chr(int(code, 16)), True
        else:
            yield (_PLAIN.get(escaped, escaped), True) if escaped else (plain, False)


def _ranges(text: str) -> tuple[tuple[int, int], ...]:
    chars = list(_characters(text))
    found, at = [], 0
    while at < len(chars):
        first = last = ord(chars[at][0])
        if at + 2 < len(chars) and chars[at + 1] == ("-", False):
            last, at = ord(chars[at + 2][0]), at + 2
        found.append((first, last))
        at += 1
    return merge_ranges(found)


def merge_ranges(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sorted, with overlapping and adjacent ranges merged."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)


def invert_ranges(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """All code points outside these ranges.

    >>> invert_ranges(((0, 9), (12, 0x10FFFF)))
    ((10, 11),)
    """
    found, start = [], 0
    for first, last in merge_ranges(list(ranges)):
        if first > start:
            found.append((start, first - 1))
        start = last + 1
    return (*found, (start, MAX_CODEPOINT)) if start <= MAX_CODEPOINT else tuple(found)
