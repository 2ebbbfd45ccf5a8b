"""How large the numbers of an expression can be, told without computing them."""

import re
from math import log2

MOST_BITS = 1 << 16  # of a number that is still computed: twenty thousand digits
_TOKEN = re.compile(r"\d+(?:\.\d+)?|\\[a-zA-Z]+|\\.|\*\*|\S")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def is_too_large(text: str) -> bool:
    r"""Whether to compute the text may take more than any answer needs: powers and factorials of
    large numbers, thousands of digits, brackets in brackets in brackets.

    >>> [is_too_large(said) for said in ("9^{9^{9}}", "9^9^9", "(1+x)^{100000}", "100000!", "9!!!")]
    [True, True, True, True, True]
    >>> [is_too_large(said) for said in ("2^{2023}", "x^{2^{10}}", r"\frac{7!}{2^{99}}", "(1+x)^{9}")]
    [False, False, False, False]
    """
    try:
        return _Reader(_TOKEN.findall(text)).bits("") > MOST_BITS
    except RecursionError:
        return True


class _Reader:
    """Bounds of the bits that values have. Factors and terms alike add their bits up: more than
    there are, which the limit can bear."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens[::-1]

    def bits(self, end: str) -> float:
        """Of what stands before the bracket `end`, which is taken away."""
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
