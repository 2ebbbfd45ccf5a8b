"""Rendered conversations (token ids, sources, loss mask) and the renderer protocol.

Every token has a source, the index of its message, and a loss mask. The loss covers reasoning,
content, tool calls and the stop token of assistant messages; it excludes role markers, the
generation prompt and all other messages.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

from paddock.records import Message, ToolSpec
from paddock.text.chat_template import DEFAULT_THINKING, ThinkingKwargs
from paddock.text.tokenizer import TextTooLongError, Tokenizer

TokenSource = Literal["template", "system", "user", "assistant", "tool"]


TokenRow = tuple[int, TokenSource, bool, int | None]  # one token with the columns of RenderedTokens


class NotPrefixPreservingError(ValueError):
    """A chat template changes earlier text where it must only append."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedTokens:
    """The tokens of a conversation, as parallel columns."""

    token_ids: tuple[int, ...]
    sources: tuple[TokenSource, ...]
    loss_mask: tuple[bool, ...]
    message_indices: tuple[int | None, ...]  # index of the message of each token, if any

    def __post_init__(self) -> None:
        for name in ("sources", "loss_mask", "message_indices"):
            count = len(getattr(self, name))
            if count != len(self.token_ids):
                raise ValueError(f"{name} has {count} entries for {len(self.token_ids)} tokens")

    def restrict_loss_to(self, messages: Collection[int]) -> Self:
        """A copy whose loss mask is limited to these messages."""
        pairs = zip(self.loss_mask, self.message_indices, strict=True)
        return replace(self, loss_mask=tuple(t and m in messages for t, m in pairs))


class Renderer(Protocol):
    """Renders conversations into the tokens of a model family."""

    tokenizer: Tokenizer

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an assistant message."""

    def render_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        max_tokens: int | None = None,
    ) -> RenderedTokens:
        """The conversation and the generation prompt, with an empty loss mask.

        Raises TextTooLongError, at little cost, if it is much longer than `max_tokens`.
        """

    def render_dialogue(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        closed: bool = True,
        max_tokens: int | None = None,
    ) -> RenderedTokens:
        """A whole conversation for training. `closed` appends the stop token to the last message if
        it comes from the assistant. `max_tokens` as in `render_prompt`."""

    def render_last_reply(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
    ) -> RenderedTokens:
        """A prompt and the last message; only the last message is in the loss mask."""

    def render_next_turn(
        self,
        past: Sequence[int],
        messages: Sequence[Message],
        *,
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        answering: Message | None = None,
    ) -> RenderedTokens:
        """The tokens after `past`, without re-tokenizing it: new messages and generation prompt.

        `past` are the exact tokens of a session up to the last sampled one. The loss mask is empty;
        message indices count from the first new message. `answering` is the assistant message in
        `past` whose calls the tool results answer, for templates that sort results. Raises
        NotPrefixPreservingError if the template would change `past`.
        """

    def ignored_kwargs(self, thinking: ThinkingKwargs) -> dict[str, str]:
        """The fields of `thinking` that this template ignores, each with the reason."""


# --- spans into tokens -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TemplateSpan:
    """Text or one special token, with its source."""

    text: str  # a SpecialToken becomes that token; other text is encoded as plain text
    source: TokenSource = "template"
    message: int | None = None
    loss_mask: bool = False


def encode_spans(
    spans: Iterable[TemplateSpan], ids_of: Callable[[str], Sequence[int]]
) -> RenderedTokens:
    """Tokenize the spans."""
    token_ids: list[int] = []
    sources: list[TokenSource] = []
    loss_mask: list[bool] = []
    messages: list[int | None] = []
    for span in spans:
        ids = ids_of(span.text)
        token_ids += ids
        sources += [span.source] * len(ids)
        loss_mask += [span.loss_mask] * len(ids)
        messages += [span.message] * len(ids)
    return RenderedTokens(
        token_ids=tuple(token_ids),
        sources=tuple(sources),
        loss_mask=tuple(loss_mask),
        message_indices=tuple(messages),
    )


def rendered_from_rows(rows: Iterable[TokenRow]) -> RenderedTokens:
    columns = list(zip(*rows, strict=True)) or [()] * 4
    return RenderedTokens(
        token_ids=columns[0], sources=columns[1], loss_mask=columns[2], message_indices=columns[3]
    )


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """The length of the common prefix of two sequences."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def check_no_assistant_messages(messages: Sequence[Message]) -> None:
    if any(message.role == "assistant" for message in messages):
        raise ValueError("an assistant message cannot be appended to a session: it is sampled")


def check_message_count(messages: Sequence[Message], max_tokens: int | None) -> None:
    """Raise TextTooLongError if there are more messages than tokens, before rendering them."""
    if max_tokens is not None and len(messages) > max_tokens:
        raise TextTooLongError(f"at least {len(messages)} tokens")


def check_ends_with_assistant(messages: Sequence[Message]) -> None:
    if not messages or messages[-1].role != "assistant":
        raise ValueError(
            "the last message must come from the assistant: there is nothing to train on"
        )
