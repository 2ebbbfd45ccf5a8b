"""Texts that end a reply, wherever its tokens happen to be cut."""

from collections.abc import Sequence

from paddock.text import IncrementalDetokenizer, Tokenizer


class StopStringChecker:
    """Reads a reply token by token and says when one of the texts has appeared.

    The reply is not trimmed: whoever shows it knows best what to cut away.
    """

    def __init__(
        self, texts: Sequence[str], tokenizer: Tokenizer, *, prompt: Sequence[int] = ()
    ) -> None:
        self.texts = tuple(texts)
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, behind=prompt
        )  # its first blank counts
        self._longest = max(map(len, texts))
        self._tail = ""  # the last of what was read, in which a text may have begun

    def feed(self, token: int, *, heed: bool = True) -> str | None:
        """The text that `token` completes, the earliest if there are several. Unless heeded, what
        has been read by now does not count later either."""
        self._tail += self._detokenizer.push(token)
        found = [(self._tail.find(text), text) for text in self.texts if text in self._tail]
        self._tail = self._tail[-(self._longest - 1) :] if self._longest > 1 else ""
        if not heed:
            self._tail = ""
            return None
        return min(found)[1] if found else None
