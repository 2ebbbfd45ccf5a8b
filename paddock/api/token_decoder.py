"""The text and bytes of single tokens, for log-probabilities."""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from paddock.records import TokenLogprob
from paddock.text import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenDecoder:
    """Decodes single tokens. A token that is part of a character has bytes, and U+FFFD as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._cache: dict[int, tuple[str, tuple[int, ...] | None]] = {}

    def text(self, token_id: int) -> str:
        return self._decode(token_id)[0]

    def bytes(self, token_id: int) -> tuple[int, ...] | None:
        """The UTF-8 bytes; None for part of a character whose bytes are not known."""
        return self._decode(token_id)[1]

    def unique_texts(self, token_ids: Iterable[int]) -> list[str]:
        """The token texts, as keys of one JSON object: duplicates become `token_id:N`."""
        found: dict[str, None] = {}
        for token_id in token_ids:
            text = self.text(token_id)
            found[f"token_id:{token_id}" if text in found else text] = None
        return list(found)

    def _decode(self, token_id: int) -> tuple[str, tuple[int, ...] | None]:
        cached = self._cache.get(token_id)
        if cached is None:
            text = self.tokenizer.decode([token_id])
            data = tuple(text.encode()) if "\ufffd" not in text else self._raw_bytes(token_id)
            cached = self._cache[token_id] = (text, data)
        return cached

    def _raw_bytes(self, token_id: int) -> tuple[int, ...] | None:
        token = self.tokenizer.id_to_token(token_id) or ""
        single = _BYTE.fullmatch(token)
        if single:
            return (int(single[1], 16),)
        table = _byte_letters()
        if token and all(letter in table for letter in token):
            return tuple(table[letter] for letter in token)
        return None


@cache
def _byte_letters() -> dict[str, int]:
    """The byte of each letter in a byte-level vocabulary: printable bytes stand for themselves, the
    others follow in order from U+0100 on.

    >>> _byte_letters()["A"], _byte_letters()["\u0120"]
    (65, 32)
    """
    seen = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {
        chr(0x100 + i): byte for i, byte in enumerate(unseen)
    }


def format_chat_logprobs(
    token_decoder: TokenDecoder,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[TokenLogprob],
) -> list[dict[str, Any]]:
    """Entries of `logprobs.content`, one per token; `top` may be empty."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = token_decoder.bytes(token_id)
        shown = None if data is None else list(data)
        return {"token": token_decoder.text(token_id), "logprob": logprob, "bytes": shown}

    found = []
    for i, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        candidates = top[i] if top else None
        pairs = zip(candidates.token_ids, candidates.logprobs, strict=True) if candidates else ()
        found.append(entry(token_id, logprob) | {"top_logprobs": [entry(*p) for p in pairs]})
    return found
