"""Dialogues as token rows with loss masks (SFT tokenization).

Each reply is trained in exactly the context in which the model would have to generate it. If the
chat template is prefix-preserving, one row holds all replies. If it drops earlier reasoning at each
user message, each user turn is a separate row; otherwise a reply would be trained after reasoning
that is absent at inference time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paddock.records import Dialogue, LossMaskSpan, Message, ThinkingMode
from paddock.text import (
    IncrementalDetokenizer,
    NotPrefixPreservingError,
    RenderedTokens,
    Renderer,
    SpecialToken,
    ThinkingKwargs,
    Tokenizer,
)

THINKING_MODES: dict[ThinkingMode, ThinkingKwargs] = {
    "interleaved": ThinkingKwargs(),
    "preserved": ThinkingKwargs(clear_thinking=False),
    "turns": ThinkingKwargs(clear_thinking=False),
    "off": ThinkingKwargs(enable_thinking=False, clear_thinking=False),
}

TrainOn = Literal["assistant", "all"]


@dataclass(frozen=True, slots=True)
class TokenizedDialogue:
    """One row: token ids and loss mask."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def tokenize_dialogue(
    dialogue: Dialogue, renderer: Renderer, *, train_on: TrainOn = "assistant"
) -> list[TokenizedDialogue]:
    """Tokenize a dialogue into rows.

    Together the rows train each reply once, except spans marked in `dialogue.untrained`. With
    `train_on="all"` every token that is not marked is trained.
    """
    found: list[TokenizedDialogue] = []
    for row in _rows(dialogue, renderer):
        if train_on == "all":
            row = replace(row, loss_mask=(True,) * len(row.token_ids))
        here = _apply_marks(row, dialogue, renderer.tokenizer)
        if found and here.token_ids[: len(found[-1].token_ids)] == found[-1].token_ids:
            before = found.pop()
            padded = (*before.loss_mask, *[False] * (len(here.loss_mask) - len(before.loss_mask)))
            both = tuple(a or b for a, b in zip(padded, here.loss_mask, strict=True))
            here = replace(here, loss_mask=both)
        found.append(here)
    return found


def _rows(dialogue: Dialogue, renderer: Renderer) -> Iterator[RenderedTokens]:
    messages, thinking = dialogue.messages, THINKING_MODES[dialogue.thinking]
    whole = range(len(messages))
    match dialogue.thinking:
        case "off":
            silent = [replace(message, reasoning=None) for message in messages]
            yield from _turn(renderer, dialogue, silent, whole)
        case "preserved":
            yield from _turn(renderer, dialogue, messages, whole)
        case "interleaved":
            for turn in _turns(messages):
                yield from _turn(renderer, dialogue, messages, turn)
        case "turns":
            for k, message in enumerate(messages):
                if message.role == "assistant":
                    mode = replace(thinking, enable_thinking=message.reasoning is not None)
                    prefix = messages[: k + 1]
                    yield renderer.render_last_reply(prefix, tools=dialogue.tools, thinking=mode)


def _turn(
    renderer: Renderer, dialogue: Dialogue, messages: Sequence[Message], turn: range
) -> Iterator[RenderedTokens]:
    """The replies of one turn in one row; one row per reply if the template is not
    prefix-preserving."""
    tools, thinking = dialogue.tools, THINKING_MODES[dialogue.thinking]
    try:
        row = renderer.render_dialogue(messages[: turn.stop], tools=tools, thinking=thinking)
        yield row.restrict_loss_to(turn)
    except NotPrefixPreservingError:
        for k in turn:
            if messages[k].role == "assistant":
                yield renderer.render_last_reply(messages[: k + 1], tools=tools, thinking=thinking)


def _turns(messages: Sequence[Message]) -> Iterator[range]:
    """Ranges from each user message to the next, without those that have no reply.

    >>> messages = [Message(role=role, content="") for role in ("user", "assistant", "user")]
    >>> list(_turns(messages))
    [range(0, 2)]
    """
    starts = [i for i, message in enumerate(messages) if message.role == "user"] or [0]
    starts[0] = 0
    for start, stop in zip(starts, [*starts[1:], len(messages)], strict=True):
        if any(message.role == "assistant" for message in messages[start:stop]):
            yield range(start, stop)


# --- loss mask spans ------------------------------------------------------------------------------


def _apply_marks(
    row: RenderedTokens, dialogue: Dialogue, tokenizer: Tokenizer
) -> TokenizedDialogue:
    trained = list(row.loss_mask)
    for span in dialogue.untrained:
        own = [
            i
            for i, (message, producer) in enumerate(
                zip(row.message_indices, row.sources, strict=True)
            )
            if message == span.message and producer == "assistant"
        ]
        message = dialogue.messages[span.message]
        for i in _masked_positions(span, own, message, row.token_ids, tokenizer):
            trained[i] = False
    return TokenizedDialogue(row.token_ids, tuple(trained))


