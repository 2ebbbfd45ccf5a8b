"""GLM-5's 36 special tokens and their ids in a tokenizer."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class SpecialToken(StrEnum):
    """GLM-5's added tokens, in the order of the released vocabulary; they are its last tokens.

    >>> SpecialToken.USER.value, list(SpecialToken).index(SpecialToken.USER)
    ('<|user|>', 7)
    """

    ENDOFTEXT = "<|endoftext|>"
    MASK = "[MASK]"
    GMASK = "[gMASK]"
    SMASK = "[sMASK]"
    SOP = "<sop>"
    EOP = "<eop>"
    SYSTEM = "<|system|>"
    USER = "<|user|>"
    ASSISTANT = "<|assistant|>"
    OBSERVATION = "<|observation|>"
    IMAGE_OPEN = "<|begin_of_image|>"
    IMAGE_CLOSE = "<|end_of_image|>"
    VIDEO_OPEN = "<|begin_of_video|>"
    VIDEO_CLOSE = "<|end_of_video|>"
    AUDIO_OPEN = "<|begin_of_audio|>"
    AUDIO_CLOSE = "<|end_of_audio|>"
    TRANSCRIPTION_OPEN = "<|begin_of_transcription|>"
    TRANSCRIPTION_CLOSE = "<|end_of_transcription|>"
    CODE_PREFIX = "<|code_prefix|>"
    CODE_MIDDLE = "<|code_middle|>"
    CODE_SUFFIX = "<|code_suffix|>"
    THINK_OPEN = "<think>"
    THINK_CLOSE = "</think>"
    TOOL_CALL_OPEN = "<tool_call>"
    TOOL_CALL_CLOSE = "</tool_call>"
    TOOL_RESPONSE_OPEN = "<tool_response>"
    TOOL_RESPONSE_CLOSE = "</tool_response>"
    ARG_KEY_OPEN = "<arg_key>"
    ARG_KEY_CLOSE = "</arg_key>"
    ARG_VALUE_OPEN = "<arg_value>"
    ARG_VALUE_CLOSE = "</arg_value>"
    NOTHINK = "/nothink"
    BOX_OPEN = "<|begin_of_box|>"
    BOX_CLOSE = "<|end_of_box|>"
    IMAGE = "<|image|>"
    VIDEO = "<|video|>"

    @property
    def is_special(self) -> bool:
        """Whether `skip_special` drops it from decoded text ("special" in tokenizer.json). Others,
        such as <think> and <tool_call>, are part of the completion text."""
        return self in _SPECIAL


_SPECIAL = frozenset(
    list(SpecialToken)[: list(SpecialToken).index(SpecialToken.TRANSCRIPTION_CLOSE) + 1]
)
STOP_TOKENS = (SpecialToken.ENDOFTEXT, SpecialToken.USER, SpecialToken.OBSERVATION)


class MissingTokenError(ValueError):
    """A tokenizer lacks a requested token; the message names both."""


@dataclass(frozen=True, slots=True)
class SpecialTokenIds:
    """The ids of GLM-5's added tokens in one tokenizer, which may lack some of them.

    >>> ids = {SpecialToken.ENDOFTEXT: 300, SpecialToken.USER: 301}
    >>> specials = SpecialTokenIds(ids, tokenizer="tiny")
    >>> specials[SpecialToken.USER], specials.stop_token_ids
    (301, (300, 301))
    >>> specials[SpecialToken.SOP]
    Traceback (most recent call last):
    paddock.text.special_tokens.MissingTokenError: tokenizer 'tiny' has no token <sop>
    """

    ids: Mapping[SpecialToken, int]
    tokenizer: str  # name for error messages

    @classmethod
    def from_tokenizer(cls, id_of: Callable[[str], int | None], *, tokenizer: str) -> Self:
        found = ((token, id_of(token.value)) for token in SpecialToken)
        return cls({token: i for token, i in found if i is not None}, tokenizer)

    def __getitem__(self, token: SpecialToken) -> int:
        if token not in self.ids:
            raise MissingTokenError(f"tokenizer '{self.tokenizer}' has no token {token.value}")
        return self.ids[token]

    def __contains__(self, token: object) -> bool:
        return token in self.ids

    def __iter__(self) -> Iterator[SpecialToken]:
        return iter(self.ids)

    def ids_of(self, tokens: Iterable[SpecialToken]) -> list[int]:
        return [self[token] for token in tokens]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids of the stop tokens that the tokenizer has."""
        return tuple(self.ids[token] for token in STOP_TOKENS if token in self.ids)
