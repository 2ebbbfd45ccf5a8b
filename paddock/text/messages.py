"""OpenAI-style messages and tools into records."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, overload

from paddock.records import Message, Role, ToolCall, ToolSpec, json_codec
from paddock.text.tool_arguments import parse_arguments

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_OBJECT, _LIST = (
    (dict, Mapping),
    (list, tuple),
)  # isinstance is fast for dict, slow for other mappings
_MAX_CACHED_ARGUMENTS = 1024  # characters


class MessageError(ValueError):
    """An invalid message or tool; the error message starts with its path."""


def parse_messages(raw: Sequence[Mapping[str, Any]], *, first: int = 0) -> tuple[Message, ...]:
    """The messages of a chat request or a dataset; errors count them from `first` on.

    Content may be a string, a list of text parts, null or missing; reasoning may be named
    `reasoning_content` or `reasoning`; arguments may be an object or JSON text, valid or not (see
    `parse_arguments`). Calls without an id get one, and tool messages without a `tool_call_id`
    answer the calls in order.

    >>> call = {"function": {"name": "look", "arguments": '{"far": 2}'}}
    >>> call, result = parse_messages([{"role": "assistant", "content": None, "tool_calls": [call]},
    ...                                {"role": "tool", "content": "sky"}])
    >>> call.content, call.tool_calls[0].arguments["far"], result.tool_call_id
    ('', 2, 'call_0_0')
    >>> parse_messages([{"role": "user", "content": [{"type": "image_url"}]}])
    Traceback (most recent call last):
    paddock.text.messages.MessageError: messages[0].content[0]: expected text, got image_url
    """
    found: list[Message] = []
    open_calls: list[str] = []
    for i, entry in enumerate(raw, first):
        if not isinstance(entry, _OBJECT):
            raise MessageError(f"messages[{i}]: expected an object, got {entry!r:.80}")
        try:
            message = _message(entry, i, open_calls)
        except ValueError as error:
            raise MessageError(f"messages[{i}].{error}") from None
        if message.role == "assistant":
            open_calls = [call.id for call in message.tool_calls]
        elif message.tool_call_id in open_calls:
            open_calls.remove(message.tool_call_id)
        found.append(message)
    return tuple(found)


class LazyMessages(Sequence[Message]):
    """Messages of which the first `known` were parsed in an earlier turn. Those are parsed again
    only on access. The messages after them must start with an assistant message.

    >>> raw = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    >>> messages = LazyMessages(raw, known=1)
    >>> len(messages), messages[1].content, [message.role for message in messages]
    (2, 'Ho', ['user', 'assistant'])
    """

    def __init__(self, raw: Sequence[Mapping[str, Any]], *, known: int) -> None:
        self._raw, self._known = raw, known
        self._new = parse_messages(raw[known:], first=known)

    def __len__(self) -> int:
        return len(self._raw)

    @overload
    def __getitem__(self, at: int) -> Message: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Message]: ...
    def __getitem__(self, at: int | slice) -> Message | Sequence[Message]:
        indices = range(len(self._raw))[at]
        if isinstance(indices, int):
            return (
                self._new[indices - self._known] if indices >= self._known else self._all[indices]
            )
        if indices.start >= self._known and indices.step == 1:
            return self._new[indices.start - self._known : indices.stop - self._known]
        return self._all[at]

    def __iter__(self) -> Iterator[Message]:
        return iter(self._all)

    @cached_property
    def _all(self) -> tuple[Message, ...]:
        return parse_messages(self._raw) if self._known else self._new


def parse_tools(raw: Sequence[Mapping[str, Any]] | None) -> tuple[ToolSpec, ...]:
    """The tools of a request, with or without the {"type": "function", "function": ...} wrapper.
    Fields other than name, description and parameters (or Anthropic's `input_schema`) are ignored.

    >>> parse_tools([{"type": "function", "function": {"name": "look"}}])
    (ToolSpec(name='look', description='', parameters={}),)
    """
    found = []
    for i, entry in enumerate(raw or ()):
        path = f"tools[{i}]"
        if not isinstance(entry, Mapping):
            raise MessageError(f"{path}: expected an object, got {entry!r:.80}")
        function = entry.get("function", entry)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            kind = f" of type {entry['type']!r:.80}" if "type" in entry else ""
            raise MessageError(f"{path}: tool{kind} must have a name")
        parameters = function.get("parameters", function.get("input_schema"))
        try:
            found.append(
                ToolSpec(
                    name=json_codec.replace_lone_surrogates(function["name"]),
                    description=_text(function.get("description"), "description"),
                    parameters=json_codec.to_json_value({} if parameters is None else parameters),
                )
            )
        except ValueError as error:
            raise MessageError(f"{path}.{error}") from None
    return tuple(found)


def _message(entry: Mapping[str, Any], i: int, open_calls: Sequence[str]) -> Message:
    """Runs for every message of every turn, so paths are built only on error: errors start with the
    field, and the caller adds the message."""
    role = _ROLES.get(str(entry.get("role")))
    if role is None:
        known = ", ".join(_ROLES)
        raise ValueError(f"role: must be one of {known}, got {entry.get('role')!r:.80}")
    reasoning = entry.get("reasoning_content")
    if reasoning is None:
        reasoning = entry.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, str):
        raise ValueError(f"reasoning: expected text, got {reasoning!r:.80}")
    if role != "assistant" and not reasoning:
        reasoning = None  # some clients send every field with every message
    tool_call_id = None
    if role == "tool":
        tool_call_id = str(entry.get("tool_call_id") or next(iter(open_calls), f"call_{i}"))
    return Message(
        role=role,
        content=_text(entry.get("content"), "content", any_json=role == "tool"),
        reasoning=None if reasoning is None else json_codec.replace_lone_surrogates(reasoning),
        tool_calls=_calls(entry, i),
        tool_call_id=tool_call_id,
    )


def _calls(entry: Mapping[str, Any], i: int) -> tuple[ToolCall, ...]:
    calls = entry.get("tool_calls")
    if calls is None and entry.get("function_call") is not None:
        calls = [entry["function_call"]]  # the deprecated shape: one call without an id
    if not calls:
        return ()
    if not isinstance(calls, _LIST):
        raise ValueError(f"tool_calls: expected a list, got {calls!r:.80}")
    found = []
    for j, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, _OBJECT) else None
        if not isinstance(function, _OBJECT) or not isinstance(function.get("name"), str):
            raise ValueError(f"tool_calls[{j}]: must have a function name")
        arguments = function.get("arguments")
        short = isinstance(arguments, str) and len(arguments) <= _MAX_CACHED_ARGUMENTS
        make = _cached_call if short else _call
        try:
            found.append(make(str(call.get("id") or f"call_{i}_{j}"), function["name"], arguments))
        except ValueError as error:
            raise ValueError(f"tool_calls[{j}].{error}") from None
    return tuple(found)


def _call(id: str, name: str, arguments: object) -> ToolCall:
    return ToolCall(
        id=id, name=json_codec.replace_lone_surrogates(name), arguments=parse_arguments(arguments)
    )


# Agents send their whole history with every turn: most calls were parsed before.
_cached_call = lru_cache(maxsize=8192)(_call)


def _text(content: object, path: str, *, any_json: bool = False) -> str:
    """Content as one string; `any_json` also accepts other values, written as JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return json_codec.replace_lone_surrogates(content)
    if isinstance(content, _LIST) and not (any_json and not _is_parts(content)):
        return "".join(_part(part, f"{path}[{j}]") for j, part in enumerate(content))
    if any_json:
        return json.dumps(json_codec.to_json_value(content), ensure_ascii=False)
    raise ValueError(f"{path}: expected text, got {content!r:.80}")


def _is_parts(content: Sequence[object]) -> bool:
    return all(isinstance(part, str) or _kind(part) is not None for part in content)


def _kind(part: object) -> str | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else None


def _part(part: object, path: str) -> str:
    if isinstance(part, str):
        return json_codec.replace_lone_surrogates(part)
    if isinstance(part, Mapping) and _kind(part) in _TEXT_PARTS:
        text = part.get("text")
        if isinstance(text, str):
            return json_codec.replace_lone_surrogates(text)
    raise ValueError(f"{path}: expected text, got {_kind(part) or repr(part):.80}")


def message_to_openai(message: Message) -> dict[str, Any]:
    """A message in the OpenAI format, with `reasoning_content`."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found
