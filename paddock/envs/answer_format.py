"""Answer extraction and comparison: boxed, tagged, last number, last line, code.

An `AnswerFormat` has the instruction for the prompt, the extractor and the renderer for solvers.
Extraction never raises: a reply without an answer gives None.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

AnswerFormatName = Literal["boxed", "number", "tag", "line", "whole", "code"]

# A brace after a backslash is a character of the answer: \{1, 2\} is a set. After two backslashes,
# which end a row of a matrix, it is a normal brace.
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|(?<!(?<!\\)\\)[{}]")
_BARE = re.compile(r"\\(?:boxed|fbox)\s+([-+]?\d[\d.,/]*)")  # as in a few solutions of MATH
_NUMBER = re.compile(r"[-\u2212]?\$?(?:\d[\d,]*(?:\.\d+)?|(?<![\w.])\.\d+)(?:\s*/\s*\d+)?")
_MARKED = re.compile(r"####\s*(\S[^\n]*)")


def extract_boxed_answer(text: str) -> str | None:
    r"""Content of the last \boxed{} with balanced braces; else the number after the last \boxed
    without braces.

    >>> extract_boxed_answer(r"first \boxed{1}, so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> extract_boxed_answer(r"the answer is $\boxed 2$.")
    '2'
    >>> extract_boxed_answer(r"\boxed{1} and \boxed{never closed")
    '1'
    """
    open_braces: list[int | None] = []  # start of the box content; None: not a box
    begin, end = -1, -1
    for match in _BRACE.finditer(text):
        if match[0].endswith("{"):
            open_braces.append(match.end() if match[0].startswith("\\") else None)
        elif open_braces and (start := open_braces.pop()) is not None and start > begin:
            begin, end = start, match.start()
    if end >= 0:
        return text[begin:end].strip()
    bare = _BARE.findall(text)
    return bare[-1].rstrip(".,/") if bare else None


def extract_tagged_answer(text: str) -> str | None:
    """Content of the last pair of answer tags.

    >>> extract_tagged_answer("<answer>no</answer> I mean <answer> yes </answer>")
    'yes'
    """
    # By search from the end: a regex would take quadratic time in the unclosed tags.
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return text[begin + len("<answer>") : end].strip() if begin >= 0 else None


def extract_last_number(text: str) -> str | None:
    """The last number of a text, with currency sign and thousands separators.

    >>> extract_last_number("3 eggs at $2 make $1,206.50 a day.")
    '$1,206.50'
    """
    found = _NUMBER.findall(text)
    return found[-1].rstrip(",") if found else None


def extract_number(text: str) -> str | None:
    """A boxed answer, else one after ####, else the last number."""
    marked = _MARKED.findall(text)
    return extract_boxed_answer(text) or (
        marked[-1].strip() if marked else extract_last_number(text)
    )


def extract_last_line(text: str) -> str | None:
    """The last non-empty line, without a leading "Answer:".

    >>> extract_last_line("Well.\\nAnswer: oak, elm\\n")
    'oak, elm'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"(?i)^(final )?answer\s*[:=]\s*", "", lines[-1]) if lines else None


def extract_code(text: str) -> str | None:
    """Content of the last closed code fence; a reply without a fence is code as a whole.

    >>> extract_code("So:\\n```python\\nx = 1\\n```\\nDone."), extract_code("    return 1")
    ('x = 1\\n', '    return 1')
    """
    if "```" not in text:
        return text if text.strip() else None
    inside = text.split("```")[1::2]  # with an odd number of fences the last is unclosed
    closed = inside[: text.count("```") // 2]
    if not closed:
        return None
    first, _, rest = closed[-1].partition("\n")
    return rest if first.strip().isalnum() or not first.strip() else closed[-1]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    hint: str  # instruction appended to the question
    extract: Callable[[str], str | None]
    render: Callable[[str], str]


ANSWER_FORMATS: dict[AnswerFormatName, AnswerFormat] = {
    "boxed": AnswerFormat(
        "Put the final answer in \\boxed{}.", extract_boxed_answer, lambda a: f"\\boxed{{{a}}}"
    ),
    "number": AnswerFormat(
        "End with the answer, a number.", extract_number, lambda a: f"The answer is {a}."
    ),
    "tag": AnswerFormat(
        "Put the final answer between <answer> and </answer>.",
        extract_tagged_answer,
        lambda a: f"<answer>{a}</answer>",
    ),
    "line": AnswerFormat(
        "End with a line that says the answer and nothing else.", extract_last_line, lambda a: a
    ),
    "code": AnswerFormat(
        "Answer with one block of Python.", extract_code, lambda a: f"```python\n{a}\n```"
    ),
    "whole": AnswerFormat("", lambda text: text.strip() or None, lambda a: a),
}

_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(-?\s*\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_MIXED = re.compile(r"([-+]?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)")
_VALUE = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:/\d+)?")
_MAX_CHARS = 200  # no plain number is longer, and huge numbers cost time


def parse_number(text: str) -> Fraction | None:
    r"""Parse a plain number; None if the text is anything else.

    >>> [parse_number(text) for text in ("1,234", "$0.50", r"-\frac{1}{2}", "6/4.", "x + 1", "1/0")]
    [Fraction(1234, 1), Fraction(1, 2), Fraction(-1, 2), Fraction(3, 2), None, None]
    >>> parse_number("-1 3/4") == parse_number(r"-1\frac{3}{4}") == Fraction(-7, 4)
    True
    """
    if len(text) > _MAX_CHARS:
        return None
    text = text.strip().strip("$").replace("\\$", "").replace("\\!", "").replace("\\%", "%")
    text = text.replace("\u2212", "-")  # the minus sign that is not a hyphen
    if re.fullmatch(r"[-+]?\$?\d{1,3}(,\d{3})+(\.\d+)?%?\.?", text):
        text = text.replace(",", "")
    text = _FRACTION.sub(r" \1/\2", text).replace("$", "").rstrip(". ").removesuffix("%").strip()
    if mixed := _MIXED.fullmatch(text):  # before spaces go: 1 3/4 is not 13/4
        sign, whole, above, below = mixed.groups()
        text = f"{sign}{int(whole) * int(below) + int(above)}/{below}"
    text = re.sub(r"\s+", "", text)
    if not _VALUE.fullmatch(text):
        return None
    above, _, below = text.partition("/")
    divisor = int(below or 1)
    return Fraction(above) / divisor if divisor else None


def normalize_answer(text: str) -> str:
    r"""Normalize a text for comparison: without markup, spaces, case and final full stop.

    >>> normalize_answer(r" \text{Oak} ,  \left(1,2\right) ."), normalize_answer(r"\dfrac12")
    ('oak,(1,2)', '\\frac12')
    """
    text = re.sub(r"\\(?:text|mathrm|textbf|mbox)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\left|\\right|\\[,;:! ]|\\displaystyle|\$", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    return re.sub(r"\s+", "", text).rstrip(".").lower()


def answers_match(answer: str, right: str) -> bool | None:
    """Compare two answers as numbers if both are numbers, else as normalized text.

    None: the texts differ, but may still mean the same.
    """
    value, right_value = parse_number(answer), parse_number(right)
    if value is not None and right_value is not None:
        return value == right_value
    text = normalize_answer(answer)
    return True if text == normalize_answer(right) and text else None
