"""When a conversation that a client sends back counts as the one that was recorded.

Agents do not send back what they got: they spell the JSON of arguments anew, leave thoughts out,
trim blanks. A `Matcher` says what makes no difference. Messages are compared by digests, so that
a session need not keep its texts for it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256
from typing import Any, Literal, NamedTuple

import orjson

from paddock.records import Message, ToolCall, ToolSpec, json_codec
from paddock.text import SpecialToken, ThinkingKwargs

Digest = bytes


@dataclass(frozen=True, slots=True)
class PrefixMatcher:
    """What of a message counts.

    `key` gives a JSON value; messages whose keys differ are different. Thoughts are no part of it:
    they "must" come back as they were, "may" be left out, or are "ignored".
    """

    name: str
    key: Callable[[Message], Any]
    reasoning: Literal["must", "may", "ignored"] = "may"


def exact_key(message: Message) -> Any:
    """Everything, down to the order of the keys of arguments."""
    calls = [[call.id, call.name, _spelled(call)] for call in message.tool_calls]
    return [message.role, message.content, calls, message.tool_call_id]


def normalized_key(message: Message) -> Any:
    """Content without blanks around it; calls by name and by the value of their arguments, however
    it was spelled. Ids of calls are names that clients may change."""
    calls = [(call.name, _value(call.arguments)) for call in message.tool_calls]
    return message.role, message.content.strip(), calls


STRICT = PrefixMatcher("strict", exact_key, "must")
LOOSE = PrefixMatcher("loose", normalized_key, "may")
MATCHERS = {matcher.name: matcher for matcher in (STRICT, LOOSE)}


def chain_digest(value: Any, before: Digest = b"") -> Digest:
    """Of a JSON value and, in a chain, of all that came before it.

    >>> chain_digest({"a": 1, "b": 2}) == chain_digest({"b": 2, "a": 1}), chain_digest([1]) == chain_digest(["1"])
    (True, False)
    >>> chain_digest([10**30]) == chain_digest([10**30 + 1])
    False
    """
    try:
        text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # numbers beyond 64 bits
        text = json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
    return blake2b(before + text, digest_size=16).digest()


def prefix_digests(raw: Sequence[Any], length: int) -> tuple[Digest, Digest] | None:
    """Of JSON values, the first `length` of them and all; None if they cannot be written. One call
    may count as first what was all in another.

    >>> prefix_digests([{"a": 1}, 2, 3], 2)[0] == prefix_digests([{"a": 1}, 2], 1)[1]
    True
    """
    try:
        first, rest = orjson.dumps(raw[:length])[1:-1], orjson.dumps(raw[length:])[1:-1]
    except TypeError:  # numbers beyond 64 bits
        return None
    found = sha256(first)  # of long texts: in hardware, on most machines
    before = found.digest()
    found.update(b"," + rest if first else rest)
    return before, found.digest()


def reasoning_digest(message: Message) -> Digest | None:
    """Of what a reply thought; None if it shows none."""
    said = (message.reasoning or "").strip()
    return blake2b(said.encode(), digest_size=16).digest() if said else None


def preamble_digest(
    tools: Sequence[ToolSpec], thinking: ThinkingKwargs, scaffold: Sequence[int]
) -> Digest:
    """Of what stands before the first message: the tools, and what the template says about
    thinking, which shows in the tokens of a fixed conversation (`scaffold`)."""
    return chain_digest(
        [[json_codec.encode(tool) for tool in tools], thinking.clear_thinking, list(scaffold)]
    )


class MergedMessage(NamedTuple):
    """A message, or replies that follow each other and are one."""

    message: Message
    end: int  # index of the message after it


def merge_assistant_messages(messages: Sequence[Message]) -> list[MergedMessage]:
    """The conversation with replies that follow each other joined: some dialects tell one reply as
    several (words, a call, more words).

    >>> said = [Message(role="assistant", content=text) for text in ("a", "b")]
    >>> [(entry.abort_reason.content, entry.end) for entry in merge_assistant_messages(said)]
    [('ab', 2)]
    """
    found: list[MergedMessage] = []
    before = ""
    for end, message in enumerate(map(split_reasoning, messages), start=1):
        if before == message.role == "assistant":
            found[-1] = MergedMessage(join_assistant_messages(found[-1].message, message), end)
        else:
            found.append(MergedMessage(message, end))
        before = message.role
    return found


def split_reasoning(message: Message) -> Message:
    """A reply whose thoughts stand inside its content, where some clients are told them and others
    put them, with the thoughts apart.

    >>> said = split_reasoning(Message(role="assistant", content="<think>hm</think>so"))
    >>> said.reasoning, said.content
    ('hm', 'so')
    """
    inside = message.role == "assistant" and message.content.startswith(SpecialToken.THINK_OPEN)
    if not inside or message.reasoning or SpecialToken.THINK_CLOSE not in message.content:
        return message
    said = message.content.removeprefix(SpecialToken.THINK_OPEN)
    thought, _, content = said.partition(SpecialToken.THINK_CLOSE)
    return replace(message, reasoning=thought or None, content=content)


def join_assistant_messages(one: Message, other: Message) -> Message:
    """Two replies as one. Calls that have the same id keep the first's, as two cannot share it."""
    ids = {call.id for call in one.tool_calls}
    calls = [_renamed(call, ids) for call in other.tool_calls]
    thoughts = (one.reasoning or "") + (other.reasoning or "")
    return replace(
        one,
        content=one.content + other.content,
        reasoning=thoughts or None,
        tool_calls=(*one.tool_calls, *calls),
    )


def _renamed(call: ToolCall, taken: set[str]) -> ToolCall:
    name = call.id
    while name in taken:
        name += "'"
    taken.add(name)
    return replace(call, id=name)


def _value(spelled: Any) -> Any:
    """JSON has one kind of number: JavaScript sends 2 back for 2.0.

    >>> _value({"near": [2.0, 2.5, True]})
    {'near': [2, 2.5, True]}
    """
    if isinstance(spelled, float):
        return int(spelled) if spelled.is_integer() else spelled
    if isinstance(spelled, Mapping):
        return {key: _value(item) for key, item in spelled.items()}
    return [_value(item) for item in spelled] if isinstance(spelled, list) else spelled


def _spelled(call: ToolCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)
