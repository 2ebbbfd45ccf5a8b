"""Upper bound on the size of an expression's numbers, without evaluating it."""

import re
from math import log2

MAX_BITS = 1 << 16  # of a number that is still computed: twenty thousand digits
_TOKEN = re.compile(r"\d+(?:\.\d+)?|\\[a-zA-Z]+|\\.|\*\*|\S")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def is_too_large(text: str) -> bool:
    r"""Whether evaluating the text may take longer than any real answer needs: powers and
    factorials of large numbers, thousands of digits, deeply nested brackets.

    >>> [is_too_large(text) for text in ("9^{9^{9}}", "9^9^9", "(1+x)^{100000}", "100000!", "9!!!")]
    [True, True, True, True, True]
    >>> [is_too_large(text) for text in ("2^{2023}", "x^{2^{10}}", r"\frac{7!}{2^{99}}", "(1+x)^9")]
    [False, False, False, False]
    """
    try:
        return _BitBound(_TOKEN.findall(text)).bits("") > MAX_BITS
    except RecursionError:
        return True


class _BitBound:
    """Upper bound on the bits of a value. The bits of factors and of terms alike are added up,
    which overestimates sums; the limit is generous enough for that."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens[::-1]

    def bits(self, end: str) -> float:
        """Bound for the tokens up to the bracket `end`, which is consumed."""
        whole = 0.0
        while self._tokens:
            if self._tokens[-1] == end:
                self._tokens.pop()
                break
            whole += self._power()
        return whole

    def _power(self) -> float:
        base = self._atom()
        while self._tokens and self._tokens[-1] == "!":
            self._tokens.pop()
            value = 2.0 ** min(base, 64.0)
            base = value * log2(value + 1)
        if self._tokens and self._tokens[-1] in ("^", "**"):
            self._tokens.pop()
            exponent = self._power() if self._tokens else 0.0  # 2^3^4 is 2^(3^4)
            return max(base, 1.0) * 2.0 ** min(exponent, 64.0)
        return base

    def _atom(self) -> float:
        token = self._tokens.pop()
        if token in _BRACKETS:
            return self.bits(_BRACKETS[token])
        if token[0].isdigit():
            return log2(max(float(token), 2.0)) if len(token) < 300 else 4.0 * len(token)
        return 1.0
