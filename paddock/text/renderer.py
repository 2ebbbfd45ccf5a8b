"""Tokens that know where they come from, and what every renderer can do.

A conversation becomes tokens piece by piece; each token knows who produced it, which message it
belongs to and whether a model learns from it: a reply's reasoning, content, calls and the token
that stops it are trained; role markers, what a prompt opens a reply with, and everything that
others say are not.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

from paddock.records import Message, ToolSpec
from paddock.text.chat_template import DEFAULT_THINKING, ThinkingKwargs
from paddock.text.tokenizer import TextTooLongError, Tokenizer

TokenSource = Literal["template", "system", "user", "assistant", "tool"]


TokenRow = tuple[int, TokenSource, bool, int | None]  # of one token, the columns below


class NotPrefixPreservingError(ValueError):
    """A template that changes what it said before, where it should only have gone on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedTokens:
    """Tokens of a conversation, column by column."""

    token_ids: tuple[int, ...]
    sources: tuple[TokenSource, ...]
    loss_mask: tuple[bool, ...]
    message_indices: tuple[
        int | None, ...
    ]  # index of the message that the token belongs to, if any

    def __post_init__(self) -> None:
        for name in ("sources", "loss_mask", "message_indices"):
            count = len(getattr(self, name))
            if count != len(self.token_ids):
                raise ValueError(f"{name}: {count} for {len(self.token_ids)} tokens")

    def restrict_loss_to(self, messages: Collection[int]) -> Self:
        """The same, but only these messages are trained, as far as they were."""
        pairs = zip(self.loss_mask, self.message_indices, strict=True)
        return replace(self, loss_mask=tuple(t and m in messages for t, m in pairs))


class Renderer(Protocol):
    """What every family of models can do with a conversation."""

    tokenizer: Tokenizer

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a reply."""

    def render_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        most: int | None = None,
    ) -> RenderedTokens:
        """What a model is to go on from: the conversation and the opening of its reply. Nothing
        of it is trained. Raises TooLong, at little cost, if it has far more than `most` tokens."""

    def render_dialogue(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        closed: bool = True,
        most: int | None = None,
    ) -> RenderedTokens:
        """A whole conversation to learn from. `closed` ends its last reply, if that is the last
        message, with the token that stops a model. `most` as in `prompt`."""

    def render_last_reply(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
    ) -> RenderedTokens:
        """A prompt and the reply to it, which is the last message and alone is trained."""

    def render_next_turn(
        self,
        past: Sequence[int],
        messages: Sequence[Message],
        *,
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        answering: Message | None = None,
    ) -> RenderedTokens:
        """Only what comes after `past`, the exact tokens of a session up to the last one sampled:
        tool results or other messages, and the opening of the next reply. Nothing of it is trained;
        messages are counted from the first new one.

        `answering` is the reply in `past` whose calls the results answer, if the order matters.
        Raises RewritesPast where the template would not keep `past` as it is.
        """

    def ignored_kwargs(self, thinking: ThinkingKwargs) -> dict[str, str]:
        """What of `thinking` makes no difference to this model's template, and why."""


# --- pieces into tokens -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TemplateSpan:
    """Some text, or one marker, with where it comes from."""

    text: str  # a Special is that token, whatever it is spelled like; other text is plain
    producer: TokenSource = "template"
    message: int | None = None
    trained: bool = False


def encode_spans(
    pieces: Iterable[TemplateSpan], ids_of: Callable[[str], Sequence[int]]
) -> RenderedTokens:
    """The pieces in tokens."""
    token_ids: list[int] = []
    producers: list[TokenSource] = []
    trained: list[bool] = []
    messages: list[int | None] = []
    for piece in pieces:
        ids = ids_of(piece.text)
        token_ids += ids
        producers += [piece.producer] * len(ids)
        trained += [piece.trained] * len(ids)
        messages += [piece.message] * len(ids)
    return RenderedTokens(
        token_ids=tuple(token_ids),
        sources=tuple(producers),
        loss_mask=tuple(trained),
        message_indices=tuple(messages),
    )


def rendered_from_rows(rows: Iterable[TokenRow]) -> RenderedTokens:
    columns = list(zip(*rows, strict=True)) or [()] * 4
    return RenderedTokens(
        token_ids=columns[0], sources=columns[1], loss_mask=columns[2], message_indices=columns[3]
    )


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """How many items two sequences begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def check_no_assistant_messages(messages: Sequence[Message]) -> None:
    if any(message.role == "assistant" for message in messages):
        raise ValueError("an assistant message cannot be appended to a session: it is sampled")


def check_message_count(messages: Sequence[Message], most: int | None) -> None:
    """A message takes at least a token: more messages than tokens need not be laid out."""
    if most is not None and len(messages) > most:
        raise TextTooLongError(f"at least {len(messages)} tokens")


def check_ends_with_assistant(messages: Sequence[Message]) -> None:
    if not messages or messages[-1].role != "assistant":
        raise ValueError("the last message is no reply, so there is nothing to learn from")
