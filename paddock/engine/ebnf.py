"""Grammars as the library prints them: read into expressions, and made sound where they are JSON.

The printed form is EBNF without left recursion: `name ::= ((a b) | ("c"))`, where an element is a
text, a class of characters, perhaps starred, the name of a rule, perhaps repeated `{least, most}`,
`Token(id, ...)` or `Regex("...", json_string=true)`. A lookahead `(=...)` narrows nothing.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

# What the library lets through in JSON, and what becomes of it:
_SOUND = (
    # Raw control characters in strings of a limited length, which no JSON parser takes.
    (re.escape(r"[^\"\\\r\n]"), r"[^\\0-\\U0000001f\\" r'"\\\\\\r\\n]'),
    # Halves of surrogate pairs, which are not text; whole pairs stay.
    (
        re.escape('("u" [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9])'),
        '("u" [0-9A-CE-Fa-ce-f] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9])'
        ' | ("u" [Dd] [0-7] [A-Fa-f0-9] [A-Fa-f0-9])'
        ' | ("u" [Dd] [89ABab] [A-Fa-f0-9] [A-Fa-f0-9]'
        r' "\\\\u" [Dd] [C-Fc-f] [A-Fa-f0-9] [A-Fa-f0-9])',
    ),
    # Numbers without end: infinite as floats, and refused as integers by Python.
    (r"(basic_number_4\w*) (basic_number_digits\w*)\{1, -1\}", r"\1 \2{1, 2}"),
    (r'"\." (basic_number_digits\w*)\{1, -1\}', r'"." \1{1, 17}'),
    (r"\[1-9\] \[0-9\]\*", "[1-9] basic_number_digits{0, 17}"),
)


_SHORT = re.compile(r"(\\\\)|\\x(..)|\\u(....)")


def restrict_to_valid_json(text: str) -> str:
    """A printed grammar whose JSON every client can read, and which the library reads as it was
    meant: it prints a character as \\xdf and reads as many digits as follow.

    >>> print(restrict_to_valid_json(r'characters ::= (([^\\"\\\\\\r\\n]))'))
    characters ::= (([^\\0-\\U0000001f\\"\\\\\\r\\n]))
    """
    text = _SHORT.sub(lambda found: found[1] or rf"\U{found[2] or found[3]:0>8}", text)
    for loose, strict in _SOUND:
        text = re.sub(loose, strict, text)
    text = _with_escapes(text)
    if "basic_number_digits{" in text and "basic_number_digits ::=" not in text:
        text += "basic_number_digits ::= (([0-9]))\n"
    return text


_LINE = re.compile(r"^(\w+) ::= (.*)$", re.MULTILINE)
# A rule that is all between the quotes of a string.
_QUOTED = re.compile(r'"\\"" (\w+) "\\""')
_PIECE = re.compile(
    r'"(?P<text>(?:[^"\\]|\\.)*)"|'
    r"\[(?P<negated>\^?)(?P<class>(?:[^\]\\]|\\.)*)\](?P<star>\*?)"
)
_IN_NEED = frozenset([*map(chr, range(32)), '"', "\\"])  # of an escape in JSON


def _with_escapes(text: str) -> str:
    """With escapes in strings of a `pattern`. The library has no rules for them: a pattern without
    any match that does without them is written out as it is."""
    rules = dict(_LINE.findall(text))
    todo, within = _QUOTED.findall(text), set()
    while todo:
        name = todo.pop()
        if name in rules and name not in within and "Regex(" not in rules[name]:
            within.add(name)
            todo += re.findall(r"\w+", _PIECE.sub(" ", rules[name]))
    return _LINE.sub(
        lambda rule: _PIECE.sub(_escaped, rule[0]) if rule[1] in within else rule[0], text
    )


def _escaped(piece: re.Match[str]) -> str:
    if piece["text"] is not None:
        spelled = "".join(char for char, _ in _characters(piece["text"]))
        return _printed(spelled) if _IN_NEED & set(spelled) else piece[0]
    ranges = _ranges(piece["class"])
    ranges = invert_ranges(ranges) if piece["negated"] else ranges
    needy = [char for char in sorted(_IN_NEED) if any(a <= ord(char) <= b for a, b in ranges)]
    if not needy:
        return piece[0]
    rest = invert_ranges((*invert_ranges(ranges), *((ord(char), ord(char)) for char in needy)))
    plain = "".join(rf"\U{a:08x}-\U{b:08x}" for a, b in rest)
    options = [*([f"[{plain}]"] if plain else []), *map(_printed, needy)]
    return f"({' | '.join(options)})" + ("{0, -1}" if piece["star"] else "")


def _printed(text: str) -> str:
    """A text as it stands in JSON."""
    return '"' + "".join(rf"\U{ord(char):08x}" for char in json.dumps(text)[1:-1]) + '"'


# --- expressions ----------------------------------------------------------------------------------


class EbnfSyntaxError(ValueError):
    """A printed grammar with something in it that is not known here."""


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
        \{(?P<least>\d+),\s*-?\d+\} |
        (?P<mark>\(=|[()|])
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x(..)|u(....)|U(.{8})|(.))|(.)", re.DOTALL)
_PLAIN = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
MAX_CODEPOINT = 0x10FFFF


def parse_rules(text: str) -> dict[str, Expression]:
    """The rules of a printed grammar, by their names."""
    reader = _Reader(text)
    found: dict[str, Expression] = {}
    while reader.lexeme is not None:
        name = reader.take("rule")
        found[name] = reader.choice()
    return found


class _Reader:
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
            raise EbnfSyntaxError(f"a {kind} was expected")
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
            if lexeme["mark"] == "(=":  # says what follows anyway
                self._group()
            elif lexeme["least"] is not None:
                items[-1] = Repetition(items[-1], int(self.take("least")))
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
            raise EbnfSyntaxError("a ')' was expected")
        self._next()
        return found


def _lexemes(text: str) -> Iterator[re.Match[str]]:
    at = 0
    while text[at:].strip():
        found = _LEXEME.match(text, at)
        if found is None or found["name"] in ("TagDispatch", "TokenTagDispatch", "ExcludeToken"):
            raise EbnfSyntaxError(f"cannot be read: {text[at : at + 40]!r}")
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
    """Each character, and whether it was escaped."""
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
    """Ascending, apart from each other."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)


def invert_ranges(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """All other characters.

    >>> invert_ranges(((0, 9), (12, 0x10FFFF)))
    ((10, 11),)
    """
    found, start = [], 0
    for first, last in merge_ranges(list(ranges)):
        if first > start:
            found.append((start, first - 1))
        start = last + 1
    return (*found, (start, MAX_CODEPOINT)) if start <= MAX_CODEPOINT else tuple(found)
