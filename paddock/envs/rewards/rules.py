"""Rule-based scores of a text, from 0 to 1."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from paddock.envs.json_schema import find_violation


def exact_match(text: str, reference: str, *, case: bool = False) -> float:
    """1 if both are equal up to whitespace and, by default, case; else 0.

    >>> exact_match(" The  oak ", "the oak"), exact_match("The oak", "the oak", case=True)
    (1.0, 0.0)
    """
    pair = [" ".join(side.split()) for side in (text, reference)]
    return float(pair[0] == pair[1] if case else pair[0].lower() == pair[1].lower())


def regex_match(text: str, pattern: str) -> float:
    """1 if the pattern matches anywhere in the text, else 0."""
    return float(re.search(pattern, text, re.MULTILINE) is not None)


def contains_words(text: str, words: Sequence[str]) -> float:
    """Fraction of the words that occur in the text, ignoring case.

    >>> contains_words("Oak and elm.", ("oak", "fir"))
    0.5
    """
    return sum(word.lower() in text.lower() for word in words) / len(words)


def token_f1(text: str, reference: str) -> float:
    """F1 of the words of both (SQuAD).

    >>> token_f1("the tall oak", "tall oak tree")
    0.6666666666666666
    """
    words, right = (re.findall(r"\w+", side.lower()) for side in (text, reference))
    shared = (Counter(words) & Counter(right)).total()
    return 2 * shared / (len(words) + len(right)) if shared else 0.0


def length_score(text: str, *, full: int, zero: int) -> float:
    """1 up to `full` characters, 0 from `zero` on, linear in between.

    >>> [length_score("x" * n, full=10, zero=20) for n in (5, 15, 25)]
    [1.0, 0.5, 0.0]
    """
    return min(1.0, max(0.0, (zero - len(text)) / (zero - full)))


def extract_json(text: str) -> Any:
    """Parse the text, or its last fenced block, as JSON. Raises ValueError if it is not JSON."""
    # By splitting: a regex would take quadratic time in the blank lines of an unclosed fence.
    fenced = text.split("```")[1 : 2 * (text.count("```") // 2) : 2]
    try:
        return json.loads(fenced[-1].removeprefix("json") if fenced else text)
    except RecursionError:  # thousands of brackets, as in degenerate repetition
        raise ValueError("nested too deeply") from None


def matches_json_schema(text: str, schema: dict[str, Any]) -> float:
    """1 if the text contains JSON that is valid under the schema, else 0.

    >>> schema = {"type": "object", "required": ["n"]}
    >>> matches_json_schema('{"n": 1}', schema), matches_json_schema("n = 1", {})
    (1.0, 0.0)
    """
    try:
        found = extract_json(text)
    except ValueError:
        return 0.0
    return float(find_violation(found, schema, "it") is None)
