"""The append-only proof: whether a template goes on from what it said before.

A session of an agent is one growing sequence of tokens: prompt, reply, results, reply ... A
template that rewrites what lies behind (drops old thoughts, counts messages, says the time) would
have the model sample in one context and learn in another. `rewrite` plays a session through a
template and names the first token that changed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paddock.records import Message, ToolCall, ToolSpec
from paddock.text.chat_template import DEFAULT_THINKING, ChatTemplate, ThinkingKwargs
from paddock.text.renderer import common_prefix_length
from paddock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPattern:
    """How a session will go. A proof is for one mode."""

    thinking: ThinkingKwargs = DEFAULT_THINKING
    users: bool = True  # user messages come after replies, not only results of tools
    tools: bool = True
    switching: bool = False  # thinking is turned off for some replies and on again


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixChange:
    """What a template changed."""

    step: str  # what was added when it happened
    position: int  # of the first token that changed
    was: str  # from there on, a few tokens
    became: str

    def __str__(self) -> str:
        return (
            f"with {self.step}, token {self.position} changes: {self.was!r} becomes {self.became!r}"
        )


def find_prefix_change(
    template: ChatTemplate, tokenizer: Tokenizer, mode: SessionPattern
) -> PrefixChange | None:
    """The first change that `template` makes to the past in such a session; None if it makes none.

    Checked at every reply: the text with the reply begins with the prompt for it, and the next
    prompt begins with the text with the reply; token by token. A template that cannot render such a
    session at all raises ChatTemplateError.
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
    """Every text that an engine would see, in order, each with what is new in it."""
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
    """What is said about thinking in this turn, and whether the reply thinks."""
    if mode.switching:
        on = turn % 4 in (0, 3)  # so that it changes before results and before user messages
        return replace(mode.thinking, enable_thinking=on), on
    return mode.thinking, mode.thinking.enable_thinking is not False


def _messages(mode: SessionPattern) -> list[Message]:
    """A session in which everything happens that the mode allows."""
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
