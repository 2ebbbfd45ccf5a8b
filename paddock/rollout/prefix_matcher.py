"""Prefix matching: when a conversation sent by a client equals the recorded one.

Agents do not send back exactly what they received: they reformat JSON arguments, drop reasoning,
strip whitespace. A `PrefixMatcher` defines which differences are ignored. Messages are compared by
digests, so that a session need not keep their text.
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
    """Which parts of a message are compared.

    `key` gives a JSON value; messages with different keys are different. Reasoning is not part of
    the key: it "must" be sent back unchanged, "may" be left out, or is "ignored".
    """

    name: str
    key: Callable[[Message], Any]
    reasoning: Literal["must", "may", "ignored"] = "may"


def exact_key(message: Message) -> Any:
    """Everything, including the order of argument keys."""
    calls = [[call.id, call.name, _arguments_json(call)] for call in message.tool_calls]
    return [message.role, message.content, calls, message.tool_call_id]


def normalized_key(message: Message) -> Any:
    """Stripped content; tool calls by name and parsed arguments. Call ids may change."""
    calls = [(call.name, _normalized(call.arguments)) for call in message.tool_calls]
    return message.role, message.content.strip(), calls


STRICT = PrefixMatcher("strict", exact_key, "must")
LOOSE = PrefixMatcher("loose", normalized_key, "may")
MATCHERS = {matcher.name: matcher for matcher in (STRICT, LOOSE)}


def chain_digest(value: Any, before: Digest = b"") -> Digest:
    """Digest of a JSON value, chained to the digest before it.

    >>> chain_digest({"a": 1, "b": 2}) == chain_digest({"b": 2, "a": 1})
    True
    >>> chain_digest([1]) == chain_digest(["1"])
    False
    >>> chain_digest([10**30]) == chain_digest([10**30 + 1])
    False
    """
    try:
        text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # numbers beyond 64 bits
        text = json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
    return blake2b(before + text, digest_size=16).digest()


def prefix_digests(raw: Sequence[Any], length: int) -> tuple[Digest, Digest] | None:
    """Digests of the first `length` JSON values and of all; None if they cannot be serialised.

    The digest of a prefix equals that of all values in a call with the prefix alone.

    >>> prefix_digests([{"a": 1}, 2, 3], 2)[0] == prefix_digests([{"a": 1}, 2], 1)[1]
    True
    """
    try:
        first, rest = orjson.dumps(raw[:length])[1:-1], orjson.dumps(raw[length:])[1:-1]
    except TypeError:  # numbers beyond 64 bits
        return None
    found = sha256(first)  # long texts: in hardware on most machines
    before = found.digest()
    found.update(b"," + rest if first else rest)
    return before, found.digest()


def reasoning_digest(message: Message) -> Digest | None:
    """Digest of the reasoning of a reply; None if it has none."""
    text = (message.reasoning or "").strip()
    return blake2b(text.encode(), digest_size=16).digest() if text else None


def preamble_digest(
    tools: Sequence[ToolSpec], thinking: ThinkingKwargs, scaffold: Sequence[int]
) -> Digest:
    """Digest of everything before the first message: tools and the template's thinking options,
    which show in the tokens of a fixed conversation (`scaffold`)."""
    return chain_digest(
        [[json_codec.encode(tool) for tool in tools], thinking.clear_thinking, list(scaffold)]
    )


class MergedMessage(NamedTuple):
    """A message, or consecutive assistant messages merged into one."""

    message: Message
    end: int  # index of the next message


def merge_assistant_messages(messages: Sequence[Message]) -> list[MergedMessage]:
    """The conversation with consecutive assistant messages merged: some APIs split one reply into
    several messages (text, a call, more text).

    >>> replies = [Message(role="assistant", content=text) for text in ("a", "b")]
    >>> [(entry.message.content, entry.end) for entry in merge_assistant_messages(replies)]
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
    """A reply with reasoning inside its content, split into `reasoning` and `content`.

    >>> reply = split_reasoning(Message(role="assistant", content="<think>hm</think>so"))
    >>> reply.reasoning, reply.content
    ('hm', 'so')
    """
    inside = message.role == "assistant" and message.content.startswith(SpecialToken.THINK_OPEN)
    if not inside or message.reasoning or SpecialToken.THINK_CLOSE not in message.content:
        return message
    text = message.content.removeprefix(SpecialToken.THINK_OPEN)
    reasoning, _, content = text.partition(SpecialToken.THINK_CLOSE)
    return replace(message, reasoning=reasoning or None, content=content)


def join_assistant_messages(one: Message, other: Message) -> Message:
    """Two replies as one. A call id that is already taken gets a suffix."""
    ids = {call.id for call in one.tool_calls}
    calls = [_renamed(call, ids) for call in other.tool_calls]
    reasoning = (one.reasoning or "") + (other.reasoning or "")
    return replace(
        one,
        content=one.content + other.content,
        reasoning=reasoning or None,
        tool_calls=(*one.tool_calls, *calls),
    )


def _renamed(call: ToolCall, taken: set[str]) -> ToolCall:
    name = call.id
    while name in taken:
        name += "'"
    taken.add(name)
    return replace(call, id=name)


def _normalized(value: Any) -> Any:
    """Normalise numbers: JSON has one kind, and JavaScript sends back 2 for 2.0.

    >>> _normalized({"near": [2.0, 2.5, True]})
    {'near': [2, 2.5, True]}
    """
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        return {key: _normalized(item) for key, item in value.items()}
    return [_normalized(item) for item in value] if isinstance(value, list) else value


def _arguments_json(call: ToolCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)
