"""Token ids as pieces of text, for the dashboard and the network page."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paddock.text import Tokenizer


class TokenizerText:
    """A tokenizer behind the interface that `dashboard` expects."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer

    def pieces(self, ids: Sequence[int]) -> list[str]:
        from paddock.text import IncrementalDetokenizer

        detokenizer = IncrementalDetokenizer(self._tokenizer)
        pieces = [detokenizer.push(token) for token in ids]
        if pieces:
            pieces[-1] += detokenizer.flush()
        return pieces

    def is_special(self, token_id: int) -> bool:
        return self._tokenizer.is_added(token_id)


def open_token_text(folder: Path) -> TokenizerText | None:
    """The tokenizer in a folder; None if there is none that can be read."""
    from paddock.text import Tokenizer, TokenizerError

    try:
        return TokenizerText(Tokenizer.load(folder))
    except (TokenizerError, OSError):
        return None