def _masked_positions(
    span: LossMaskSpan,
    own: Sequence[int],
    message: Message,
    token_ids: Sequence[int],
    tokenizer: Tokenizer,
) -> list[int]:
    """Positions among `own`, the reply's tokens, that overlap the span by at least one character.

    If the tokens do not spell the part as written, the whole part is masked: an error must never be
    trained.
    """
    if span.part == "message":
        return list(own)
    decoded = _DecodedReply.from_ids([token_ids[i] for i in own], tokenizer)
    start, stop = decoded.parts(message)[span.part]
    if span.part == "calls":
        found = decoded.calls(range(start, stop), span, len(message.tool_calls))
        return [own[i] for i in found]
    text = (message.reasoning or "") if span.part == "reasoning" else message.content
    lost = len(text) - len(text.lstrip())  # templates strip whitespace
    size = len(text.strip())
    first = max(0, span.start - lost)
    last = size if span.end is None else min(size, span.end - lost)
    if decoded.text[start:stop] != text.strip():
        first, last = 0, stop - start
    return [own[i] for i in decoded.overlapping(start + first, start + last)]


@dataclass(frozen=True, slots=True)
class _DecodedReply:
    """Tokens of a reply with their text; a special token is one private character, `MARK`."""

    text: str
    spans: tuple[tuple[int, int], ...]  # character range of each token
    markers: tuple[SpecialToken | None, ...]  # special token at each position, if any
    has_think: bool  # whether </think> is one token

    MARK = "\ufdd1"

    @classmethod
    def from_ids(cls, ids: Sequence[int], tokenizer: Tokenizer) -> "_DecodedReply":
        known = {number: token for token, number in tokenizer.special_token_ids.ids.items()}
        text, spans = "", []
        detokenizer, waiting = IncrementalDetokenizer(tokenizer), 0
        for number in ids:
            if tokenizer.is_added(number):
                text += detokenizer.flush() + cls.MARK
                spans += [(len(text) - 1, len(text))] * (waiting + 1)
                waiting = 0
                continue
            new = detokenizer.push(number)
            waiting += 1
            if new:  # tokens of an incomplete character share the range of the completed one
                spans += [(len(text), len(text) + len(new))] * waiting
                text, waiting = text + new, 0
        text += detokenizer.flush()
        spans += [(len(text) - 1, len(text))] * waiting
        markers = tuple(known.get(number) for number in ids)
        return cls(
            text, tuple(spans), markers, SpecialToken.THINK_CLOSE in tokenizer.special_token_ids
        )

    def parts(self, message: Message) -> dict[str, tuple[int, int]]:
        """Character range of each part of the message; empty for parts that are not rendered."""
        closed = next(
            (i for i, m in enumerate(self.markers) if m is SpecialToken.THINK_CLOSE), None
        )
        # Reasoning ends at </think>. A tokenizer without that token may spell it in characters.
        limit = self.spans[closed][0] if closed is not None else len(self.text)
        shown = closed is not None or not self.has_think
        thought, content = (message.reasoning or "").strip(), message.content.strip()
        at = self.text.find(thought, 0, limit) if thought and shown else -1
        reasoning = (at, at + len(thought)) if at >= 0 else (0, limit if thought and shown else 0)
        behind = limit + 1 if closed is not None else reasoning[1]
        at = self.text.find(content, behind)
        found = (at, at + len(content)) if at >= 0 else (behind, len(self.text))
        return {"reasoning": reasoning, "content": found, "calls": (found[1], len(self.text))}

    def overlapping(self, start: int, stop: int) -> list[int]:
        """Tokens that overlap the character range; none if the range is empty."""
        return [i for i, (a, b) in enumerate(self.spans) if max(a, start) < min(b, stop)]

    def calls(self, where: range, span: LossMaskSpan, count: int) -> list[int]:
        """Tokens of calls `span.start` to `span.end`. If the special tokens do not separate the
        calls, everything after the content."""
        behind = [i for i, (a, _) in enumerate(self.spans) if a in where]
        opened = [i for i in behind if self.markers[i] is SpecialToken.TOOL_CALL_OPEN]
        closed = [i for i in behind if self.markers[i] is SpecialToken.TOOL_CALL_CLOSE]
        if not len(opened) == len(closed) == count:
            return behind
        wanted = range(count)[span.start : span.end]
        return [i for n in wanted for i in range(opened[n], closed[n] + 1)]
