"""Checks whether a chat template preserves the prefix of an agent session.

A session is one growing token sequence: prompt, reply, tool results, reply ... A template that
changes earlier tokens (drops old reasoning, counts messages, prints the time) makes the model
sample in one context and train in another. `find_prefix_change` renders a session turn by turn and
reports the first token that changes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paddock.records import Message, ToolCall, ToolSpec
from paddock.text.chat_template import DEFAULT_THINKING, ChatTemplate, ThinkingKwargs
from paddock.text.renderer import common_prefix_length
from paddock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPattern:
    """The kind of session to check; the result holds for this kind only."""

    thinking: ThinkingKwargs = DEFAULT_THINKING
    users: bool = True  # user messages follow replies, not only tool results
    tools: bool = True
    switching: bool = False  # thinking is turned off and on between replies


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixChange:
    """A change that a template made to earlier tokens."""

    step: str  # the message that was added
    position: int  # of the first changed token
    was: str  # the text of a few tokens from there
    became: str

    def __str__(self) -> str:
        return (
            f"with {self.step}, token {self.position} changes: {self.was!r} becomes {self.became!r}"
        )


def find_prefix_change(
    template: ChatTemplate, tokenizer: Tokenizer, mode: SessionPattern
) -> PrefixChange | None:
    """The first change that `template` makes to earlier tokens, or None.

    Checked at every reply, token by token: the text with the reply starts with its prompt, and the
    next prompt starts with the text with the reply. Raises ChatTemplateError if the template cannot
    render such a session.
    """
    before: list[int] = []
    for step, text in _session(template, mode):
        after = tokenizer.encode(text, specials=True)
        same = common_prefix_length(before, after)
        if same < len(before):
            return PrefixChange(
                step=step,
                position=same,
                was=tokenizer.decode(before[same : same + 8]),
                became=tokenizer.decode(after[same : same + 8]),
            )
        before = after
    return None


def _session(template: ChatTemplate, mode: SessionPattern) -> Iterator[tuple[str, str]]:
    """Every text that an engine would see, in order, each with its newest message."""
    messages = _messages(mode)
    replies = [k for k, message in enumerate(messages) if message.role == "assistant"]
    for turn, k in enumerate(replies):
        thinking, thinks = _turn(mode, turn)
        if not thinks:
            messages[k] = replace(messages[k], reasoning=None)
        for end, added in ((k, messages[k - 1]), (k + 1, messages[k])):
            text = template.render(
                messages[:end],
                tools=_TOOLS if mode.tools else (),
                thinking=thinking,
                add_generation_prompt=end == k,
            )
            yield f"messages[{end - 1}] ({added.role})", text


def _turn(mode: SessionPattern, turn: int) -> tuple[ThinkingKwargs, bool]:
    """The thinking arguments of this turn, and whether the reply contains reasoning."""
    if mode.switching:
        on = turn % 4 in (0, 3)  # changes before tool results and before user messages
        return replace(mode.thinking, enable_thinking=on), on
    return mode.thinking, mode.thinking.enable_thinking is not False


def _messages(mode: SessionPattern) -> list[Message]:
    """A session with every kind of turn that the pattern allows."""
    found = [Message(role="system", content="Be brief."), _user("What is in the box?")]
    for round_ in range(3):
        if mode.tools:
            calls = tuple(
                ToolCall(id=f"{round_}{n}", name="look", arguments={"at": n, "why": "a box"})
                for n in range(2)
            )
            found += [_reply(f"Looking, round {round_}.", calls)]
            found += [
                Message(role="tool", content=f"nothing at {call.id}", tool_call_id=call.id)
                for call in calls
            ]
        if mode.users:
            found += [_reply(f"Nothing, round {round_}."), _user("Look again.")]
    return [*found, _reply("Nothing at all.")]


def _user(text: str) -> Message:
    return Message(role="user", content=text)


def _reply(text: str, calls: tuple[ToolCall, ...] = ()) -> Message:
    return Message(role="assistant", content=text, reasoning=f"Hm. {text} Sure.", tool_calls=calls)


_TOOLS = (
    ToolSpec(
        name="look",
        description="Look somewhere.",
        parameters={"type": "object", "properties": {"at": {"type": "integer"}}},
    ),
)
