"""GLM-5's conversations in tokens.

`glm5.jinja` says what a conversation looks like; here the same is laid out piece by piece, so that
every token knows where it comes from. Joined, the pieces are the Jinja text, for every version and
setting (tests/text/test_glm.py).

A reply ends where the next role begins: <|user|> or <|observation|> after a reply is what the model
says to stop. So that token belongs to the reply and is trained; <|assistant|>, the <think> or
</think> that a prompt ends in, other roles and their words are not.
"""

import json
import re
from collections.abc import Iterator, Sequence

from paddock.records import Message, ToolCall, ToolSpec
from paddock.text.parse import is_thinking
from paddock.text.rendered import (
    Piece,
    Rendered,
    RewritesPast,
    encoded,
    refuse_many,
    refuse_replies,
    require_reply,
)
from paddock.text.special import Special
from paddock.text.template import (
    RULES,
    UNSAID,
    Rules,
    Thinking,
    Version,
    glm_template,
    ignored,
    tool_dict,
)
from paddock.text.tokenizer import Tokenizer

_TOOLS_BEFORE = """
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TOOLS_AFTER = """</tools>

For each function call, output the function name and arguments within the following XML format:
"""
_TOOLS_EXAMPLE = (
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
    "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
)
_MARKERS = re.compile(f"({'|'.join(map(re.escape, Special))})")
_TOOLS_EXAMPLE_PARTS = tuple(
    Special(part) if _MARKERS.fullmatch(part) else part for part in _MARKERS.split(_TOOLS_EXAMPLE)
)
_OPENERS = {"user": Special.USER, "tool": Special.OBSERVATION, "system": Special.SYSTEM}


def _head(rules: Rules, tools: Sequence[ToolSpec], thinking: Thinking) -> Iterator[Piece]:
    yield Piece(Special.GMASK)
    yield Piece(Special.SOP)
    effort = rules.effort(thinking)
    if effort is not None:
        yield Piece(Special.SYSTEM)
        yield Piece(f"Reasoning Effort: {effort.capitalize()}")
    if tools:
        dicts = (tool_dict(tool) for tool in tools)
        shown = (d if rules.wraps_tools else d["function"] for d in dicts)
        lines = "".join(json.dumps(d, ensure_ascii=False) + "\n" for d in shown)
        yield Piece(Special.SYSTEM)
        yield Piece(_TOOLS_BEFORE + lines + _TOOLS_AFTER)
        yield from map(Piece, _TOOLS_EXAMPLE_PARTS)


def _body(
    rules: Rules,
    messages: Sequence[Message],
    thinking: Thinking,
    answering: Message | None = None,
) -> Iterator[Piece]:
    """`answering` is the reply before the first message, if that is already in tokens."""
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    for i, message in enumerate(messages):
        before = messages[i - 1] if i else answering
        marker = _OPENERS.get(message.role, Special.ASSISTANT)
        opener = Piece(marker, message=i)
        if i and messages[i - 1].role == "assistant" and message.role in ("user", "tool"):
            opener = Piece(marker, "assistant", i - 1, trained=True)
        match message.role:
            case "assistant":
                yield opener
                yield from _reply(rules, message, i, thinking, newest=i > last_user)
            case "tool":
                if before is None or before.role != "tool":
                    yield opener
                    yield from _results(rules, messages, i, before)
            case role:
                yield opener
                yield Piece(message.content, role, i)


def _reply(
    rules: Rules, message: Message, i: int, thinking: Thinking, *, newest: bool
) -> Iterator[Piece]:
    def said(text: str) -> Piece:
        return Piece(text, "assistant", i, trained=True)

    thought, content = _thought(rules, message)
    kept = newest or not rules.forgets(thinking)
    if thought is not None and (rules.opens or thought) and kept:
        yield Piece(Special.THINK_OPEN, message=i)
        yield said(thought if rules.opens else thought.strip())
        yield said(Special.THINK_CLOSE)
    elif rules.opens or (rules.opens_newest and newest and rules.thinks(thinking)):
        yield Piece(Special.THINK_OPEN, message=i)
        # A model that was asked to think closed it at once. Where thoughts were left out it did
        # not, and should not learn to; GLM-5.3's reference trains it all the same.
        chosen = rules.thinks(thinking) and (rules.always_thinks or not thought)
        yield Piece(Special.THINK_CLOSE, "assistant" if chosen else "template", i, chosen)
    else:
        yield Piece(Special.THINK_CLOSE, message=i)
    yield said(content.strip())
    for call in message.tool_calls:
        yield from map(said, _call(call))


def _thought(rules: Rules, message: Message) -> tuple[str | None, str]:
    """Reasoning and content; the first may stand inside the second, before </think>."""
    if message.reasoning is not None or Special.THINK_CLOSE not in message.content:
        return message.reasoning, message.content
    before, content = message.content.split(Special.THINK_CLOSE, 1)
    thought = before.split(Special.THINK_OPEN)[-1]
    return (thought.strip() if rules.opens else thought.strip("\n")), content


def _call(call: ToolCall) -> Iterator[str]:
    yield Special.TOOL_CALL_OPEN
    yield call.name
    for key, value in call.arguments.items():
        yield Special.ARG_KEY_OPEN
        yield key
        yield Special.ARG_KEY_CLOSE
        yield Special.ARG_VALUE_OPEN
        yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield Special.ARG_VALUE_CLOSE
    yield Special.TOOL_CALL_CLOSE


def _results(
    rules: Rules, messages: Sequence[Message], first: int, before: Message | None
) -> Iterator[Piece]:
    """The run of tool results that begins with message `first`."""
    end = first
    while end < len(messages) and messages[end].role == "tool":
        end += 1
    order: Sequence[int] = range(first, end)
    if rules.sorts_results and before is not None:
        asked = [call.id for call in before.tool_calls]
        at = {messages[j].tool_call_id: j for j in order}
        if len(at) == len(order) and set(asked) == set(at):
            order = [at[name] for name in asked]
    for j in order:
        yield Piece(Special.TOOL_RESPONSE_OPEN, message=j)
        yield Piece(messages[j].content, "tool", j)
        yield Piece(Special.TOOL_RESPONSE_CLOSE, message=j)


# --- GLM-5 ----------------------------------------------------------------------------------------


class GlmRenderer:
    """GLM-5's template, in one of its versions.

    Nothing that a message or a tool says can spell a marker: text is encoded as plain characters.
    `specials_in_text=True` encodes it as published templates do, where "<|assistant|>" in a tool's
    result is the token; it is there for comparison with them, not for use.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, version: Version = "5", specials_in_text: bool = False
    ) -> None:
        self.tokenizer, self.version = tokenizer, version
        self.template = glm_template(version)
        self._rules = RULES[version]
        self._specials_in_text = specials_in_text
        tokenizer.specials.all([token for token in Special if token in _NEEDED])

    @property
    def stops(self) -> tuple[int, ...]:
        return self.tokenizer.specials.stops

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: Thinking = UNSAID,
        most: int | None = None,
    ) -> Rendered:
        refuse_many(messages, most)
        pieces = [
            *_head(self._rules, tools, thinking),
            *_body(self._rules, messages, thinking),
            *self._opener(thinking),
        ]
        self._refuse_longer(pieces, most)
        return self._encoded(*pieces).training_only(())

    def dialogue(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: Thinking = UNSAID,
        closed: bool = True,
        most: int | None = None,
    ) -> Rendered:
        refuse_many(messages, most)
        pieces = [
            *_head(self._rules, tools, thinking),
            *_body(self._rules, messages, thinking),
        ]
        if closed and messages and messages[-1].role == "assistant":
            stop = Special.OBSERVATION if messages[-1].tool_calls else Special.USER
            pieces.append(Piece(stop, "assistant", len(messages) - 1, trained=True))
        self._refuse_longer(pieces, most)
        return self._encoded(*pieces)

    def reply(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: Thinking = UNSAID,
    ) -> Rendered:
        require_reply(messages)
        whole = self.dialogue(messages, tools=tools, thinking=thinking)
        return whole.training_only([len(messages) - 1])

    def extend(
        self,
        past: Sequence[int],
        messages: Sequence[Message],
        *,
        thinking: Thinking = UNSAID,
        answering: Message | None = None,
    ) -> Rendered:
        """The stop that was sampled is the role that comes next, so it is not said again.

        What the model said stays, whatever it was. After the wrong role (<|user|>, but tool results
        come) or <|endoftext|> the right role follows. After no stop at all (the length was reached)
        it follows too: a role is what ends a reply. Thoughts that were cut short are closed first,
        as the template would; a call that was cut short stays open, so that it is no call.
        """
        refuse_replies(messages)
        self._refuse_rewriting(past, messages, thinking)
        pieces = [*_body(self._rules, messages, thinking, answering), *self._opener(thinking)]
        if past and past[-1] == self._id(pieces[0].text):
            pieces = pieces[1:]
        elif is_thinking(self.tokenizer, past):
            pieces = [Piece(Special.THINK_CLOSE), *pieces]
        return self._encoded(*pieces)

    def ignored(self, thinking: Thinking) -> dict[str, str]:
        return ignored(self.version, thinking)

    def _opener(self, thinking: Thinking) -> list[Piece]:
        thinks, opens = self._rules.thinks(thinking), self._rules.opens
        markers = [Special.THINK_OPEN] if thinks or opens else []
        markers += [] if thinks else [Special.THINK_CLOSE]
        return [Piece(Special.ASSISTANT), *map(Piece, markers)]

    def _refuse_rewriting(
        self, past: Sequence[int], messages: Sequence[Message], thinking: Thinking
    ) -> None:
        if not self._rules.forgets(thinking) or all(m.role != "user" for m in messages):
            return
        opened, closed = self._id(Special.THINK_OPEN), self._id(Special.THINK_CLOSE)
        for token, following in zip(past, [*past[1:], None], strict=True):
            # An empty thought stays as it is where every reply opens with <think>.
            if token == opened and not (self._rules.opens and following == closed):
                raise RewritesPast(
                    f"GLM-{self.version} leaves out earlier thoughts when a user message comes:"
                    " say clear_thinking=False, or begin anew with the whole conversation"
                )

    def _id(self, text: str) -> int | None:
        return self.tokenizer.specials[text] if isinstance(text, Special) else None

    def _refuse_longer(self, pieces: Sequence[Piece], most: int | None) -> None:
        if most is not None:
            texts = [piece.text for piece in pieces]
            self.tokenizer.refuse_longer(texts, most, specials=self._specials_in_text)

    def _encoded(self, *pieces: Piece) -> Rendered:
        return encoded(pieces, self._ids)

    def _ids(self, text: str) -> list[int]:
        if isinstance(text, Special):
            return [self.tokenizer.specials[text]]
        return self.tokenizer.encode(text, specials=self._specials_in_text)


_NEEDED = frozenset(
    (
        *(Special.GMASK, Special.SOP, *_OPENERS.values(), Special.ASSISTANT),
        *(Special.THINK_OPEN, Special.THINK_CLOSE),
        *(token for token in Special if "tool" in token or "arg" in token),
    )
)
