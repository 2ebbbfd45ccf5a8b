"""Stop strings, detected across token boundaries."""

from collections.abc import Sequence

from paddock.text import IncrementalDetokenizer, Tokenizer


class StopStringChecker:
    """Detokenizes an output incrementally and reports when a stop string has appeared.

    The output is not trimmed; that is left to the API layer.
    """

    def __init__(
        self, texts: Sequence[str], tokenizer: Tokenizer, *, prompt: Sequence[int] = ()
    ) -> None:
        self.texts = tuple(texts)
        # With the prompt as context, a leading space of the first token is kept.
        self._detokenizer = IncrementalDetokenizer(tokenizer, behind=prompt)
        self._max_len = max(map(len, texts))
        self._tail = ""  # end of the text so far, in which a stop string may have begun

    def feed(self, token: int, *, check: bool = True) -> str | None:
        """The stop string that `token` completes, the earliest if there are several. With `check`
        False (below `min_new_tokens`) the text so far can never be part of a match."""
        self._tail += self._detokenizer.push(token)
        found = [(self._tail.find(text), text) for text in self.texts if text in self._tail]
        self._tail = self._tail[-(self._max_len - 1) :] if self._max_len > 1 else ""
        if not check:
            self._tail = ""
            return None
        return min(found)[1] if found else None
