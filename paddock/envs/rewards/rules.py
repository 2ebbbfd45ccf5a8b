"""Rules: a text in, a number between 0 and 1 out."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from paddock.envs.json_schema import find_violation


def exact_match(text: str, reference: str, *, case: bool = False) -> float:
    """Whether both are the same words, however they are spaced.

    >>> exact_match(" The  oak ", "the oak"), exact_match("The oak", "the oak", case=True)
    (1.0, 0.0)
    """
    pair = [" ".join(side.split()) for side in (text, reference)]
    return float(pair[0] == pair[1] if case else pair[0].lower() == pair[1].lower())


def regex_match(text: str, pattern: str) -> float:
    """Whether the pattern is somewhere in the text."""
    return float(re.search(pattern, text, re.MULTILINE) is not None)


def contains_words(text: str, words: Sequence[str]) -> float:
    """The share of the words that occur, in capitals or not.

    >>> contains_words("Oak and elm.", ("oak", "fir"))
    0.5
    """
    return sum(word.lower() in text.lower() for word in words) / len(words)


def token_f1(text: str, reference: str) -> float:
    """F1 of the words of both, as question answering measures it.

    >>> token_f1("the tall oak", "tall oak tree")
    0.6666666666666666
    """
    said, right = (re.findall(r"\w+", side.lower()) for side in (text, reference))
    shared = (Counter(said) & Counter(right)).total()
    return 2 * shared / (len(said) + len(right)) if shared else 0.0


def length_score(text: str, *, full: int, none: int) -> float:
    """1 up to `full` characters, 0 from `none` on, straight in between.

    >>> [length_score("x" * n, full=10, none=20) for n in (5, 15, 25)]
    [1.0, 0.5, 0.0]
    """
    return min(1.0, max(0.0, (none - len(text)) / (none - full)))


def extract_json(text: str) -> Any:
    """The JSON that a text is, or that its last fence holds. ValueError: there is none."""
    # By splitting: a pattern would take time quadratic in the blank lines of a fence left open.
    fenced = text.split("```")[1 : 2 * (text.count("```") // 2) : 2]
    try:
        return json.loads(fenced[-1].removeprefix("json") if fenced else text)
    except RecursionError:  # thousands of brackets; a model that repeats itself says such things
        raise ValueError("nested too deeply") from None


def matches_json_schema(text: str, schema: dict[str, Any]) -> float:
    """Whether the text holds JSON that the schema allows.

    >>> matches_json_schema('{"n": 1}', {"type": "object", "required": ["n"]}), matches_json_schema("n = 1", {})
    (1.0, 0.0)
    """
    try:
        found = extract_json(text)
    except ValueError:
        return 0.0
    return float(find_violation(found, schema, "it") is None)
